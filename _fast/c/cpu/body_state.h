/* Functions that layers with states share: places in runs, the short convolution, gates, slices of a head's state. */

enum { VECTORS = 4, SLICE = VECTORS * W }; /* columns of a state that are computed together, over all positions */

INLINE void *place_at(const struct steps *steps, const int32_t *blocks, const struct place *place, long row) {
    const long page = blocks[place->first + row / place->per_page];
    return steps->pages + page * steps->page_stride + row % place->per_page * place->width * (place->bf16 ? 2 : 4);
}

/* Row `number` of a position in the row's ring. */
INLINE void *ring_at(const struct steps *steps, const struct span *span, const struct place *place, long position,
                     long number) {
    return place_at(steps, span->tail_blocks, place, position % steps->ring * place->rows + number);
}

/* Rounds as a store to a tensor of the type would. */
INLINE vf v_round(vf v, int bf16) { return bf16 ? h_widen(h_narrow(v)) : v; }

INLINE float load_one(const void *p, long i, int bf16) {
    if (!bf16) return ((const float *)p)[i];
    const uint32_t bits = (uint32_t)((const uint16_t *)p)[i] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Vector l of a slice that has n columns. */
INLINE vf load_part(const void *p, long i, int l, long n, int bf16) {
    return n > l * W ? t_load(p, i + l * W, n - l * W, bf16) : v_zero();
}

INLINE void store_part(void *p, long i, vf v, int l, long n, int bf16) {
    if (n > l * W) t_store(p, i + l * W, v, n - l * W, bf16);
}

/* log(1 + e^x), by log(1 + y) = 2 atanh(y / (2 + y)): a power series in (y / (2 + y))^2 <= 1/9. */
INLINE vf v_softplus(vf x) {
    vf y = v_exp(-v_abs(x));
    vf t = y / (v_set(2.0f) + y), s = t * t;
    vf p = v_set(1.0f / 15);
    p = v_fma(p, s, v_set(1.0f / 13));
    p = v_fma(p, s, v_set(1.0f / 11));
    p = v_fma(p, s, v_set(1.0f / 9));
    p = v_fma(p, s, v_set(1.0f / 7));
    p = v_fma(p, s, v_set(1.0f / 5));
    p = v_fma(p, s, v_set(1.0f / 3));
    p = v_fma(p, s, v_set(1.0f));
    return v_fma(v_set(2.0f) * t, p, v_max(v_zero(), x));
}

/* Address of a position's input: in this step, the ring, or the inputs before the base; NULL before the first token. */
INLINE const void *input_at(const struct convolution *call, const struct span *span, long position) {
    if (position >= span->start)
        return (const char *)call->x + (span->token + position - span->start) * call->x_stride * (call->bf16 ? 2 : 4);
    if (position >= span->base) return ring_at(call->steps, span, &call->inputs, position, 0);
    if (span->base == 0) return NULL;
    return place_at(call->steps, span->base_blocks, &call->before, position - span->base + call->count - 1);
}

INLINE void convolve_token(const struct convolution *call, const struct span *span, const struct columns *columns,
                           long position, float *wide) {
    const void *from[TAPS_MAX];
    for (long j = 0; j < call->count; j++) from[j] = input_at(call, span, position - j);
    for (long i = columns->begin; i < columns->end; i += W) {
        const long n = columns->end - i;
        vf total = call->bias == NULL ? v_zero() : t_load(call->bias, i, n, 0);
        for (long j = 0; j < call->count; j++)
            if (from[j] != NULL)
                total = v_fma(t_load(from[j], i, n, call->bf16), t_load(call->taps, j * call->width + i, n, 0), total);
        t_store(wide, i - columns->begin, total * v_sigmoid(total), n, 0);
    }
}

/* Copies columns from `from` to `to`, of the same type; zeros if `from` is NULL. */
INLINE void copy_columns(void *to, const void *from, const struct columns *columns, int bf16) {
    const size_t size = bf16 ? 2 : 4, begin = (size_t)columns->begin * size;
    const size_t bytes = (size_t)(columns->end - columns->begin) * size;
    if (from == NULL) memset((char *)to + begin, 0, bytes);
    else memmove((char *)to + begin, (const char *)from + begin, bytes);
}

/* Runs after the row's last position: writes the inputs before each base that the step leaves, then the ring's inputs. */
static void leave_inputs(const struct convolution *call, const struct span *span, const struct columns *columns) {
    const long behind = call->count - 1;
    for (long t = 0; t < span->targets; t++)
        for (long i = 0; i < behind; i++)
            copy_columns(place_at(call->steps, span->blocks[t], &call->before, i),
                         input_at(call, span, span->at[t] - behind + i), columns, call->bf16);
    for (long p = span->tail_from; p < span->end; p++)
        copy_columns(ring_at(call->steps, span, &call->inputs, p, 0), input_at(call, span, p), columns, call->bf16);
}

/* Divides a head's q or k by its norm, then multiplies it by `scale`. */
INLINE void unit_length(float *x, long width, float scale) {
    const vf by = v_set(scale / __builtin_sqrtf(square_sum(x, width, 0.0f) + UNIT_EPS));
    for (long i = 0; i < width; i += W) t_store(x, i, t_load(x, i, width - i, 0) * by, width - i, 0);
}

static void convolve(const struct convolution *call, const struct span *span, const struct columns *columns) {
    _Alignas(64) float wide[KEY_MAX];
    const long width = columns->end - columns->begin;
    for (long p = span->begin; p < span->stop; p++) {
        const long at = (span->line + p - span->begin) * call->width + columns->begin;
        void *tail = columns->tail == NULL ? NULL : ring_at(call->steps, span, columns->tail, p, 0);
        const int tail_bf16 = tail != NULL && columns->tail->bf16;
        if (p < span->start) {
            for (long i = 0; tail != NULL && i < width; i += W)
                t_store(call->out, at + i, t_load(tail, columns->tail_column + i, width - i, tail_bf16), width - i, 0);
            continue;
        }
        convolve_token(call, span, columns, p, wide);
        if (columns->scale != 0.0f) unit_length(wide, width, columns->scale);
        for (long i = 0; i < width; i += W) {
            const long n = width - i;
            const vf x = v_round(t_load(wide, i, n, 0), tail_bf16);
            if (tail != NULL && p >= span->tail_from) t_store(tail, columns->tail_column + i, x, n, tail_bf16);
            t_store(call->out, at + i, x, n, call->out_bf16);
        }
    }
    if (span->stop == span->end) leave_inputs(call, span, columns);
}

/* Computes gates of columns begin .. end - 1, at most KEY_MAX columns. */
static void state_gates(const struct gates *call, const struct span *span, long begin, long end) {
    float rates[KEY_MAX];
    for (long i = begin; i < end; i++) rates[i - begin] = call->a_log[i / call->share];
    for (long i = begin; i < end; i += W) {
        const long n = end - i;
        const vf rate = -v_exp(t_load(rates, i - begin, n, 0)), bias = t_load(call->bias, i, n, 0);
        for (long p = span->begin; p < span->stop; p++) {
            const long at = (span->line + p - span->begin) * call->width + i;
            float *tail = ring_at(call->steps, span, &call->place, p, 0);
            vf gate;
            if (p < span->start) {
                gate = t_load(tail, i, n, 0);
            } else {
                const long token = span->token + p - span->start;
                gate = v_softplus(t_load(call->x, token * call->x_stride + i, n, call->bf16) + bias);
                if (call->times == NULL) gate = rate * gate;
                if (p >= span->tail_from) t_store(tail, i, gate, n, 0);
            }
            if (call->times != NULL) t_store(call->times, at, gate, n, 0);
            if (call->times != NULL) gate = rate * gate;
            t_store(call->decay, at, v_exp(gate), n, 0);
        }
    }
}

/* Reads SLICE columns of a state, from `column` on, from a run into s [rows, SLICE]. */
static void read_slice(const struct steps *steps, const int32_t *blocks, const struct place *place, long first, long rows,
                       long column, float *s) {
    for (long i = 0, count; i < rows; i += count) {
        const long inside = place->per_page - (first + i) % place->per_page;
        count = inside < rows - i ? inside : rows - i;
        const void *from = place_at(steps, blocks, place, first + i);
        for (long r = 0; r < count; r++)
            for (int l = 0; l < VECTORS; l++)
                v_store(s + (i + r) * SLICE + l * W,
                        load_part(from, r * place->width + column, l, place->width - column, place->bf16));
    }
}

static void write_slice(const struct steps *steps, const int32_t *blocks, const struct place *place, long first, long rows,
                        long column, const float *s) {
    for (long i = 0, count; i < rows; i += count) {
        const long inside = place->per_page - (first + i) % place->per_page;
        count = inside < rows - i ? inside : rows - i;
        void *to = place_at(steps, blocks, place, first + i);
        for (long r = 0; r < count; r++)
            for (int l = 0; l < VECTORS; l++)
                store_part(to, r * place->width + column, v_load(s + (i + r) * SLICE + l * W), l, place->width - column,
                           place->bf16);
    }
}

/* Initialises a head's slice: zeros, the base's state, or the state that the previous portion left in `carry`. */
static void begin_slice(const struct steps *steps, const struct span *span, const struct place *place, const float *carry,
                        long first, long rows, long column, float *s) {
    if (span->begin > span->base) {
        for (long i = 0; i < rows; i++)
            for (int l = 0; l < VECTORS; l++)
                v_store(s + i * SLICE + l * W,
                        load_part(carry, (first + i) * place->width + column, l, place->width - column, 0));
    } else if (span->base > 0) {
        read_slice(steps, span->base_blocks, place, first, rows, column, s);
    } else {
        memset(s, 0, (size_t)(rows * SLICE) * sizeof(float));
    }
}

static void leave_slice(const struct steps *steps, const struct span *span, const struct place *place, long behind,
                        long first, long rows, long column, const float *s) {
    for (long t = 0; t < span->targets; t++)
        if (span->at[t] == behind) write_slice(steps, span->blocks[t], place, first, rows, column, s);
}

static void carry_slice(const struct span *span, const struct place *place, float *carry, long first, long rows,
                        long column, const float *s) {
    if (span->stop == span->end) return;
    for (long i = 0; i < rows; i++)
        for (int l = 0; l < VECTORS; l++)
            store_part(carry, (first + i) * place->width + column, v_load(s + i * SLICE + l * W), l, place->width - column,
                       0);
}

/* s = decay s + key x change, then out = query s. Row i has decay[i * each]: each = 0 is one decay for all rows. */
INLINE void fold(float *s, long rows, const float *key, const float *query, const float *decay, long each, const vf *change,
                 vf *out) {
    vf sum[VECTORS] = {v_zero(), v_zero(), v_zero(), v_zero()};
    for (long i = 0; i < rows; i++) {
        const vf k = v_set(key[i]), q = v_set(query[i]), less = v_set(decay[i * each]);
#pragma GCC unroll 4
        for (int l = 0; l < VECTORS; l++) {
            float *at = s + i * SLICE + l * W;
            const vf now = v_fma(k, change[l], less * v_load(at));
            v_store(at, now);
            sum[l] = v_fma(now, q, sum[l]);
        }
    }
    for (int l = 0; l < VECTORS; l++) out[l] = sum[l];
}
