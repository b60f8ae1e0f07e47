/* Norms, activations, rotation and the store into the caches: one row or token at a time, over vec.h. */

/* Sums run in four vectors, then over their lanes: this order depends only on the width. */
enum { LANES = 4 };

static float square_sum(const float *x, long width, float centre) {
    vf sum[LANES] = {v_zero(), v_zero(), v_zero(), v_zero()};
    const vf c = v_set(centre);
    long i = 0;
    for (; i + LANES * W <= width; i += LANES * W)
#pragma GCC unroll 4
        for (int l = 0; l < LANES; l++) {
            vf d = v_load(x + i + l * W) - c;
            sum[l] = v_fma(d, d, sum[l]);
        }
    for (int l = 0; i + W <= width; i += W, l++) {
        vf d = v_load(x + i) - c;
        sum[l] = v_fma(d, d, sum[l]);
    }
    float rest = 0.0f;
    for (; i < width; i++) rest += (x[i] - centre) * (x[i] - centre);
    return v_sum((sum[0] + sum[1]) + (sum[2] + sum[3])) + rest;
}

static float mean_square(const float *x, long width, float centre) { return square_sum(x, width, centre) / (float)width; }

static float mean(const float *x, long width) {
    vf sum[LANES] = {v_zero(), v_zero(), v_zero(), v_zero()};
    long i = 0;
    for (; i + LANES * W <= width; i += LANES * W)
#pragma GCC unroll 4
        for (int l = 0; l < LANES; l++) sum[l] += v_load(x + i + l * W);
    for (int l = 0; i + W <= width; i += W, l++) sum[l] += v_load(x + i);
    float rest = 0.0f;
    for (; i < width; i++) rest += x[i];
    return (v_sum((sum[0] + sum[1]) + (sum[2] + sum[3])) + rest) / (float)width;
}

INLINE void norm_row(const struct norm *call, long row, int op, int bf16, float *wide) {
    const long width = call->width;
    for (long i = 0; i < width; i += W) {
        t_store(wide, i, t_load(call->x, row * call->x_stride + i, width - i, bf16), width - i, 0);
    }
    const float centre = op == LAYER_NORM ? mean(wide, width) : 0.0f;
    const vf scale = v_set(1.0f / __builtin_sqrtf(mean_square(wide, width, centre) + call->eps));
    for (long i = 0; i < width; i += W) {
        vf x = (t_load(wide, i, width - i, 0) - v_set(centre)) * scale;
        vf w = t_load(call->weight, i, width - i, call->weight_bf16) + v_set(call->offset);
        if (op == LAYER_NORM && call->bias != NULL)
            x = v_fma(x, w, t_load(call->bias, i, width - i, call->weight_bf16));
        else
            x = x * w;
        t_store(call->out, row * width + i, x, width - i, bf16);
    }
}

static void norm_rows(const struct norm *call, long begin, long end) {
    /* Models have no wider rows; the driver checks this. */
    _Alignas(64) float wide[NORM_MAX];
    for (long row = begin; row < end; row++) {
        switch (call->op * 2 + call->bf16) {
        case RMS_NORM * 2: norm_row(call, row, RMS_NORM, 0, wide); break;
        case RMS_NORM * 2 + 1: norm_row(call, row, RMS_NORM, 1, wide); break;
        case LAYER_NORM * 2: norm_row(call, row, LAYER_NORM, 0, wide); break;
        default: norm_row(call, row, LAYER_NORM, 1, wide); break;
        }
    }
}

INLINE void point_row(const struct point *call, long row, int op, int bf16) {
    const int gated = op < PLAIN;
    const long width = call->width, start = row * call->x_stride;
    const void *up = call->up == NULL ? call->x : call->up;
    const long up_start = call->up == NULL ? start + width : row * width;
    for (long i = 0; i < width; i += W) {
        vf x = t_load(call->x, start + i, width - i, bf16);
        if (gated) x = v_activate(x, t_load(up, up_start + i, width - i, bf16), op);
        else x = v_point(x, op - PLAIN);
        t_store(call->out, row * width + i, x, width - i, bf16);
    }
}

#define POINT_CASES(op)                                    \
    case (op) * 2: point_row(call, row, op, 0); break;     \
    case (op) * 2 + 1: point_row(call, row, op, 1); break;

static void point_rows(const struct point *call, long begin, long end) {
    for (long row = begin; row < end; row++) {
        switch (call->op * 2 + call->bf16) {
        POINT_CASES(ACT_SILU)
        POINT_CASES(ACT_GELU_TANH)
        POINT_CASES(ACT_CLAMPED_SWIGLU)
        POINT_CASES(ACT_GELU)
        POINT_CASES(ACT_RELU)
        POINT_CASES(ACT_RELU2)
        POINT_CASES(ACT_QUICK_GELU)
        POINT_CASES(ACT_SIGMOID)
        POINT_CASES(PLAIN + ACT_SILU)
        POINT_CASES(PLAIN + ACT_GELU_TANH)
        POINT_CASES(PLAIN + ACT_GELU)
        POINT_CASES(PLAIN + ACT_RELU)
        POINT_CASES(PLAIN + ACT_RELU2)
        POINT_CASES(PLAIN + ACT_QUICK_GELU)
        POINT_CASES(PLAIN + ACT_SIGMOID)
        default: break;
        }
    }
}

/* Reads one head, and normalises and rotates it if requested. */
INLINE void turn_head(const struct qkv *call, const void *x, long from, const void *norm, const float *cos,
                      const float *sin, float *head) {
    const long dim = call->dim, half = call->half;
    for (long i = 0; i < dim; i += W) t_store(head, i, t_load(x, from + i, dim - i, call->bf16), dim - i, 0);
    if (norm != NULL) {
        const vf scale = v_set(1.0f / __builtin_sqrtf(mean_square(head, dim, 0.0f) + call->eps));
        for (long i = 0; i < dim; i += W) {
            vf w = t_load(norm, i, dim - i, call->norm_bf16);
            t_store(head, i, t_load(head, i, dim - i, 0) * scale * w, dim - i, 0);
        }
    }
    for (long i = 0; cos != NULL && i < half; i += W) {
        const long n = half - i;
        vf a = t_load(head, i, n, 0), b = t_load(head, half + i, n, 0);
        vf c = t_load(cos, i, n, 0), s = t_load(sin, i, n, 0);
        t_store(head, i, v_fma(a, c, -(b * s)), n, 0);
        t_store(head, half + i, v_fma(b, c, a * s), n, 0);
    }
}

INLINE void store_head(const float *head, long dim, void *out, long at, int bf16) {
    for (long i = 0; i < dim; i += W) t_store(out, at + i, t_load(head, i, dim - i, 0), dim - i, bf16);
}

/* Stores a head in its place of a cache; scales: k's or v's of the call. */
static void keep_head(const struct qkv *call, const float *head, void *cache, float *scales, long slot, long kv_head) {
    const long dim = call->dim, block = slot / call->block_size, offset = slot % call->block_size;
    const long row = kv_head * call->block_size + offset, at = block * call->block_stride + row * dim;
    if (call->cache_type <= CACHE_BF16) {
        store_head(head, dim, cache, at, call->cache_type == CACHE_BF16);
        return;
    }
    float scale = 1.0f;
    if (scales != NULL && call->scales.stride == 0) scale = scales[kv_head];
    else if (scales != NULL) scale = scales[block * call->scales.stride + row] = f8_scale(head, dim, call->cache_type);
    for (long i = 0; i < dim; i += W)
        f8_store((int8_t *)cache + at + i, t_load(head, i, dim - i, 0) / v_set(scale), dim - i, call->cache_type);
}

static void qkv_tokens(const struct qkv *call, long begin, long end) {
    const long dim = call->dim, heads = call->heads, kv_heads = call->kv_heads;
    float head[HEAD_MAX + 16];
    for (long token = begin; token < end; token++) {
        const float *cos = call->cos + token * call->half, *sin = call->sin + token * call->half;
        const long from = token * call->qkv_stride;
        for (long h = 0; h < heads; h++) {
            turn_head(call, call->qkv, from + h * dim, call->q_norm, cos, sin, head);
            store_head(head, dim, call->q, (token * heads + h) * dim, call->bf16);
        }
        if (call->k_cache == NULL) continue;
        const long slot = call->slots_wide ? (long)((const int64_t *)call->slots)[token]
                                           : (long)((const int32_t *)call->slots)[token];
        if (slot < 0) continue;
        for (long h = 0; h < kv_heads; h++) {
            turn_head(call, call->qkv, from + (heads + h) * dim, call->k_norm, cos, sin, head);
            keep_head(call, head, call->k_cache, call->scales.k, slot, h);
            turn_head(call, call->qkv, from + (heads + kv_heads + h) * dim, NULL, NULL, NULL, head);
            keep_head(call, head, call->v_cache, call->scales.v, slot, h);
        }
    }
}
