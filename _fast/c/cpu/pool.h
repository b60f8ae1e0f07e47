/* A persistent thread pool for one caller at a time: the caller works too; idle workers spin briefly, then sleep.
 *
 * parallel_for assigns ranges of [0, count), `grain` at a time, to free threads; it returns when all are done. A second
 * caller at the same time runs its whole range on its own thread. Results must not depend on the assignment. */
#ifndef OMNILOOP_POOL_H
#define OMNILOOP_POOL_H

#include <stddef.h>

typedef void (*range_fn)(const void *context, long begin, long end);

void pool_set_threads(int count);
int pool_threads(void);
int pool_cores(void);
void parallel_for(long count, long grain, range_fn run, const void *context);

/* Returns a buffer of the calling thread, 64-byte aligned, valid until its next call; NULL: out of memory. */
void *pool_scratch(size_t bytes);

/* Requests huge pages for the whole 2 MiB pages of this memory, which is not yet written; a hint, which cannot fail. */
void memory_huge(void *start, size_t bytes);

#endif
