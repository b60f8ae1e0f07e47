/* Divides a linear layer into tasks: panels for few rows, panels by blocks of rows for many rows. */
#include "ops.h"

enum { HELPINGS = 4, ROWS_AT_ONCE = 512 };

struct share {
    const struct linear *call;
    long panels, block, blocks;
};

/* Tasks cover all panels of a block of rows before the next block, so that a thread's rows stay in its cache. */
static void run_tasks(const void *context, long begin, long end) {
    const struct share *share = context;
    for (long task = begin; task < end; task++) {
        const long first = task / share->panels * share->block;
        const long last = first + share->block < share->call->rows ? first + share->block : share->call->rows;
        kernels()->linear_block(share->call, task % share->panels, first, last);
    }
}

static void run_spreading(const void *call, long begin, long end) { kernels()->spread_rows(call, begin, end); }

/* At most ROWS_AT_ONCE rows, to bound the work buffer. This costs nothing: panels are read once per ROW_BLOCK. */
static int run_rows(const struct linear *given, const void *x, long x_stride, int x_bf16) {
    struct linear call = *given;
    if (call.rows == 1 && !x_bf16 && call.depth <= K_BLOCK) {
        call.x = x;
    } else {
        const long blocks = (call.depth + K_BLOCK - 1) / K_BLOCK;
        float *spread = pool_scratch((size_t)(blocks * call.rows * X_STRIDE) * sizeof(float));
        if (spread == NULL) return -1;
        const struct spreading job = {spread, x, call.rows, call.depth, x_stride, x_bf16};
        parallel_for(call.rows, 1 + 65536 / (call.depth + 1), run_spreading, &job);
        call.x = spread;
    }
    const long panels = (call.columns + PANEL - 1) / PANEL;
    const long blocks = (call.rows + ROW_BLOCK - 1) / ROW_BLOCK;
    const struct share share = {&call, panels, (call.rows + blocks - 1) / blocks, blocks};
    /* For less than about 4 microseconds of work another thread does not pay. */
    const long work = call.depth * PANEL * share.block;
    const long least = work > 65536 ? 1 : 65536 / (work + 1) + 1;
    /* A thread gets adjacent panels, because each prefetches the next; a few portions per thread balance the load. */
    const long even = panels * blocks / (HELPINGS * pool_threads());
    parallel_for(panels * blocks, even > least ? even : least, run_tasks, &share);
    return 0;
}

int op_linear(const struct linear *given, const void *x, long x_stride, int x_bf16) {
    const long size = given->out_bf16 ? 2 : 4;
    for (long first = 0; first < given->rows; first += ROWS_AT_ONCE) {
        struct linear call = *given;
        call.rows = given->rows - first < ROWS_AT_ONCE ? given->rows - first : ROWS_AT_ONCE;
        call.out = (char *)given->out + first * given->out_stride * size;
        if (given->residual != NULL)
            call.residual = (const char *)given->residual + first * given->residual_stride * size;
        if (given->x_scales != NULL) call.x_scales = given->x_scales + first;
        if (run_rows(&call, (const char *)x + first * x_stride * (x_bf16 ? 2 : 4), x_stride, x_bf16) != 0) return -1;
    }
    return 0;
}
