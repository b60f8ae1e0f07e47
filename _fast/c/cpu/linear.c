/* Shares a linear layer out: panels for few rows, panels by blocks of rows for many. */
#include "ops.h"

struct share {
    const struct linear *call;
    long panels, block, blocks;
};

/* Tasks run through the panels of one block of rows before the next block: a thread's rows stay in its cache. */
static void run_tasks(const void *context, long begin, long end) {
    const struct share *share = context;
    for (long task = begin; task < end; task++) {
        const long first = task / share->panels * share->block;
        const long last = first + share->block < share->call->rows ? first + share->block : share->call->rows;
        kernels()->linear_block(share->call, task % share->panels, first, last);
    }
}

struct widening {
    float *out;
    const uint16_t *x;
    long width, stride;
};

static void widen_rows(const void *context, long begin, long end) {
    const struct widening *w = context;
    for (long row = begin; row < end; row++) kernels()->widen(w->out + row * w->width, w->x + row * w->stride, w->width);
}

int op_linear(const struct linear *given, int x_bf16) {
    struct linear call = *given;
    if (x_bf16) {
        float *wide = pool_scratch((size_t)(call.rows * call.depth) * sizeof(float));
        if (wide == NULL) return -1;
        const struct widening w = {wide, (const uint16_t *)(const void *)call.x, call.depth, call.x_stride};
        parallel_for(call.rows, 1 + 32768 / (call.depth + 1), widen_rows, &w);
        call.x = wide, call.x_stride = call.depth;
    }
    const long panels = (call.columns + PANEL - 1) / PANEL;
    const long blocks = (call.rows + ROW_BLOCK - 1) / ROW_BLOCK;
    const struct share share = {&call, panels, (call.rows + blocks - 1) / (blocks > 0 ? blocks : 1), blocks};
    /* Below about 4 microseconds of work another thread is not worth calling. */
    const long work = call.depth * PANEL * share.block;
    const long grain = work > 65536 ? 1 : 65536 / (work + 1) + 1;
    parallel_for(panels * blocks, grain, run_tasks, &share);
    return 0;
}
