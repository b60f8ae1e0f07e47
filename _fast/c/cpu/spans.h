/* Cuts a step's rows into portions whose work buffers fit in the caches. */
#ifndef OMNILOOP_SPANS_H
#define OMNILOOP_SPANS_H

#include "ops.h"
#include "state.h"

enum { PORTION = 256 }; /* lines of work buffers: positions of all rows in a portion; more than a ring has */

/* The start of the next portion; all zero: the first row. */
struct cursor {
    long row, done; /* done: tokens of the row that earlier portions have computed */
};

/* Fills `spans` with at most `most` lines, positions in rings included; returns the number of spans, 0 at the end. */
long next_spans(const struct steps *steps, struct cursor *cursor, long most, struct span *spans);
/* Number of lines of all rows of the step. */
long count_lines(const struct steps *steps);
/* Sets the output of tokens that belong to no row to zero. */
void clear_rest(const struct steps *steps, void *out, long tokens, long width, int bf16);

#endif
