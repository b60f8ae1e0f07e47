/* The keys and values of attention, over vec.h and body_linear.h: the range that a pair sees, their places in a paged
 * cache or a dense tensor, and a tile of 64 of them as panels of floats, for every type of cache. */

struct range {
    long begin, end;
};

static inline long panels_of(long dim) { return (dim + PANEL - 1) / PANEL; }

/* Returns the keys that a pair of a row sees. */
static inline struct range keys_of(const struct attention *call, long row, long pair) {
    const long queries = call->starts[row + 1] - call->starts[row];
    const long length = call->lengths != NULL ? call->lengths[row] : queries;
    const long query = pair / (call->heads / call->kv_heads), position = length - queries + query;
    struct range keys = {0, call->causal ? position + 1 : length};
    long window = call->window;
    if (window > 0 && position + window < keys.end) keys.end = position + window;
    if (call->last_keys != NULL) {
        const int32_t last = call->last_keys[call->starts[row] + query];
        keys.end = (last < 0 ? ~last : last) + 1;
        if (last < 0) window = 0;
    }
    if (window > 0 && position + 1 > window) keys.begin = position + 1 - window;
    if (window < 0) keys.begin = position / -window * -window;
    if (keys.begin < call->first_key) keys.begin = call->first_key;
    return keys;
}

#if defined(VEC_AVX512)
INLINE void transpose(vf r[W]) {
    vf t[W], u[W];
#pragma GCC unroll 8
    for (int i = 0; i < W; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int g = 0; g < W; g += 4)
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            __m512d low = _mm512_castps_pd(t[g + i]), high = _mm512_castps_pd(t[g + i + 2]);
            u[g + 2 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            u[g + 2 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        vf a = _mm512_shuffle_f32x4(u[i], u[4 + i], 0x44), b = _mm512_shuffle_f32x4(u[8 + i], u[12 + i], 0x44);
        vf c = _mm512_shuffle_f32x4(u[i], u[4 + i], 0xEE), d = _mm512_shuffle_f32x4(u[8 + i], u[12 + i], 0xEE);
        r[i] = _mm512_shuffle_f32x4(a, b, 0x88);
        r[4 + i] = _mm512_shuffle_f32x4(a, b, 0xDD);
        r[8 + i] = _mm512_shuffle_f32x4(c, d, 0x88);
        r[12 + i] = _mm512_shuffle_f32x4(c, d, 0xDD);
    }
}
#elif defined(VEC_AVX2)
INLINE void transpose(vf r[W]) {
    vf t[W], u[W];
#pragma GCC unroll 4
    for (int i = 0; i < W; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 2
    for (int g = 0; g < W; g += 4)
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            u[g + 2 * i] = _mm256_shuffle_ps(t[g + i], t[g + i + 2], 0x44);
            u[g + 2 * i + 1] = _mm256_shuffle_ps(t[g + i], t[g + i + 2], 0xEE);
        }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[i] = _mm256_permute2f128_ps(u[i], u[4 + i], 0x20);
        r[4 + i] = _mm256_permute2f128_ps(u[i], u[4 + i], 0x31);
    }
}
#else
INLINE void transpose(vf r[W]) {
    float in[W][W], out[W][W];
    memcpy(in, r, sizeof in);
    for (int i = 0; i < W; i++)
        for (int j = 0; j < W; j++) out[j][i] = in[i][j];
    memcpy(r, out, sizeof out);
}
#endif

static inline long number_bytes(int type) { return type == CACHE_F32 ? 4 : type == CACHE_BF16 ? 2 : 1; }

INLINE vf kv_load(const void *p, long i, long n, int type) {
    return type <= CACHE_BF16 ? t_load(p, i, n, type) : f8_load((const int8_t *)p + i, n, type);
}

/* Finds the first elements of keys (or values) first..first+count-1 of a row, for one KV head. Pages of keys before
 * `floor` may have left the cache, because no window reaches them; the key `floor` replaces these keys and is masked.
 * */
static void locate(const struct attention *call, const struct unit *unit, const void *tensor, long stride,
                   long head_stride, long first, long count, long floor, const char *places[PANEL]) {
    const long bytes = number_bytes(call->kv_type);
    const char *base = tensor;
    if (call->tables == NULL) {
        base += ((call->starts[unit->row] + first) * stride + unit->kv_head * head_stride) * bytes;
        for (long i = 0; i < count; i++) places[i] = base + i * stride * bytes;
        return;
    }
    const int32_t *table = call->tables + unit->row * call->max_blocks;
    const long skipped = floor > first ? (floor - first < count ? floor - first : count - 1) : 0;
    long block = (first + skipped) / call->block_size, offset = (first + skipped) % call->block_size;
    for (long i = skipped; i < count; block++, offset = 0) {
        const char *page =
            base + (table[block] * call->block_stride + unit->kv_head * call->block_size * call->dim) * bytes;
        for (; offset < call->block_size && i < count; offset++) places[i++] = page + offset * call->dim * bytes;
    }
    for (long i = 0; i < skipped; i++) places[i] = places[skipped];
}

/* Finds the scales of the same keys (or values), if they are codes; 1 without scales, when the result is not read. */
static void locate_scales(const struct attention *call, const struct unit *unit, const float *scales, long first,
                          long count, long floor, float found[PANEL]) {
    const int32_t *table = call->tables + unit->row * call->max_blocks;
    for (long i = 0; i < count; i++) {
        long key = first + i < floor ? floor : first + i;
        if (key >= first + count) key = first + count - 1;
        const long row = unit->kv_head * call->block_size + key % call->block_size;
        if (scales == NULL || call->tables == NULL) found[i] = 1.0f;
        else found[i] = call->scales.stride ? scales[table[key / call->block_size] * call->scales.stride + row]
                                            : scales[unit->kv_head];
    }
}

/* Buffers of one unit; on the stack, used only up to the head's width. */
struct workplace {
    _Alignas(64) float q[PAIRS * X_STRIDE];
    _Alignas(64) float keys[HEAD_MAX * PANEL];
    _Alignas(64) float values[HEAD_MAX * PANEL];
    _Alignas(64) float scores[PAIRS * PANEL];
    _Alignas(64) float weights[PAIRS * X_STRIDE];
    const char *keys_at[PANEL], *values_at[PANEL]; /* addresses of the tile's keys and values */
    const char *next_at[PANEL];                    /* addresses of the next tile's keys, for prefetching */
    float key_scales[PANEL], value_scales[PANEL];  /* scales of codes */
};

/* Loads count keys into the panel [dim, 64]; columns past count (up to a whole vector) repeat the last key; masked. */
INLINE void load_keys(struct workplace *place, long count, long dim, int type) {
    const char *const *places = place->keys_at, *const *ahead = place->values_at;
    float *panel = place->keys;
    for (long key = 0; key < count; key += W)
        for (long d = 0; d < dim; d += W) {
            vf r[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) {
                const long at = key + i < count ? key + i : count - 1;
                r[i] = kv_load(places[at], d, dim - d, type);
                if (type > CACHE_BF16) r[i] = r[i] * v_set(place->key_scales[at]);
                __builtin_prefetch(ahead[at] + d * number_bytes(type));
            }
            transpose(r);
            if (dim - d >= W) {
#pragma GCC unroll 16
                for (int i = 0; i < W; i++) v_store(panel + (d + i) * PANEL + key, r[i]);
            } else {
                float rest[W][W];
                memcpy(rest, r, sizeof rest);
                for (long i = 0; i < dim - d; i++) memcpy(panel + (d + i) * PANEL + key, rest[i], sizeof rest[i]);
            }
        }
}

/* Loads count values into panels [width / 64][count][64], zero past dim. */
INLINE void load_values(struct workplace *place, long count, long dim, int type) {
    for (long column = 0; column < panels_of(dim) * PANEL; column += W) {
        float *to = place->values + column / PANEL * PANEL * PANEL + column % PANEL;
        const long n = dim - column;
        for (long key = 0; key < count; key++) {
            vf value = n > 0 ? kv_load(place->values_at[key], column, n, type) : v_zero();
            if (type > CACHE_BF16) value = value * v_set(place->value_scales[key]);
            v_store(to + key * PANEL, value);
        }
    }
}

/* Load a tile's keys or values into their panels, from a cache of any type. */
#define OF_ITS_TYPE(load)                                               \
    switch (call->kv_type) {                                            \
    case CACHE_F32: load(place, count, call->dim, CACHE_F32); break;    \
    case CACHE_BF16: load(place, count, call->dim, CACHE_BF16); break;  \
    case CACHE_E4M3: load(place, count, call->dim, CACHE_E4M3); break;  \
    default: load(place, count, call->dim, CACHE_E5M2); break;          \
    }

static void all_keys(const struct attention *call, struct workplace *place, long count) { OF_ITS_TYPE(load_keys) }
static void all_values(const struct attention *call, struct workplace *place, long count) { OF_ITS_TYPE(load_values) }
