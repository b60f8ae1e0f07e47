/* 8-bit floats, over vec.h and body_codes.h: the codes of a cache. E4M3 has no infinities, E5M2 is the upper half of a
 * float16.
 *
 * A value is rounded to nearest even and clamped to the largest code; values that are not finite become NaN. */

INLINE int f8_mantissa(int type) { return type == CACHE_E4M3 ? 3 : 2; }
INLINE int f8_bias(int type) { return type == CACHE_E4M3 ? 7 : 15; }
INLINE float f8_most(int type) { return type == CACHE_E4M3 ? 448.0f : 57344.0f; }

/* Lanes of sign-extended codes -> values: exponent and mantissa move to the places of a float32's; the product with a
 * power of two is exact. */
INLINE vf f8_widen(vi code, int type) {
    const vi size = code & 0x7f, nan = (size > (type == CACHE_E4M3 ? 0x7e : 0x7b)) & 0x7fc00000;
    const vf value = (vf)((code & (int32_t)0x80000000) | (size << (23 - f8_mantissa(type)))) *
                     v_set(type == CACHE_E4M3 ? 0x1p120f : 0x1p112f);
    return (vf)((vi)value | nan);
}

/* Below the least exponent a power of two is added whose last bit is the step between codes. */
INLINE vi f8_narrow(vf x, int type) {
    const int shift = 23 - f8_mantissa(type);
    const vf step = v_set(type == CACHE_E4M3 ? 0x1p14f : 0x1p7f), normal = v_set(type == CACHE_E4M3 ? 0x1p-6f : 0x1p-14f);
    const vf size = v_abs(x), held = v_min(v_set(f8_most(type)), size);
    const vi sign = (vi)x & (int32_t)0x80000000, bits = (vi)held, odd = (bits >> shift) & 1;
    const vi above = ((bits + (1 << (shift - 1)) - 1 + odd) >> shift) - ((127 - f8_bias(type)) << f8_mantissa(type));
    const vi below = (vi)(held + step) - (vi)step;
    const vi small = bits < (vi)normal, finite = (vi)size < 0x7f800000;
    const vi code = (below & small) | (above & ~small);
    return (((code & finite) | (0x7f & ~finite))) | (sign >> 24);
}

INLINE vf f8_load(const int8_t *p, long n, int type) {
    int8_t codes[W] = {0};
    if (n >= W) return f8_widen(c_widen(p), type);
    memcpy(codes, p, (size_t)n);
    return f8_widen(c_widen(codes), type);
}

INLINE void f8_store(int8_t *p, vf v, long n, int type) {
    const vc codes = __builtin_convertvector(f8_narrow(v, type), vc);
    memcpy(p, &codes, n >= W ? sizeof codes : (size_t)n);
}

/* Returns the least power of two that scales a head's largest number to at most the largest code; 1 if all numbers are
 * near zero. NaN is ignored. */
INLINE float f8_scale(const float *head, long dim, int type) {
    vf most = v_zero();
    for (long i = 0; i < dim; i += W) most = v_max(v_abs(t_load(head, i, dim - i, 0)), most);
    const float largest = v_max_lane(most);
    if (!(largest > 1e-30f)) return 1.0f;
    float scale = largest / f8_most(type);
    unsigned bits;
    memcpy(&bits, &scale, sizeof bits);
    bits = (bits + 0x7fffffu) & 0x7f800000u;
    memcpy(&scale, &bits, sizeof scale);
    return scale;
}
