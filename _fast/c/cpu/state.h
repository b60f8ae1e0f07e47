/* Layers with states: what drivers hand to the kernels, as kernels.h has it for the other operations.
 *
 * A row's state lies in the pages of runs (engine/kernels/state/places.py). A step reads the state behind `base` tokens and
 * the inputs of later positions from the row's ring, and leaves states behind further positions. One thread computes its
 * part of a row from the first position to the last, and reads what the ring has of that part before it writes there.
 * Sums over the rows of a state run in order, a lane a column: no bit depends on threads, portions or other rows. */
#ifndef OMNILOOP_STATE_H
#define OMNILOOP_STATE_H

#include <stdint.h>

enum { KEY_MAX = 256 }; /* rows of a head's state; columns of a part of the convolution */
enum { TAPS_MAX = 8 };    /* of a short convolution */
#define UNIT_EPS 1e-6f    /* added to the sum of squares of a query and of a key */
enum { TARGETS = 5 };     /* runs that a row may leave: behind its new base, and four checkpoints */
enum { UNIT = 64 };       /* channels that one thread computes at a time */
enum { FEW_STATES = 64 }; /* numbers of a channel's state, Mamba-1 */

/* A part of a state or of a ring; rows per position where it is a ring's. */
struct place {
    long first, per_page, rows, width;
    int bf16;
};

/* Rows of a step, as StateMeta has them. */
struct steps {
    uint8_t *pages;
    const int32_t *runs;
    const int32_t *base_run, *write_run, *tail_run, *base, *new_base, *query_start, *start;
    const int32_t *checkpoint_run, *checkpoint_at; /* [rows, TARGETS - 1] */
    long page_stride, runs_stride, rows, ring;
};

/* Positions begin .. stop - 1 of one row, computed at a time. The first span of a row begins at its base. */
struct span {
    long token; /* the batch's, at position `start` */
    long base, start, end, tail_from; /* tail_from: the first position whose inputs the ring gets */
    long begin, stop, line;           /* line: of `begin` in work buffers */
    const int32_t *base_blocks, *tail_blocks;
    long targets, at[TARGETS]; /* behind how many tokens a state is left, and in which blocks */
    const int32_t *blocks[TARGETS];
};

/* out[line] = silu(bias + sum over j of taps[j] * input of the position j before). */
struct convolution {
    const struct steps *steps;
    void *out;         /* [lines, width] */
    const void *x;     /* [tokens, width], x_stride apart */
    const float *taps; /* [count, width], the token's own first */
    const float *bias; /* [width] or NULL */
    struct place before, inputs; /* of x's type: the count - 1 inputs before a base, and the ring's */
    long x_stride, width, count;
    int bf16, out_bf16;
};

/* Columns of the convolution, one thread's. */
struct columns {
    long begin, end;
    const struct place *tail; /* the ring gets what comes out, rounded to this place's type, from column tail_column on; or NULL */
    long tail_column;
    float scale; /* not 0: what comes out is divided by its norm, then multiplied by this */
};

/* step = softplus(x + bias), rate = -exp(a_log[i / share]). With `times`: the ring gets steps, decay = exp(rate * step);
 * without: the ring gets rate * step, and decay is the exponential of that. */
struct gates {
    const struct steps *steps;
    const void *x;      /* [tokens, width], x_stride apart */
    const float *bias;  /* [width] */
    const float *a_log; /* [width / share] */
    float *times;       /* [lines, width] or NULL */
    float *decay;       /* [lines, width] */
    struct place place; /* float32 */
    long x_stride, width, share;
    int bf16;
};

/* engine/kernels/state/delta.py; x [tokens, q | k | v | z | b | a]. Below `norm_bf16`: the driver's. */
struct delta {
    struct steps steps;
    void *out;     /* [tokens, value_heads * value_dim] */
    const void *x;
    const float *taps, *a_log, *dt_bias;
    const void *norm;
    struct place state, before, keys, deltas, gates, inputs;
    long tokens, x_stride, key_heads, value_heads, key_dim, value_dim, count;
    float eps;
    int per_channel, sigmoid, bf16, norm_bf16;
    const struct span *spans;
    long first_token; /* of the portion */
    float *active, *decay, *beta; /* [lines, conv width], [lines, gates], [lines, value_heads] */
    float *found;                 /* [tokens of the portion, value_heads * value_dim] */
    const float *carry_in;        /* the state of the row that goes on from, or into, another portion */
    float *carry_out;
};

enum norm_order { NORM_NONE, NORM_BEFORE_GATE, NORM_BEHIND_GATE };

/* engine/kernels/state/ssd.py; x [tokens, z | x | B | C | dt]. */
struct ssd {
    struct steps steps;
    void *out; /* [tokens, heads * head_dim] */
    const void *x;
    const float *taps, *bias, *a_log, *dt_bias, *d;
    const void *norm;
    struct place state, before, again, times, inputs;
    long tokens, x_stride, heads, head_dim, groups, state_size, count;
    float eps;
    int order, bf16, norm_bf16;
    const struct span *spans;
    long first_token;
    float *active, *decay, *steps_of; /* [lines, conv width], [lines, heads] twice */
    float *found;                     /* [tokens of the portion, heads * head_dim] */
    const float *carry_in;
    float *carry_out;
};

/* engine/kernels/state/selective.py: the rule behind the products. */
struct selective {
    struct steps steps;
    void *out;     /* [tokens, inner] */
    const void *x, *dt, *b, *c, *z;
    const float *a_log, *dt_bias, *d;
    struct place state, values, times, keys; /* the ring's of x's type */
    long tokens, inner, state_size, x_stride, dt_stride, b_stride, c_stride, z_stride;
    int bf16;
    const struct span *spans;
    float *few; /* [lines, B | C] */
};

/* Each returns 0, or -1 when memory for work buffers is out. Tokens behind the rows' get zeros. */
int op_delta(const struct delta *call);
int op_ssd(const struct ssd *call);
int op_selective(const struct selective *call);
int op_convolution(const struct convolution *call, long tokens);

#endif
