/* The kernels for AVX2 with FMA; chosen at run time, so the build needs no flags. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define VEC_AVX2
#define ISA_NAME avx2
#include "body.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
extern int omniloop_no_avx2;
#endif
