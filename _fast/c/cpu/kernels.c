/* Chooses the instruction set once, by the features that the processor reports. */
#include "kernels.h"

#include <stddef.h>
#include <stdatomic.h>

extern const struct kernels kernels_plain, kernels_avx2, kernels_avx512;

static const struct kernels *best(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return &kernels_avx512;
    /* Every processor with both also converts float16. */
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &kernels_avx2;
#endif
    return &kernels_plain;
}

static const struct kernels *_Atomic chosen;

const struct kernels *kernels(void) {
    const struct kernels *found = atomic_load_explicit(&chosen, memory_order_acquire);
    if (found == NULL) {
        found = best();
        atomic_store_explicit(&chosen, found, memory_order_release);
    }
    return found;
}

int kernels_limit(int level) {
    const struct kernels *found = best();
#if defined(__x86_64__)
    if (level < 2 && found == &kernels_avx512) found = &kernels_avx2;
    if (level < 1) found = &kernels_plain;
#endif
    atomic_store_explicit(&chosen, found, memory_order_release);
#if defined(__x86_64__)
    return found == &kernels_avx512 ? 2 : found == &kernels_avx2;
#else
    return 0;
#endif
}

long attention_state_floats(long dim) { return 2 * PAIRS + (dim + PANEL - 1) / PANEL * PANEL * PAIRS; }
