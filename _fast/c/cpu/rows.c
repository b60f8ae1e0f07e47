/* Divides rows and tokens among threads: norms, activations, rotation with the store into the caches. */
#include "ops.h"

enum { WORTH = 16384 }; /* with fewer elements another thread does not pay */

static void run_norm(const void *call, long begin, long end) { kernels()->norm_rows(call, begin, end); }
static void run_point(const void *call, long begin, long end) { kernels()->point_rows(call, begin, end); }
static void run_qkv(const void *call, long begin, long end) { kernels()->qkv_tokens(call, begin, end); }

void op_norm(const struct norm *call) { parallel_for(call->rows, WORTH / (call->width + 1) + 1, run_norm, call); }

void op_point(const struct point *call) { parallel_for(call->rows, WORTH / 2 / (call->width + 1) + 1, run_point, call); }

void op_qkv(const struct qkv *call) {
    const long width = (call->heads + 2 * call->kv_heads) * call->dim;
    parallel_for(call->tokens, WORTH / (width + 1) + 1, run_qkv, call);
}
