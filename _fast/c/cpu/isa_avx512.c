/* The kernels for AVX-512; chosen at run time, so the build needs no flags. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
#endif
#define VEC_AVX512
#define ISA_NAME avx512
#include "body.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
extern int omniloop_no_avx512;
#endif
