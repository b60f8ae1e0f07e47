/* One vector of floats, for the instruction set of the including isa_*.c (VEC_AVX512, VEC_AVX2 or neither).
 *
 * GCC and Clang vector extensions provide + - * / on `vf`; this file adds other operations. Results depend only on
 * lanes, never on the position of data in memory, and tails use the same instructions as whole vectors. */
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

#if defined(VEC_AVX512)
#include <immintrin.h>
enum { W = 16 };
typedef __m512 vf;
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));
typedef int8_t vc __attribute__((vector_size(16)));
#elif defined(VEC_AVX2)
#include <immintrin.h>
enum { W = 8 };
typedef __m256 vf;
typedef int32_t vi __attribute__((vector_size(32)));
typedef uint16_t vh __attribute__((vector_size(16)));
typedef int8_t vc __attribute__((vector_size(8)));
#else
#if defined(__aarch64__)
#include <arm_neon.h>
#endif
enum { W = 4 };
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef uint16_t vh __attribute__((vector_size(8)));
typedef int8_t vc __attribute__((vector_size(4)));
#endif

INLINE vf v_load(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void v_store(float *p, vf v) { memcpy(p, &v, sizeof v); }

INLINE vf v_load_n(const float *p, long n) {
#if defined(VEC_AVX512)
    return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#else
    float lanes[W] = {0};
    memcpy(lanes, p, (size_t)n * sizeof(float));
    return v_load(lanes);
#endif
}

INLINE void v_store_n(float *p, vf v, long n) {
#if defined(VEC_AVX512)
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), v);
#else
    float lanes[W];
    v_store(lanes, v);
    memcpy(p, lanes, (size_t)n * sizeof(float));
#endif
}

INLINE vf v_set(float x) {
#if defined(VEC_AVX512)
    return _mm512_set1_ps(x);
#elif defined(VEC_AVX2)
    return _mm256_set1_ps(x);
#else
    return (vf){x, x, x, x};
#endif
}

INLINE vf v_zero(void) { return v_set(0.0f); }

/* a * b + c, rounded once if the machine can; a function, so that it does not depend on compiler options. */
INLINE vf v_fma(vf a, vf b, vf c) {
#if defined(VEC_AVX512)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(VEC_AVX2)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

/* a < b ? x : y per lane; the comparison is false for NaN. */
INLINE vf v_if_less(vf a, vf b, vf x, vf y) {
#if defined(VEC_AVX512)
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
#elif defined(VEC_AVX2)
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
#else
    vi mask = a < b;
    return (vf)((mask & (vi)x) | (~mask & (vi)y));
#endif
}

/* Both return a NaN in the second argument. */
INLINE vf v_max(vf a, vf b) { return v_if_less(b, a, a, b); }
INLINE vf v_min(vf a, vf b) { return v_if_less(a, b, a, b); }

INLINE float v_sum(vf v) {
#if defined(VEC_AVX512)
    __m256 eight = _mm512_castps512_ps256(v) + _mm512_castps512_ps256(_mm512_shuffle_f32x4(v, v, 0xEE));
    __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
    __m128 two = four + _mm_movehl_ps(four, four);
    return _mm_cvtss_f32(two) + _mm_cvtss_f32(_mm_shuffle_ps(two, two, 1));
#else
    float lanes[W];
    v_store(lanes, v);
    for (int width = W / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
#endif
}

INLINE float v_max_lane(vf v) {
#if defined(VEC_AVX512)
    return _mm512_reduce_max_ps(v);
#else
    float lanes[W];
    v_store(lanes, v);
    float most = lanes[0];
    for (int i = 1; i < W; i++) most = lanes[i] > most ? lanes[i] : most;
    return most;
#endif
}

/* bfloat16 is the upper half of a float32: widening is exact, narrowing rounds to nearest even and keeps NaN a NaN. */
INLINE vf h_widen(vh h) { return (vf)(__builtin_convertvector(h, vi) << 16); }

INLINE vh h_narrow(vf v) {
    vi bits = (vi)v;
    vi odd = (bits >> 16) & 1;
    vi rounded = (bits + 0x7fff + odd) >> 16;
    vi nan = ((bits & 0x7fffffff) > 0x7f800000);
    rounded = (rounded & ~nan) | (0x7fc0 & nan);
    return __builtin_convertvector(rounded, vh);
}

INLINE vf h_load(const uint16_t *p) {
    vh h;
    memcpy(&h, p, sizeof h);
    return h_widen(h);
}

INLINE vf h_load_n(const uint16_t *p, long n) {
    vh h = {0};
    memcpy(&h, p, (size_t)n * sizeof(uint16_t));
    return h_widen(h);
}

INLINE void h_store(uint16_t *p, vf v) {
    vh h = h_narrow(v);
    memcpy(p, &h, sizeof h);
}

INLINE void h_store_n(uint16_t *p, vf v, long n) {
    vh h = h_narrow(v);
    memcpy(p, &h, (size_t)n * sizeof(uint16_t));
}

/* Loads n <= W lanes from element i of a tensor of either type; other lanes are zero. */
INLINE vf t_load(const void *p, long i, long n, int bf16) {
    if (bf16) {
        const uint16_t *h = (const uint16_t *)p + i;
        return n >= W ? h_load(h) : h_load_n(h, n);
    }
    const float *f = (const float *)p + i;
    return n >= W ? v_load(f) : v_load_n(f, n);
}

INLINE void t_store(void *p, long i, vf v, long n, int bf16) {
    if (bf16) {
        uint16_t *h = (uint16_t *)p + i;
        if (n >= W) h_store(h, v);
        else h_store_n(h, v, n);
        return;
    }
    float *f = (float *)p + i;
    if (n >= W) v_store(f, v);
    else v_store_n(f, v, n);
}

/* e^x, accurate to two units in the last place; 0 below -87, e^88 above 88, NaN stays NaN.
 * x = n ln 2 + r with |r| <= ln(2)/2: a Taylor polynomial of degree 7 gives e^r, and n goes into the exponent bits. */
INLINE vf v_exp(vf x) {
    const vf low = v_set(-87.0f), round = v_set(12582912.0f); /* 1.5 * 2^23: adding it leaves n in the low bits */
    vf clamped = v_min(v_set(88.0f), v_max(low, x));
    vf biased = v_fma(clamped, v_set(1.44269504f), round);
    vf n = biased - round;
    vf r = v_fma(n, v_set(-0.693359375f), clamped); /* ln 2 in two parts, the first exact in products with n */
    r = v_fma(n, v_set(2.12194440e-4f), r);
    vf p = v_set(1.0f / 5040);
    p = v_fma(p, r, v_set(1.0f / 720));
    p = v_fma(p, r, v_set(1.0f / 120));
    p = v_fma(p, r, v_set(1.0f / 24));
    p = v_fma(p, r, v_set(1.0f / 6));
    p = v_fma(p, r, v_set(0.5f));
    p = v_fma(p, r, v_set(1.0f));
    p = v_fma(p, r, v_set(1.0f));
    vf y = (vf)((vi)p + ((vi)biased << 23));
    return v_if_less(x, low, v_zero(), y);
}

INLINE vf v_sigmoid(vf x) { return v_set(1.0f) / (v_set(1.0f) + v_exp(-x)); }

INLINE vf v_abs(vf x) { return (vf)((vi)x & 0x7fffffff); }

/* By the exponential for |x| >= 1/4; below by the series, which has the same relative error there. */
INLINE vf v_tanh(vf x) {
    vf e = v_exp(x + x);
    vf large = v_set(1.0f) - v_set(2.0f) / (e + v_set(1.0f));
    vf s = x * x;
    vf p = v_set(-17.0f / 315);
    p = v_fma(p, s, v_set(2.0f / 15));
    p = v_fma(p, s, v_set(-1.0f / 3));
    vf small = v_fma(p * s, x, x);
    return v_if_less(v_abs(x), v_set(0.25f), small, large);
}
