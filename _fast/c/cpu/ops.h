/* The operations as _fast.cpu calls them: a description in, work shared out over the pool, results in place. */
#ifndef OMNILOOP_OPS_H
#define OMNILOOP_OPS_H

#include "kernels.h"
#include "pool.h"

/* Those with a result return 0, or -1 when memory for a work buffer is out. op_linear does not read call->x: x, of
 * either type, is an argument of its own. */
int op_linear(const struct linear *call, const void *x, long x_stride, int x_bf16);
void op_norm(const struct norm *call);
void op_point(const struct point *call);
void op_qkv(const struct qkv *call);
int op_attention(const struct attention *call);

#endif
