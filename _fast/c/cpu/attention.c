/* Divides attention into units of (row, KV head, up to PAIRS pairs), and into segments of long contexts if there are
 * few units. */
#include "ops.h"

#include <stddef.h>

struct share {
    const struct attention *call;
    long *first_unit; /* [rows + 1] units of all earlier rows, for all KV heads */
    long segments;    /* most segments of any unit when split */
    long floats;      /* floats of a state */
};

static long queries_of(const struct attention *call, long row) { return call->starts[row + 1] - call->starts[row]; }

static long length_of(const struct attention *call, long row) {
    return call->lengths != NULL ? call->lengths[row] : queries_of(call, row);
}

static struct unit unit_at(const struct share *share, long index) {
    const struct attention *call = share->call;
    long low = 0, high = call->rows;
    while (high - low > 1) {
        const long middle = (low + high) / 2;
        if (share->first_unit[middle] <= index) low = middle;
        else high = middle;
    }
    const long within = index - share->first_unit[low], pairs = queries_of(call, low) * (call->heads / call->kv_heads);
    const long units = (share->first_unit[low + 1] - share->first_unit[low]) / call->kv_heads;
    /* The last queries of a row see the most keys, so they come first; then no long task remains at the end. */
    const long part = units - 1 - within / call->kv_heads;
    const struct unit unit = {low, within % call->kv_heads, pairs * part / units, pairs * (part + 1) / units};
    return unit;
}

static void run_units(const void *context, long begin, long end) {
    const struct share *share = context;
    for (long index = begin; index < end; index++) {
        const struct unit unit = unit_at(share, index);
        kernels()->attend(share->call, &unit);
    }
}

/* The number of segments of a unit: those of its row's context. */
static long segments_of(const struct share *share, const struct unit *unit) {
    return (length_of(share->call, unit->row) + SEGMENT - 1) / SEGMENT;
}

static void run_segments(const void *context, long begin, long end) {
    const struct share *share = context;
    for (long task = begin; task < end; task++) {
        const struct unit unit = unit_at(share, task / share->segments);
        const long segment = task % share->segments;
        if (segment < segments_of(share, &unit))
            kernels()->attend_segment(share->call, &unit, segment, share->call->states + task * share->floats);
    }
}

static void run_merges(const void *context, long begin, long end) {
    const struct share *share = context;
    for (long index = begin; index < end; index++) {
        const struct unit unit = unit_at(share, index);
        float *states = share->call->states + index * share->segments * share->floats;
        kernels()->merge_segments(share->call, &unit, segments_of(share, &unit), states);
    }
}

int op_attention(const struct attention *given) {
    struct attention call = *given;
    const long group = call.heads / call.kv_heads, floats = attention_state_floats(call.dim);
    long units = 0, longest = 0;
    for (long row = 0; row < call.rows; row++) {
        units += (queries_of(&call, row) * group + PAIRS - 1) / PAIRS * call.kv_heads;
        if (length_of(&call, row) > longest) longest = length_of(&call, row);
    }
    struct share share = {&call, NULL, (longest + SEGMENT - 1) / SEGMENT, floats};
    const int split = share.segments > 1 && units < 4 * pool_threads();
    const size_t index_bytes = ((size_t)(call.rows + 1) * sizeof(long) + 63) / 64 * 64;
    char *buffer = pool_scratch(index_bytes + (split ? (size_t)(units * share.segments * floats) * sizeof(float) : 0));
    if (buffer == NULL) return -1;
    share.first_unit = (long *)(void *)buffer;
    share.first_unit[0] = 0;
    for (long row = 0; row < call.rows; row++)
        share.first_unit[row + 1] =
            share.first_unit[row] + (queries_of(&call, row) * group + PAIRS - 1) / PAIRS * call.kv_heads;
    if (!split) {
        /* With many units a thread gets all KV heads of a row, because each head prefetches the next head's keys. */
        const long plenty = units / (8 * pool_threads());
        const long grain = plenty < 1 ? 1 : plenty < call.kv_heads ? plenty : call.kv_heads;
        parallel_for(units, grain, run_units, &share);
        return 0;
    }
    call.states = (float *)(void *)(buffer + index_bytes);
    parallel_for(units * share.segments, 1, run_segments, &share);
    parallel_for(units, 1, run_merges, &share);
    return 0;
}
