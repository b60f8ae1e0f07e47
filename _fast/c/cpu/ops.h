/* The operations that _fast.cpu calls: they take a description, divide the work among the pool, and write in place. */
#ifndef OMNILOOP_OPS_H
#define OMNILOOP_OPS_H

#include "kernels.h"
#include "pool.h"

/* Functions with a result return 0, or -1 if there is no memory for a work buffer. op_linear does not read call->x: x,
 * of either type, is a separate argument. */
int op_linear(const struct linear *call, const void *x, long x_stride, int x_bf16);
void op_norm(const struct norm *call);
void op_point(const struct point *call);
void op_qkv(const struct qkv *call);
int op_attention(const struct attention *call);

#endif
