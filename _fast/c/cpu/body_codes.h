/* The product of rows with one panel of codes: a run of columns is widened to floats, then the tiles of body_linear.h
 * multiply by it; for one row it is widened in registers.
 *
 * A value is (code's value - zero) * (scale * row scale), in float32, whatever the number of rows; the length of a run
 * changes no bit, since the chains of sums survive a trip through memory. With few rows the run is short and stays in
 * the first-level cache. Integers times integers: sums over K_BLOCK columns are below 2^24, so the floats are exact,
 * and the blocks are added as int32. */

enum { SHORT_RUN = 32 }; /* columns that are widened at a time for the rows of one tile */

#if defined(VEC_AVX512) || defined(VEC_AVX2)
typedef __m128i v16;
INLINE v16 c_load(const void *p) { return _mm_loadu_si128((const __m128i *)p); }
INLINE void c_store(int8_t *p, v16 v) { _mm_storeu_si128((__m128i *)p, v); }
INLINE v16 c_low(v16 table, v16 codes) { return _mm_shuffle_epi8(table, _mm_and_si128(codes, _mm_set1_epi8(15))); }
INLINE v16 c_high(v16 table, v16 codes) { return c_low(table, _mm_srli_epi16(codes, 4)); }
#elif defined(__aarch64__)
typedef int8x16_t v16;
INLINE v16 c_load(const void *p) { return vld1q_s8((const int8_t *)p); }
INLINE void c_store(int8_t *p, v16 v) { vst1q_s8(p, v); }
INLINE v16 c_low(v16 table, v16 codes) {
    return vqtbl1q_s8(table, vandq_u8(vreinterpretq_u8_s8(codes), vdupq_n_u8(15)));
}
INLINE v16 c_high(v16 table, v16 codes) { return vqtbl1q_s8(table, vshrq_n_u8(vreinterpretq_u8_s8(codes), 4)); }
#else
typedef struct {
    int8_t lane[16];
} v16;
INLINE v16 c_load(const void *p) {
    v16 v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE void c_store(int8_t *p, v16 v) { memcpy(p, &v, sizeof v); }
INLINE v16 c_low(v16 table, v16 codes) {
    for (int i = 0; i < 16; i++) codes.lane[i] = table.lane[codes.lane[i] & 15];
    return codes;
}
INLINE v16 c_high(v16 table, v16 codes) {
    for (int i = 0; i < 16; i++) codes.lane[i] = table.lane[(uint8_t)codes.lane[i] >> 4];
    return codes;
}
#endif

INLINE vi c_widen(const int8_t *p) {
#if defined(VEC_AVX512)
    return (vi)_mm512_cvtepi8_epi32(c_load(p));
#elif defined(VEC_AVX2)
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    vc bytes;
    memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(bytes, vi);
#endif
}

/* What a column's codes of four bits look up, 16 values in each of four registers. */
struct column {
    v16 part[4];
};

INLINE struct column look_up(const int8_t *codes, v16 table) {
    const v16 first = c_load(codes), second = c_load(codes + 16);
    return (struct column){{c_low(table, first), c_low(table, second), c_high(table, first), c_high(table, second)}};
}

/* Vector `number` of a column's values. */
INLINE vi column_values(const struct column *four, const int8_t *codes, int number, int form) {
    if (form != FOUR_BITS) return c_widen(codes + number * W);
#if defined(VEC_AVX512)
    return (vi)_mm512_cvtepi8_epi32(four->part[number]);
#elif defined(VEC_AVX2)
    const v16 both = four->part[number / 2];
    return (vi)_mm256_cvtepi8_epi32(number % 2 ? _mm_unpackhi_epi64(both, both) : both);
#else
    int8_t room[16];
    c_store(room, four->part[number * W / 16]);
    return c_widen(room + number * W % 16);
#endif
}

/* W weights: a sign, four bits of exponent and three of mantissa of E4M3 go into the same places of a float32, and 2^120
 * is exact. */
INLINE vf weights_of(vi code, const int32_t *zero, const float *scale, int form, int has_zero) {
    vf value;
    if (form == E4M3) {
        value = (vf)((code & (int32_t)0x80000000) | ((code & 0x7f) << 20)) * v_set(0x1p120f);
    } else {
        if (has_zero) {
            vi shift;
            memcpy(&shift, zero, sizeof shift);
            code -= shift;
        }
        value = __builtin_convertvector(code, vf);
    }
    return value * v_load(scale);
}

/* `columns` columns of a panel that share scale[64] and zero[64]: to out [columns, 64]; or, where x is given, times x
 * and added to sums [64], by the same arithmetic as a tile's. */
INLINE void widen_run(const struct linear *call, const int8_t *codes, long columns, const float *scale,
                      const int32_t *zero, const float *x, float *out, int form, int has_zero) {
    const long stride = form == FOUR_BITS ? PANEL / 2 : PANEL;
    const v16 table = c_load(form == FOUR_BITS ? call->table : (const int8_t *)scale); /* read for four bits only */
    struct column four = {{table, table, table, table}};
    if (x == NULL) {
        for (long k = 0; k < columns; k++, codes += stride, out += PANEL) {
            __builtin_prefetch(codes + 2048);
            if (form == FOUR_BITS) four = look_up(codes, table);
#pragma GCC unroll 16
            for (int i = 0; i < PANEL / W; i++) {
                const vi values = column_values(&four, codes, i, form);
                v_store(out + i * W, weights_of(values, zero + i * W, scale + i * W, form, has_zero));
            }
        }
        return;
    }
    vf sum[PANEL / W];
#pragma GCC unroll 16
    for (int i = 0; i < PANEL / W; i++) sum[i] = v_load(out + i * W);
    for (long k = 0; k < columns; k++, codes += stride) {
        const vf a = v_set(x[k]);
        __builtin_prefetch(codes + 2048);
        if (form == FOUR_BITS) four = look_up(codes, table);
#pragma GCC unroll 16
        for (int i = 0; i < PANEL / W; i++) {
            const vi values = column_values(&four, codes, i, form);
            sum[i] = v_fma(a, weights_of(values, zero + i * W, scale + i * W, form, has_zero), sum[i]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < PANEL / W; i++) v_store(out + i * W, sum[i]);
}

/* Scales and zeros of one group of a panel. */
static void load_group(const struct linear *call, long panel, long group, float *scale, int32_t *zero) {
    const long groups = (call->depth + call->group - 1) / call->group;
    const long first = (panel * groups + group) * PANEL;
    for (int i = 0; i < PANEL; i += W) {
        vf own = v_set(1.0f);
        if (call->x_scales == NULL) own = t_load(call->scales, first + i, W, call->scales_bf16);
        if (call->row_scales != NULL && call->x_scales == NULL) own *= v_load(call->row_scales + panel * PANEL + i);
        v_store(scale + i, own);
    }
    if (call->zeros != NULL)
        for (int i = 0; i < PANEL; i++) zero[i] = call->zeros[first + i];
}

/* Columns k .. k + depth of a panel, to out [depth, 64]; or, where x is given, times x [depth], added to out [64]. */
static void widen_codes(const struct linear *call, long panel, long k, long depth, const float *x, float *out) {
    const long stride = call->form == FOUR_BITS ? PANEL / 2 : PANEL;
    const int8_t *codes = (const int8_t *)call->panels + (panel * call->depth + k) * stride;
    const int has_zero = call->zeros != NULL;
    for (long done = 0, end; done < depth; done = end) {
        float scale[PANEL];
        int32_t zero[PANEL];
        const long group = (k + done) / call->group, last = (group + 1) * call->group - k;
        end = last < depth ? last : depth;
        load_group(call, panel, group, scale, zero);
        const int8_t *from = codes + done * stride;
        const float *by = x == NULL ? NULL : x + done;
        float *to = x == NULL ? out + done * PANEL : out;
#define RUN(form, has_zero) widen_run(call, from, end - done, scale, zero, by, to, form, has_zero)
        if (call->form == E4M3) RUN(E4M3, 0);
        else if (call->form == INT8 && has_zero) RUN(INT8, 1);
        else if (call->form == INT8) RUN(INT8, 0);
        else if (has_zero) RUN(FOUR_BITS, 1);
        else RUN(FOUR_BITS, 0);
#undef RUN
    }
}

/* Exact integers in float32 to int32 totals; `sums` begin at zero again. */
INLINE void add_exact(int32_t *totals, float *sums, long count) {
    for (long i = 0; i < count; i += W) {
        vi total;
        memcpy(&total, totals + i, sizeof total);
        total += __builtin_convertvector(v_load(sums + i), vi);
        memcpy(totals + i, &total, sizeof total);
        v_store(sums + i, v_zero());
    }
}

/* Totals of one row times the scale of x and those of the panel's rows. */
INLINE void scale_exact(const struct linear *call, long panel, long row, const int32_t *totals, float *sums) {
    const vf x_scale = v_set(call->x_scales[row]);
    for (int i = 0; i < PANEL; i += W) {
        vi total;
        memcpy(&total, totals + i, sizeof total);
        vf scale = x_scale * t_load(call->scales, panel * PANEL + i, W, call->scales_bf16);
        v_store(sums + i, __builtin_convertvector(total, vf) * scale);
    }
}

static void linear_codes(const struct linear *call, long panel, long row_begin, long row_end) {
    _Alignas(64) float sums[ROW_BLOCK * PANEL];
    _Alignas(64) float wide[K_BLOCK * PANEL];
    int32_t totals[ROW_BLOCK * PANEL];
    const long rows = row_end - row_begin, run = rows > 1 && rows <= TILE ? SHORT_RUN : K_BLOCK;
    const int exact = call->x_scales != NULL;
    memset(sums, 0, (size_t)(rows * PANEL) * sizeof(float));
    if (exact) memset(totals, 0, (size_t)(rows * PANEL) * sizeof(int32_t));
    for (long k = 0; k < call->depth; k += run) {
        const long depth = call->depth - k < run ? call->depth - k : run;
        const float *x = call->x + k / K_BLOCK * call->rows * X_STRIDE + k % K_BLOCK;
        if (rows == 1) widen_codes(call, panel, k, depth, x + row_begin * X_STRIDE, sums);
        else widen_codes(call, panel, k, depth, NULL, wide);
        for (long row = row_begin, height; rows > 1 && row < row_end; row += height) {
            height = tile_height(row_end - row);
            TILES[0][height - 1](x + row * X_STRIDE, wide, PANEL, PANEL, depth, sums + (row - row_begin) * PANEL,
                                 (const char *)wide);
        }
        if (exact && ((k + depth) % K_BLOCK == 0 || k + depth == call->depth)) add_exact(totals, sums, rows * PANEL);
    }
    for (long row = 0; row < rows; row++) {
        if (exact) scale_exact(call, panel, row_begin + row, totals + row * PANEL, sums + row * PANEL);
        finish_row(call, panel, row_begin + row, sums + row * PANEL);
    }
}

static void linear_block(const struct linear *call, long panel, long row_begin, long row_end) {
    (call->form == FLOATS ? linear_floats : linear_codes)(call, panel, row_begin, row_end);
}
