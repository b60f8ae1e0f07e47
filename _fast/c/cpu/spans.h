/* A step's rows, cut into portions whose work buffers stay in the caches. */
#ifndef OMNILOOP_SPANS_H
#define OMNILOOP_SPANS_H

#include "ops.h"
#include "state.h"

enum { PORTION = 256 }; /* lines of work buffers: positions of all rows that are computed at a time; a ring has fewer */

/* Where the next portion begins. All zero: at the first row. */
struct cursor {
    long row, done; /* tokens of the row that are computed */
};

/* Fills `spans` with at most `most` lines, the rows' inputs in the ring among them; returns how many spans, 0 at the end. */
long next_spans(const struct steps *steps, struct cursor *cursor, long most, struct span *spans);
/* Of all rows. */
long count_lines(const struct steps *steps);
/* Elements of the output of tokens that are no row's become zero. */
void clear_rest(const struct steps *steps, void *out, long tokens, long width, int bf16);

#endif
