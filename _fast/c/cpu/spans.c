/* Cuts a step's rows into spans: sets the positions, runs and lines of each span. */
#include "spans.h"

#include <string.h>

static void find_targets(const struct steps *steps, long row, struct span *span) {
    span->targets = 0;
    for (long i = 0; i < TARGETS; i++) {
        const long check = row * (TARGETS - 1) + i - 1;
        const int32_t run = i == 0 ? steps->write_run[row] : steps->checkpoint_run[check];
        const int32_t at = i == 0 ? steps->new_base[row] : steps->checkpoint_at[check];
        if (run == 0 || at <= span->base) continue;
        span->at[span->targets] = at;
        span->blocks[span->targets++] = steps->runs + run * steps->runs_stride;
    }
}

/* A long row's ring gets only positions after the new base: the state at the new base covers earlier positions. */
static long tail_from(const struct steps *steps, long row, const struct span *span) {
    long from = span->start;
    if (span->end - span->base <= steps->ring && steps->checkpoint_run[row * (TARGETS - 1)] <= 0) return from;
    if (from < steps->new_base[row]) from = steps->new_base[row];
    return from < span->end - steps->ring ? span->end - steps->ring : from;
}

static void describe(const struct steps *steps, long row, struct span *span) {
    span->token = steps->query_start[row];
    span->base = steps->base[row];
    span->start = steps->start[row];
    span->end = span->start + steps->query_start[row + 1] - span->token;
    span->base_blocks = steps->runs + steps->base_run[row] * steps->runs_stride;
    span->tail_blocks = steps->runs + steps->tail_run[row] * steps->runs_stride;
    find_targets(steps, row, span);
    span->tail_from = tail_from(steps, row, span);
}

long next_spans(const struct steps *steps, struct cursor *cursor, long most, struct span *spans) {
    long count = 0, line = 0;
    for (; cursor->row < steps->rows; cursor->row++, cursor->done = 0) {
        if (steps->query_start[cursor->row + 1] == steps->query_start[cursor->row]) continue;
        struct span *span = spans + count;
        describe(steps, cursor->row, span);
        span->begin = cursor->done == 0 ? span->base : span->start + cursor->done;
        const long behind = span->begin < span->start ? span->start : span->begin;
        if (line + behind - span->begin >= most) return count;
        span->stop = span->end - span->begin < most - line ? span->end : span->begin + most - line;
        span->line = line;
        line += span->stop - span->begin;
        count++;
        if (span->stop < span->end) {
            cursor->done = span->stop - span->start;
            return count;
        }
    }
    return count;
}

long count_lines(const struct steps *steps) {
    long lines = steps->query_start[steps->rows];
    for (long row = 0; row < steps->rows; row++)
        if (steps->query_start[row + 1] > steps->query_start[row]) lines += steps->start[row] - steps->base[row];
    return lines;
}

void clear_rest(const struct steps *steps, void *out, long tokens, long width, int bf16) {
    const long first = steps->query_start[steps->rows], size = width * (bf16 ? 2 : 4);
    memset((char *)out + first * size, 0, (size_t)((tokens - first) * size));
}
