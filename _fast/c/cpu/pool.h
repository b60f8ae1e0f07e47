/* A persistent pool of threads for one caller at a time: the caller works too, the others spin shortly, then sleep.
 *
 * parallel_for hands out ranges of [0, count), `grain` at a time, to whoever is free; it returns when all are done. A
 * second caller at the same moment runs its range alone, on its own thread. Results must not depend on who runs what. */
#ifndef OMNILOOP_POOL_H
#define OMNILOOP_POOL_H

#include <stddef.h>

typedef void (*range_fn)(const void *context, long begin, long end);

void pool_set_threads(int count);
int pool_threads(void);
int pool_cores(void);
void parallel_for(long count, long grain, range_fn run, const void *context);

/* A buffer of the calling thread, 64-byte aligned, valid until its next call; NULL when memory is out. */
void *pool_scratch(size_t bytes);

/* Asks for huge pages behind the whole 2 MiB pages of this memory, which is not yet written; a hint, it cannot fail. */
void memory_huge(void *start, size_t bytes);

#endif
