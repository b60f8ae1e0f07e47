/* The table of functions of one instruction set, and the descriptions of calls that drivers pass to it.
 *
 * The bodies (body_*.h) are written once over vec.h and compiled per instruction set by isa_*.c; kernels() chooses one
 * table at first use. Strides and widths are in elements. Tensors are float32, or bfloat16 if the call's `bf16` is set;
 * arithmetic is float32. The order of every sum is fixed by its length. */
#ifndef OMNILOOP_KERNELS_H
#define OMNILOOP_KERNELS_H

#include <stdint.h>

#include "state.h"

enum { PANEL = 64 };      /* output columns of a panel of packed weights; keys in a tile of attention */
enum { ROW_BLOCK = 128 };  /* most rows of one call of linear_block */
enum { K_BLOCK = 512 };    /* columns of x, and depth of a panel, that are processed at a time; both fit the caches */
enum { X_STRIDE = K_BLOCK + 16 }; /* floats between rows of x; not a power of two, to avoid conflicts in cache sets */
enum { SEGMENT = 512 };   /* keys between two merges of attention's running sums */
enum { PAIRS = 48 };      /* (query, head) pairs that share a tile of keys */
enum { HEAD_MAX = 512 };  /* widest head */
enum { NORM_MAX = 16384 }; /* widest row of a norm */

/* out[m, n] = sum_k x[m, k] w[n, k] + bias[n] + residual[m, n]; or activate(first half, second half), per panel. */
struct linear {
    void *out;            /* [rows, columns] */
    const float *x;       /* [rows, depth] as spread_rows leaves it */
    const void *panels;   /* [ceil(columns / 64), depth, 64] */
    const float *bias;    /* [panels * 64] or NULL */
    const void *residual; /* [rows, columns] of out's type, or NULL; may be out itself */
    long rows, depth, columns;
    long out_stride, residual_stride;
    int out_bf16, weight_bf16;
    int gated; /* panels hold 32 gate rows, then their 32 up rows; out has columns / 2 columns */
    int activation; /* activation of a gated layer */
    int form; /* FLOATS, else panels are codes and the following fields are read */
    const void *scales;  /* [panels, groups, 64] float32 or bfloat16 */
    const float *row_scales; /* [panels * 64] or NULL */
    const void *zeros; /* [panels, groups, 64] int8 or float32, the value that means zero, or NULL */
    long group; /* columns of x that share a scale; the last group may be shorter */
    int scales_bf16, zeros_f32;
    const float *x_scales; /* [rows]: x and the values (INT8) are integers of at most 8 bits; or NULL */
};

/* Weight of a code: (value - zero) * scale * row_scale. INT4 (value: code - 8), E2M1 and NF4: [panels, depth, 8] 32-bit
 * words; field v (4 bits) of word l is output 8 v + l, so vectors need only shifts. INT8, E4M3: [panels, depth, 64]. */
enum weight_form { FLOATS, INT4, E2M1, NF4, INT8, E4M3 };

struct spreading {
    float *out;    /* [ceil(depth / K_BLOCK), rows, X_STRIDE] */
    const void *x; /* [rows, depth] */
    long rows, depth, x_stride;
    int bf16;
};

enum row_op { RMS_NORM, LAYER_NORM };
/* The same numbers as in engine/kernels/activation. ACT_CLAMPED_SWIGLU takes gate and up; others f(x) or f(gate) up */
enum activation { ACT_SILU, ACT_GELU_TANH, ACT_CLAMPED_SWIGLU, ACT_GELU, ACT_RELU, ACT_RELU2, ACT_QUICK_GELU, ACT_SIGMOID };
#define SWIGLU_ALPHA 1.702f
#define SWIGLU_LIMIT 7.0f
#define QUICK_GELU_ALPHA 1.702f
enum { PLAIN = 8 }; /* op of a call: an activation of gate and up, or PLAIN + an activation of x */

struct norm {
    void *out;     /* [rows, width] */
    const void *x; /* [rows, width] */
    const void *weight, *bias; /* [width]; bias may be NULL */
    long rows, width, x_stride;
    float eps, offset;
    int op, bf16, weight_bf16;
};

struct point {
    void *out;     /* [rows, width] */
    const void *x; /* [rows, width], or [rows, 2 * width] for a GLU: gate, then up; rows x_stride apart */
    const void *up; /* of a GLU: [rows, width], or NULL: behind gate */
    long rows, width, x_stride;
    int op, bf16;
};

/* Types of keys and values in a cache: floats, or 8-bit codes that are multiplied by a scale. */
enum cache_type { CACHE_F32, CACHE_BF16, CACHE_E4M3, CACHE_E5M2 };

/* Scales of codes: one per token and KV head [blocks, kv_heads, block_size], computed when the token is stored, blocks
 * `stride` floats apart; or, with stride 0, given read-only scales [kv_heads]; NULL: codes are the values. */
struct scales {
    float *k, *v;
    long stride;
};

struct qkv {
    void *q;            /* [tokens, heads, dim] */
    void *k_cache, *v_cache; /* [blocks, kv_heads, block_size, dim], blocks block_stride apart; NULL: not stored */
    struct scales scales;
    const void *qkv;    /* [tokens, (heads + 2 kv_heads) * dim] */
    const float *cos, *sin; /* [tokens, half] */
    const void *q_norm, *k_norm; /* [dim] or NULL */
    const void *slots;  /* [tokens] int64 or int32; negative: not stored */
    long tokens, qkv_stride, heads, kv_heads, dim, half, block_size, block_stride;
    float eps;
    int bf16, norm_bf16, cache_type, slots_wide;
};

struct attention {
    void *out;     /* [tokens, heads, dim] */
    float *states; /* split contexts: partial sums per unit and segment; else NULL */
    const void *q; /* [tokens, heads, dim] */
    const void *k, *v; /* paged: [blocks, kv_heads, block_size, dim], blocks block_stride apart;
                          dense: [tokens, kv_heads, dim] */
    struct scales scales; /* paged only */
    const int32_t *tables; /* [rows, max_blocks], or NULL for dense */
    const int32_t *starts; /* [rows + 1] offsets of the rows' queries (dense: of keys, too) */
    const int32_t *lengths; /* [rows] numbers of keys, including this step's; NULL for dense */
    const float *sinks; /* [heads] logits that are added to the softmax's sum and have no value, or NULL */
    const float *bias; /* dense: [heads, 2 reach + 1], added to scores by key - query in -reach .. reach; or NULL */
    const int32_t *last_keys; /* [tokens] last visible key of each, or ~key if no window hides keys; NULL: its own */
    long rows, heads, kv_heads, dim, max_blocks, block_size, block_stride;
    long q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride; /* strides of k and v: dense only */
    long window; /* keys that a query sees on each side, including itself; 0: all; -n: keys in its chunk of n */
    long first_key; /* earlier keys are hidden from every query */
    long reach;
    int causal, bf16, kv_type; /* kv_type: enum cache_type */
    float scale, softcap;
};

/* Up to PAIRS consecutive (query, head of the group) pairs of one row and one KV head. */
struct unit {
    long row, kv_head, pair_begin, pair_end;
};

struct kernels {
    const char *name;
    void (*linear_block)(const struct linear *call, long panel, long row_begin, long row_end);
    void (*spread_rows)(const struct spreading *call, long begin, long end);
    void (*norm_rows)(const struct norm *call, long begin, long end);
    void (*point_rows)(const struct point *call, long begin, long end);
    void (*qkv_tokens)(const struct qkv *call, long begin, long end);
    void (*attend)(const struct attention *call, const struct unit *unit);
    void (*attend_segment)(const struct attention *call, const struct unit *unit, long segment, float *state);
    void (*merge_segments)(const struct attention *call, const struct unit *unit, long segments, float *states);
    void (*convolve)(const struct convolution *call, const struct span *span, const struct columns *columns);
    void (*state_gates)(const struct gates *call, const struct span *span, long begin, long end);
    void (*delta_betas)(const struct delta *call, const struct span *span);
    void (*delta_head)(const struct delta *call, const struct span *span, long head);
    void (*ssd_head)(const struct ssd *call, const struct span *span, long head);
    void (*ssd_gate)(const struct ssd *call, long begin, long end);
    void (*selective_keys)(const struct selective *call, const struct span *span);
    void (*selective_channels)(const struct selective *call, const struct span *span, long first, long end);
};

const struct kernels *kernels(void);
/* For tests: use at most 0 = plain, 1 = AVX2, 2 = AVX-512; returns the level now in use. */
int kernels_limit(int level);
/* Number of floats of a partial state: PAIRS maxima, PAIRS sums, PAIRS rows of the head's width rounded up to 64. */
long attention_state_floats(long dim);

#endif
