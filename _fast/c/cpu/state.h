/* Layers with states: the structures that drivers pass to the kernels; kernels.h has those of the other operations.
 *
 * A row's state lies in the pages of runs (engine/kernels/state/places.py). A step reads the state after `base` tokens
 * and, from the row's ring, the inputs of later positions; it writes states after further positions. One thread computes
 * its part of a row from the first position to the last, and reads that part of the ring before it writes there.
 * Sums over the rows of a state run in order, one lane per column: no bit depends on threads, portions or other rows. */
#ifndef OMNILOOP_STATE_H
#define OMNILOOP_STATE_H

#include <stdint.h>

enum { KEY_MAX = 256 }; /* most rows of a head's state, and most columns of a task of the convolution */
enum { TAPS_MAX = 8 };    /* most taps of a short convolution */
#define UNIT_EPS 1e-6f    /* added to the sum of squares of a query and of a key */
enum { TARGETS = 5 };     /* states that a row may leave: at its new base, and four checkpoints */
enum { UNIT = 64 };       /* channels of one task */
enum { FEW_STATES = 64 }; /* most numbers of a channel's state, Mamba-1 */

/* The place of a part of a state or of a ring; `rows` counts the whole state, or one position of a ring. */
struct place {
    long first, per_page, rows, width;
    int bf16;
};

/* Rows of a step; fields as in StateMeta. */
struct steps {
    uint8_t *pages;
    const int32_t *runs;
    const int32_t *base_run, *write_run, *tail_run, *base, *new_base, *query_start, *start;
    const int32_t *checkpoint_run, *checkpoint_at; /* [rows, TARGETS - 1] */
    long page_stride, runs_stride, rows, ring;
};

/* Positions begin .. stop - 1 of one row, computed in one portion. The first span of a row begins at its base. */
struct span {
    long token; /* index in the batch of position `start` */
    long base, start, end, tail_from; /* tail_from: first position that goes into the ring */
    long begin, stop, line;           /* line: index of `begin` in work buffers */
    const int32_t *base_blocks, *tail_blocks;
    long targets, at[TARGETS]; /* numbers of tokens after which states are due; `blocks`: their runs */
    const int32_t *blocks[TARGETS];
};

/* out[line] = silu(bias + sum over j of taps[j] * input of the position j earlier). */
struct convolution {
    const struct steps *steps;
    void *out;         /* [lines, width] */
    const void *x;     /* [tokens, width], x_stride apart */
    const float *taps; /* [count, width], the token's own tap first */
    const float *bias; /* [width] or NULL */
    struct place before, inputs; /* of x's type: count - 1 inputs before a base; the ring's inputs */
    long x_stride, width, count;
    int bf16, out_bf16;
};

/* Columns of the convolution, of one task. */
struct columns {
    long begin, end;
    const struct place *tail; /* NULL, or where the ring gets results, rounded, from tail_column on */
    long tail_column;
    float scale; /* not 0: results are divided by their norm, then multiplied by scale */
};

/* step = softplus(x + bias), rate = -exp(a_log[i / share]), decay = exp(rate * step). The ring gets `step` if `times` is
 * set, otherwise rate * step. */
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

/* engine/kernels/state/delta.py; x [tokens, q | k | v | z | b | a]. The driver sets the fields after `norm_bf16`. */
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
    long first_token; /* first token of the portion */
    float *active, *decay, *beta; /* [lines, conv width], [lines, gates], [lines, value_heads] */
    float *found;                 /* [tokens of the portion, value_heads * value_dim] */
    const float *carry_in;        /* state of the row that an earlier portion began; carry_out: that a later one ends */
    float *carry_out;
};

enum norm_order { NORM_NONE, NORM_BEFORE_GATE, NORM_BEHIND_GATE, NORM_BARE }; /* NORM_BARE: no gate either */

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

/* engine/kernels/state/selective.py: the rule, after the products. */
struct selective {
    struct steps steps;
    void *out;     /* [tokens, inner] */
    const void *x, *dt, *b, *c, *z;
    const float *a_log, *dt_bias, *d;
    struct place state, values, times, keys; /* parts of the ring have x's type */
    long tokens, inner, state_size, x_stride, dt_stride, b_stride, c_stride, z_stride;
    int bf16;
    const struct span *spans;
    float *few; /* [lines, B | C] */
};

/* Each returns 0, or -1 if no memory is left for work buffers. Tokens after the rows' tokens get zeros. */
int op_delta(const struct delta *call);
int op_ssd(const struct ssd *call);
int op_selective(const struct selective *call);
int op_convolution(const struct convolution *call, long tokens);

#endif
