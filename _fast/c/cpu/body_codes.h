/* The product of rows with one panel of codes: a run of columns is widened to floats, then the tiles of body_linear.h
 * multiply by it; for one row the run is widened in registers.
 *
 * A value is (code's value - zero) * (scale * row scale), in float32, for any number of rows; the length of a run
 * changes no bit, because storing and reloading partial sums is exact. With few rows the run is short and stays in the
 * L1 cache. For integer inputs and codes, sums over K_BLOCK columns are below 2^24, so floats are exact, and the
 * blocks' sums are added as int32. */

enum { SHORT_RUN = 32 }; /* columns that are widened at once for the rows of one tile */

INLINE vi c_widen(const int8_t *p) {
#if defined(VEC_AVX512)
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(VEC_AVX2)
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    vc bytes;
    memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(bytes, vi);
#endif
}

/* Vector `number` of a column's codes of four bits, 0 .. 15 in the lowest bits of each lane. */
INLINE vi c_four_bits(const int8_t *codes, int number) {
#if defined(VEC_AVX512)
    const __m512i words = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)codes));
    const __m512i upper = _mm512_set_epi32(4, 4, 4, 4, 4, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m512i shifts = _mm512_add_epi32(upper, _mm512_set1_epi32(8 * number));
    return (vi)_mm512_srlv_epi32(words, shifts); /* readers use only four bits */
#else
    vi words;
    memcpy(&words, codes + number * W % 8 * 4, sizeof words);
    return (words >> (number * W / 8 * 4)) & 15;
#endif
}

/* INT4: code - 8, or the code itself if a zero is subtracted later. */
INLINE vf int4_widen(vi code, int less) {
#if defined(VEC_AVX512)
    const __m512 values = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_permutexvar_ps((__m512i)code, values - v_set((float)less)); /* reads four bits of a lane */
#else
    return __builtin_convertvector(code - less, vf);
#endif
}

/* E2M1: sign and magnitude. Without a table in a register, exponent and mantissa move to the places of a float32's. */
INLINE vf e2m1_widen(vi code) {
#if defined(VEC_AVX512)
    return _mm512_permutexvar_ps((__m512i)code, _mm512_set_ps(-6, -4, -3, -2, -1.5f, -1, -0.5f, -0.0f, 6, 4, 3, 2, 1.5f,
                                                             1, 0.5f, 0));
#elif defined(VEC_AVX2)
    const vf size = _mm256_permutevar8x32_ps(_mm256_set_ps(6, 4, 3, 2, 1.5f, 1, 0.5f, 0), (__m256i)code);
    return (vf)((vi)size | (code & 8) << 28);
#else
    return (vf)((code & 8) << 28 | (code & 7) << 22) * v_set(0x1p126f);
#endif
}

/* NF4: indices into a table (engine/kernels/gemm/codes.py names its source). */
static const float NF4_VALUES[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f,
};

INLINE vf nf4_widen(vi code) {
#if defined(VEC_AVX512)
    return _mm512_permutexvar_ps((__m512i)code, _mm512_loadu_ps(NF4_VALUES));
#elif defined(VEC_AVX2)
    const vf low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(NF4_VALUES), (__m256i)code);
    const vf high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(NF4_VALUES + 8), (__m256i)code);
    return _mm256_blendv_ps(low, high, (vf)(code << 28)); /* by the highest bit of the code */
#else
    vf value;
    for (int lane = 0; lane < W; lane++) value[lane] = NF4_VALUES[code[lane]];
    return value;
#endif
}

INLINE int is_four_bits(int form) { return form == INT4 || form == E2M1 || form == NF4; }

/* E4M3 divided by 2^8: sign, four exponent bits and three mantissa bits move to the same places of a float16. The
 * conversion handles subnormal numbers at full speed, while float32 arithmetic would need microcode for them. */
INLINE vf e4m3_widen(const int8_t *codes) {
#if defined(VEC_AVX512)
    const __m256i high = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)codes)), 8);
    return _mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16((int16_t)0xbfff)));
#elif defined(VEC_AVX2)
    const __m128i high = _mm_unpacklo_epi8(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i *)codes));
    return _mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(high, 1), _mm_set1_epi16((int16_t)0xbfff)));
#else
    const vi code = c_widen(codes);
    return (vf)((code & (int32_t)0x80000000) | ((code & 0x7f) << 20)) * v_set(0x1p112f);
#endif
}

/* Zeros of a group; integer zeros of INT8 are subtracted from a code before it becomes a float. */
enum zero_form { NO_ZERO, WHOLE_ZERO, FLOAT_ZERO };
union zeros {
    int32_t whole[PANEL];
    float real[PANEL];
};

/* Returns W weights. */
INLINE vf weights_of(const int8_t *codes, int number, const union zeros *zero, const float *scale, int form,
                     int has_zero) {
    vf value;
    if (form == E4M3) {
        value = e4m3_widen(codes + number * W);
    } else if (form == E2M1) {
        value = e2m1_widen(c_four_bits(codes, number));
    } else if (form == NF4) {
        value = nf4_widen(c_four_bits(codes, number));
    } else if (form == INT4) {
        value = int4_widen(c_four_bits(codes, number), has_zero == NO_ZERO ? 8 : 0);
    } else {
        vi shift = {0};
        if (has_zero == WHOLE_ZERO) memcpy(&shift, zero->whole + number * W, sizeof shift);
        value = __builtin_convertvector(c_widen(codes + number * W) - shift, vf);
    }
    if (has_zero == FLOAT_ZERO) value -= v_load(zero->real + number * W);
    return value * v_load(scale + number * W);
}

/* Widens `columns` columns of a panel that share scale[64] and zero[64] to out [columns, 64]. If x is given, multiplies
 * them by x and adds them to out [64], with the same arithmetic as a tile. */
INLINE void widen_run(const int8_t *codes, long columns, const float *scale, const union zeros *zero, const float *x,
                      float *out, int form, int has_zero) {
    const long stride = is_four_bits(form) ? PANEL / 2 : PANEL;
    if (x == NULL) {
        for (long k = 0; k < columns; k++, codes += stride, out += PANEL) {
            __builtin_prefetch(codes + 2048);
#pragma GCC unroll 16
            for (int i = 0; i < PANEL / W; i++)
                v_store(out + i * W, weights_of(codes, i, zero, scale, form, has_zero));
        }
        return;
    }
    vf sum[PANEL / W];
#pragma GCC unroll 16
    for (int i = 0; i < PANEL / W; i++) sum[i] = v_load(out + i * W);
    for (long k = 0; k < columns; k++, codes += stride) {
        const vf a = v_set(x[k]);
        __builtin_prefetch(codes + 2048);
#pragma GCC unroll 16
        for (int i = 0; i < PANEL / W; i++) sum[i] = v_fma(a, weights_of(codes, i, zero, scale, form, has_zero), sum[i]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < PANEL / W; i++) v_store(out + i * W, sum[i]);
}

/* Loads the scales of one group of a panel (for E4M3 times 2^8), and zeros if the form has them. */
static void load_group(const struct linear *call, long panel, long group, float *scale, union zeros *zero) {
    const long groups = (call->depth + call->group - 1) / call->group;
    const long first = (panel * groups + group) * PANEL;
    for (int i = 0; i < PANEL; i += W) {
        vf own = v_set(1.0f);
        if (call->x_scales == NULL) own = t_load(call->scales, first + i, W, call->scales_bf16);
        if (call->row_scales != NULL && call->x_scales == NULL) own *= v_load(call->row_scales + panel * PANEL + i);
        if (call->form == E4M3) own *= v_set(256.0f);
        v_store(scale + i, own);
    }
    if (call->zeros == NULL) return;
    const float middle = call->form == INT4 ? 8.0f : 0.0f; /* 4-bit codes begin at 0, their values at -8 */
    const int8_t *whole = (const int8_t *)call->zeros + first;
    if (call->zeros_f32) {
        for (int i = 0; i < PANEL; i++) zero->real[i] = middle + ((const float *)call->zeros)[first + i];
    } else if (call->form == INT4) {
        for (int i = 0; i < PANEL; i++) zero->real[i] = middle + (float)whole[i];
    } else {
        for (int i = 0; i < PANEL; i++) zero->whole[i] = whole[i];
    }
}

/* Widens columns k .. k + depth of a panel to out [depth, 64]; if x is given, adds them times x [depth] to out [64]. */
static void widen_codes(const struct linear *call, long panel, long k, long depth, const float *x, float *out) {
    const long stride = is_four_bits(call->form) ? PANEL / 2 : PANEL;
    const int8_t *codes = (const int8_t *)call->panels + (panel * call->depth + k) * stride;
    for (long done = 0, end; done < depth; done = end) {
        float scale[PANEL];
        union zeros zero;
        const long group = (k + done) / call->group, last = (group + 1) * call->group - k;
        end = last < depth ? last : depth;
        load_group(call, panel, group, scale, &zero);
        const int8_t *from = codes + done * stride;
        const float *by = x == NULL ? NULL : x + done;
        float *to = x == NULL ? out + done * PANEL : out;
#define RUN(form, has_zero) widen_run(from, end - done, scale, &zero, by, to, form, has_zero)
        if (call->form == E4M3) RUN(E4M3, NO_ZERO);
        else if (call->form == INT8 && call->zeros_f32) RUN(INT8, FLOAT_ZERO);
        else if (call->form == INT8 && call->zeros != NULL) RUN(INT8, WHOLE_ZERO);
        else if (call->form == INT8) RUN(INT8, NO_ZERO);
        else if (call->form == INT4 && call->zeros != NULL) RUN(INT4, FLOAT_ZERO);
        else if (call->form == INT4) RUN(INT4, NO_ZERO);
        else if (call->form == NF4) RUN(NF4, NO_ZERO);
        else RUN(E2M1, NO_ZERO);
#undef RUN
    }
}

/* Adds exact integers in float32 to int32 totals and resets `sums` to zero. */
INLINE void add_exact(int32_t *totals, float *sums, long count) {
    for (long i = 0; i < count; i += W) {
        vi total;
        memcpy(&total, totals + i, sizeof total);
        total += __builtin_convertvector(v_load(sums + i), vi);
        memcpy(totals + i, &total, sizeof total);
        v_store(sums + i, v_zero());
    }
}

/* Multiplies totals of one row by the scale of x and the scales of the panel's rows. */
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
