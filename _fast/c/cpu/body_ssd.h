/* State spaces, on top of body_state.h: Mamba-2 by heads, Mamba-1 by channels; positions are computed in order. */

static void ssd_slice(const struct ssd *call, const struct span *span, long head, long column) {
    _Alignas(64) float s[KEY_MAX * SLICE];
    const long rows = call->state_size, width = call->head_dim, inner = call->heads * width, n = width - column;
    const long line_width = inner + 2 * call->groups * rows, value = head * width + column;
    const long key = inner + head / (call->heads / call->groups) * rows;
    const float *active = call->active + span->line * line_width;
    const float *decay = call->decay + span->line * call->heads + head;
    const float *step = call->steps_of + span->line * call->heads + head;
    const long found = (span->token - call->first_token - span->start) * inner + value;
    const vf d = v_set(call->d[head]);
    begin_slice(&call->steps, span, &call->state, call->carry_in, head * rows, rows, column, s);
    for (long p = span->begin; p < span->stop; p++) {
        vf change[VECTORS], out[VECTORS];
        for (int l = 0; l < VECTORS; l++) change[l] = load_part(active, value, l, n, 0) * v_set(*step);
        /* For a position before the step the ring has B but not C: B stands in, and its result is dropped. */
        const float *query = active + key + (p < span->start ? 0 : call->groups * rows);
        fold(s, rows, active + key, query, decay, 0, change, out);
        for (int l = 0; p >= span->start && l < VECTORS; l++)
            store_part(call->found, found + p * inner, v_fma(d, load_part(active, value, l, n, 0), out[l]), l, n, 0);
        leave_slice(&call->steps, span, &call->state, p + 1, head * rows, rows, column, s);
        active += line_width, decay += call->heads, step += call->heads;
    }
    carry_slice(span, &call->state, call->carry_out, head * rows, rows, column, s);
}

static void ssd_head(const struct ssd *call, const struct span *span, long head) {
    for (long column = 0; column < call->head_dim; column += SLICE) ssd_slice(call, span, head, column);
}

/* Gates and normalises one group of a token's channels, in the layer's order. */
static void ssd_group(const struct ssd *call, long token, long group) {
    const long inner = call->heads * call->head_dim, width = inner / call->groups, first = group * width;
    float *y = call->found + (token - call->first_token) * inner + first;
    const long gate = token * call->x_stride + first;
    const int normed = call->order == NORM_BEFORE_GATE || call->order == NORM_BEHIND_GATE;
    for (long i = 0; (call->order == NORM_NONE || call->order == NORM_BEHIND_GATE) && i < width; i += W) {
        const vf z = t_load(call->x, gate + i, width - i, call->bf16);
        t_store(y, i, t_load(y, i, width - i, 0) * (z * v_sigmoid(z)), width - i, 0);
    }
    float scale = 1.0f;
    if (normed) scale = 1.0f / __builtin_sqrtf(mean_square(y, width, 0.0f) + call->eps);
    for (long i = 0; i < width; i += W) {
        const long n = width - i;
        vf x = t_load(y, i, n, 0);
        if (normed) x = x * v_set(scale) * t_load(call->norm, first + i, n, call->norm_bf16);
        if (call->order == NORM_BEFORE_GATE) {
            const vf z = t_load(call->x, gate + i, n, call->bf16);
            x = x * (z * v_sigmoid(z));
        }
        t_store(call->out, token * inner + first + i, x, n, call->bf16);
    }
}

static void ssd_gate(const struct ssd *call, long begin, long end) {
    for (long i = begin; i < end; i++) ssd_group(call, call->first_token + i / call->groups, i % call->groups);
}

/* Copies B and C of a span's positions to `few` as float32, and B into the ring. */
static void selective_keys(const struct selective *call, const struct span *span) {
    const long size = call->state_size;
    for (long p = span->begin; p < span->stop; p++) {
        float *few = call->few + (span->line + p - span->begin) * 2 * size;
        void *tail = ring_at(&call->steps, span, &call->keys, p, 0);
        const long token = span->token + p - span->start;
        for (long i = 0; i < size; i += W) {
            const long n = size - i;
            if (p < span->start) {
                t_store(few, i, t_load(tail, i, n, call->bf16), n, 0);
                continue;
            }
            const vf b = t_load(call->b, token * call->b_stride + i, n, call->bf16);
            t_store(few, i, b, n, 0);
            t_store(few, size + i, t_load(call->c, token * call->c_stride + i, n, call->bf16), n, 0);
            if (p >= span->tail_from) t_store(tail, i, b, n, call->bf16);
        }
    }
}

/* Reads the states of n channels (one row of the run per channel) into s [state_size, SLICE], one lane per channel. */
static void read_channels(const struct selective *call, const struct span *span, long first, long n, float *s) {
    memset(s, 0, (size_t)(call->state_size * SLICE) * sizeof(float));
    for (long c = 0; span->base > 0 && c < n; c++) {
        const void *from = place_at(&call->steps, span->base_blocks, &call->state, first + c);
        for (long i = 0; i < call->state_size; i++) s[i * SLICE + c] = load_one(from, i, call->state.bf16);
    }
}

static void leave_channels(const struct selective *call, const struct span *span, long behind, long first, long n,
                           const float *s) {
    for (long t = 0; t < span->targets; t++) {
        for (long c = 0; span->at[t] == behind && c < n; c++) {
            void *to = place_at(&call->steps, span->blocks[t], &call->state, first + c);
            for (long i = 0; i < call->state_size; i++) t_store(to, i, v_set(s[i * SLICE + c]), 1, call->state.bf16);
        }
    }
}

/* Reads x and steps of a position: from the ring before the step, else from the batch; then the ring gets both. */
INLINE void selective_inputs(const struct selective *call, const struct span *span, long p, long first, long n, vf *x,
                             vf *step) {
    const long token = span->token + p - span->start;
    void *values = ring_at(&call->steps, span, &call->values, p, 0);
    void *times = ring_at(&call->steps, span, &call->times, p, 0);
    for (int l = 0; l < VECTORS; l++) {
        if (p < span->start) {
            x[l] = load_part(values, first, l, n, call->bf16);
            step[l] = load_part(times, first, l, n, call->bf16);
            continue;
        }
        x[l] = load_part(call->x, token * call->x_stride + first, l, n, call->bf16);
        step[l] = load_part(call->dt, token * call->dt_stride + first, l, n, call->bf16);
        if (p < span->tail_from) continue;
        store_part(values, first, x[l], l, n, call->bf16);
        store_part(times, first, step[l], l, n, call->bf16);
    }
}

/* h = exp(dt rate) h + dt x b;  y = c h. */
INLINE void selective_fold(float *s, const float *rates, long size, const float *b, const float *c, const vf *step,
                           const vf *change, vf *y) {
    for (long i = 0; i < size; i++) {
        const vf key = v_set(b[i]), query = v_set(c[i]);
#pragma GCC unroll 4
        for (int l = 0; l < VECTORS; l++) {
            float *at = s + i * SLICE + l * W;
            const vf now = v_fma(change[l], key, v_exp(step[l] * v_load(rates + i * SLICE + l * W)) * v_load(at));
            v_store(at, now);
            y[l] = v_fma(now, query, y[l]);
        }
    }
}

static void selective_slice(const struct selective *call, const struct span *span, long first, long n) {
    _Alignas(64) float s[FEW_STATES * SLICE], rates[FEW_STATES * SLICE] = {0};
    const long size = call->state_size;
    for (long c = 0; c < n; c++)
        for (long i = 0; i < size; i++) rates[i * SLICE + c] = call->a_log[(first + c) * size + i];
    for (long i = 0; i < size * SLICE; i += W) v_store(rates + i, -v_exp(v_load(rates + i)));
    read_channels(call, span, first, n, s);
    const float *few = call->few + span->line * 2 * size;
    for (long p = span->begin; p < span->stop; p++, few += 2 * size) {
        const long token = span->token + p - span->start;
        vf x[VECTORS], step[VECTORS], change[VECTORS], y[VECTORS] = {v_zero(), v_zero(), v_zero(), v_zero()};
        selective_inputs(call, span, p, first, n, x, step);
        for (int l = 0; l < VECTORS; l++) {
            step[l] = v_softplus(step[l] + load_part(call->dt_bias, first, l, n, 0));
            change[l] = step[l] * x[l];
        }
        selective_fold(s, rates, size, few, p < span->start ? few : few + size, step, change, y);
        for (int l = 0; p >= span->start && l < VECTORS; l++) {
            const vf z = load_part(call->z, token * call->z_stride + first, l, n, call->bf16);
            const vf whole = v_fma(load_part(call->d, first, l, n, 0), x[l], y[l]);
            store_part(call->out, token * call->inner + first, whole * (z * v_sigmoid(z)), l, n, call->bf16);
        }
        leave_channels(call, span, p + 1, first, n, s);
    }
}

/* Computes channels first .. end - 1. */
static void selective_channels(const struct selective *call, const struct span *span, long first, long end) {
    for (; first < end; first += SLICE) selective_slice(call, span, first, end - first < SLICE ? end - first : SLICE);
}
