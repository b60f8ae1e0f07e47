/* The product of rows with one panel of codes: a run of columns is widened to floats, then the tiles of body_linear.h
 * multiply by it.
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
    vc bytes;
    memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(bytes, vi);
}

/* A sign, four bits of exponent and three of mantissa into the same places of a float32, then 2^120: exact. */
INLINE vf e4m3_widen(const int8_t *p) {
    vi code = c_widen(p);
    return (vf)((code & (int32_t)0x80000000) | ((code & 0x7f) << 20)) * v_set(0x1p120f);
}

/* `columns` columns of a panel that share scale[64] and zero[64]. */
INLINE void widen_run(const struct linear *call, const int8_t *codes, long columns, const float *scale,
                      const int32_t *zero, float *out, int form, int has_zero) {
    const long stride = form == FOUR_BITS ? PANEL / 2 : PANEL;
    v16 table;
    if (form == FOUR_BITS) table = c_load(call->table);
    for (long k = 0; k < columns; k++, codes += stride, out += PANEL) {
        int8_t looked_up[PANEL];
        const int8_t *values = codes;
        __builtin_prefetch(codes + 2048);
        if (form == FOUR_BITS) {
            const v16 first = c_load(codes), second = c_load(codes + 16);
            c_store(looked_up, c_low(table, first)), c_store(looked_up + 16, c_low(table, second));
            c_store(looked_up + 32, c_high(table, first)), c_store(looked_up + 48, c_high(table, second));
            values = looked_up;
        }
#pragma GCC unroll 16
        for (int i = 0; i < PANEL; i += W) {
            vf value;
            if (form == E4M3) {
                value = e4m3_widen(values + i);
            } else {
                vi whole = c_widen(values + i), shift;
                if (has_zero) memcpy(&shift, zero + i, sizeof shift), whole -= shift;
                value = __builtin_convertvector(whole, vf);
            }
            v_store(out + i, value * v_load(scale + i));
        }
    }
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

/* Columns k .. k + depth of a panel, to out [depth, 64]. */
static void widen_codes(const struct linear *call, long panel, long k, long depth, float *out) {
    const long stride = call->form == FOUR_BITS ? PANEL / 2 : PANEL;
    const int8_t *codes = (const int8_t *)call->panels + (panel * call->depth + k) * stride;
    for (long done = 0, end; done < depth; done = end) {
        float scale[PANEL];
        int32_t zero[PANEL];
        const long group = (k + done) / call->group;
        end = (group + 1) * call->group - k < depth ? (group + 1) * call->group - k : depth;
        load_group(call, panel, group, scale, zero);
        const int8_t *from = codes + done * stride;
        float *to = out + done * PANEL;
        if (call->form == E4M3) widen_run(call, from, end - done, scale, zero, to, E4M3, 0);
        else if (call->form == INT8 && call->zeros != NULL) widen_run(call, from, end - done, scale, zero, to, INT8, 1);
        else if (call->form == INT8) widen_run(call, from, end - done, scale, zero, to, INT8, 0);
        else if (call->zeros != NULL) widen_run(call, from, end - done, scale, zero, to, FOUR_BITS, 1);
        else widen_run(call, from, end - done, scale, zero, to, FOUR_BITS, 0);
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
    const long rows = row_end - row_begin, run = rows <= TILE ? SHORT_RUN : K_BLOCK;
    const int exact = call->x_scales != NULL;
    memset(sums, 0, (size_t)(rows * PANEL) * sizeof(float));
    if (exact) memset(totals, 0, (size_t)(rows * PANEL) * sizeof(int32_t));
    for (long k = 0; k < call->depth; k += run) {
        const long depth = call->depth - k < run ? call->depth - k : run;
        const float *x = call->x + k / K_BLOCK * call->rows * X_STRIDE + k % K_BLOCK;
        widen_codes(call, panel, k, depth, wide);
        for (long row = row_begin, height; row < row_end; row += height) {
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
