/* The gated delta rule, on top of body_state.h: one slice of a head's columns at a time, position by position. */

/* beta [lines, value_heads]: sigmoid of the b columns. */
static void delta_betas(const struct delta *call, const struct span *span) {
    const long heads = call->value_heads, column = 2 * call->key_heads * call->key_dim + 2 * heads * call->value_dim;
    const long first = span->begin > span->start ? span->begin : span->start;
    for (long p = first; p < span->stop; p++) {
        const long from = (span->token + p - span->start) * call->x_stride + column;
        const long at = (span->line + p - span->begin) * heads;
        for (long i = 0; i < heads; i += W)
            t_store(call->beta, at + i, v_sigmoid(t_load(call->x, from + i, heads - i, call->bf16)), heads - i, 0);
    }
}

/* change = beta (value - key decay s), rounded as later steps read it from the ring. */
INLINE void delta_change(const struct delta *call, const float *s, const float *key, const float *decay, long each,
                         float beta, const float *value, long n, vf *change) {
    vf sum[VECTORS] = {v_zero(), v_zero(), v_zero(), v_zero()};
    for (long i = 0; i < call->key_dim; i++) {
        const vf k = v_set(key[i] * decay[i * each]);
#pragma GCC unroll 4
        for (int l = 0; l < VECTORS; l++) sum[l] = v_fma(v_load(s + i * SLICE + l * W), k, sum[l]);
    }
    for (int l = 0; l < VECTORS; l++)
        change[l] = v_round(v_set(beta) * (load_part(value, 0, l, n, 0) - sum[l]), call->deltas.bf16);
}

static void delta_slice(const struct delta *call, const struct span *span, long head, long column) {
    _Alignas(64) float s[KEY_MAX * SLICE];
    const long rows = call->key_dim, width = call->value_dim, heads = call->value_heads, n = width - column;
    const long keys = call->key_heads * rows, line_width = 2 * keys + heads * width;
    const long each = call->per_channel, gates = each ? rows : 1;
    const float *active = call->active + span->line * line_width, *beta = call->beta + span->line * heads + head;
    const float *decay = call->decay + (span->line * heads + head) * gates;
    const long query = head / (heads / call->key_heads) * rows, value = 2 * keys + head * width + column;
    const long found = ((span->token - call->first_token - span->start) * heads + head) * width + column;
    begin_slice(&call->steps, span, &call->state, call->carry_in, head * rows, rows, column, s);
    for (long p = span->begin; p < span->stop; p++) {
        const float *key = active + keys + query;
        void *tail = ring_at(&call->steps, span, &call->deltas, p, head);
        vf change[VECTORS], out[VECTORS];
        if (p < span->start) {
            for (int l = 0; l < VECTORS; l++) change[l] = load_part(tail, column, l, n, call->deltas.bf16);
        } else {
            delta_change(call, s, key, decay, each, *beta, active + value, n, change);
            for (int l = 0; p >= span->tail_from && l < VECTORS; l++)
                store_part(tail, column, change[l], l, n, call->deltas.bf16);
        }
        fold(s, rows, key, p < span->start ? key : active + query, decay, each, change, out);
        for (int l = 0; p >= span->start && l < VECTORS; l++)
            store_part(call->found, found + p * heads * width, out[l], l, n, 0);
        leave_slice(&call->steps, span, &call->state, p + 1, head * rows, rows, column, s);
        active += line_width, beta += heads, decay += heads * gates;
    }
    carry_slice(span, &call->state, call->carry_out, head * rows, rows, column, s);
}

/* out = norm(found) * silu(z), or sigmoid(z). */
static void delta_norm(const struct delta *call, long token, long head) {
    const long width = call->value_dim, line = call->value_heads * width;
    const float *found = call->found + (token - call->first_token) * line + head * width;
    const long gate = token * call->x_stride + 2 * call->key_heads * call->key_dim + line + head * width;
    const vf scale = v_set(1.0f / __builtin_sqrtf(mean_square(found, width, 0.0f) + call->eps));
    for (long i = 0; i < width; i += W) {
        const long n = width - i;
        const vf z = t_load(call->x, gate + i, n, call->bf16);
        vf y = t_load(found, i, n, 0) * scale * t_load(call->norm, i, n, call->norm_bf16) * v_sigmoid(z);
        if (!call->sigmoid) y = y * z;
        t_store(call->out, token * line + head * width + i, y, n, call->bf16);
    }
}

static void delta_head(const struct delta *call, const struct span *span, long head) {
    for (long column = 0; column < call->value_dim; column += SLICE) delta_slice(call, span, head, column);
    const long first = span->begin > span->start ? span->begin : span->start;
    for (long p = first; p < span->stop; p++) delta_norm(call, span->token + p - span->start, head);
}
