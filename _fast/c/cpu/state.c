/* Drivers of layers with states: for each portion of rows, threads share inputs by columns, then states by heads. */
#include "spans.h"

enum { WORTH = 16384, GATES = 128 }; /* fewest elements that justify another thread; gates of one task */

struct job {
    const struct convolution *inputs;
    const struct gates *gates;
    const struct delta *delta; /* delta or ssd; the other is NULL */
    const struct ssd *ssd;
    const struct span *spans;
    long parts, gate_parts, units; /* tasks of the convolution, of the gates, and of a whole span */
};

/* Number of tasks that give a thread WORTH elements; a task has `width` elements for each line of a span. */
static long worth(const struct span *spans, long count, long width) {
    long lines = 0;
    for (long i = 0; i < count; i++) lines += spans[i].stop - spans[i].begin;
    return WORTH / (lines / count * width + 1) + 1;
}

static struct columns delta_columns(const struct delta *call, long part) {
    const long keys = call->key_heads, dim = call->key_dim;
    if (part >= 2 * keys) {
        const long first = 2 * keys * dim + (part - 2 * keys) * call->value_dim;
        return (struct columns){.begin = first, .end = first + call->value_dim};
    }
    struct columns found = {.begin = part * dim, .end = part * dim + dim, .scale = 1.0f};
    if (part < keys) found.scale = 1.0f / __builtin_sqrtf((float)dim);
    else found.tail = &call->keys, found.tail_column = (part - keys) * dim;
    return found;
}

static struct columns ssd_columns(const struct ssd *call, long part) {
    const long inner = call->heads * call->head_dim, keys = call->groups * call->state_size;
    const long again = inner + keys, parts = (again + UNIT - 1) / UNIT;
    struct columns found = {.begin = part * UNIT};
    if (part >= parts) found.begin = again + (part - parts) * UNIT;
    else found.tail = &call->again, found.tail_column = found.begin;
    const long end = part < parts ? again : again + keys;
    found.end = end - found.begin < UNIT ? end : found.begin + UNIT;
    return found;
}

static void run_inputs(const void *context, long begin, long end) {
    const struct job *job = context;
    for (long i = begin; i < end; i++) {
        const struct span *span = job->spans + i / job->units;
        const long part = i % job->units, gate = (part - job->parts) * GATES;
        if (part < job->parts) {
            const struct columns columns = job->ssd ? ssd_columns(job->ssd, part) : delta_columns(job->delta, part);
            kernels()->convolve(job->inputs, span, &columns);
        } else if (part < job->parts + job->gate_parts) {
            const long rest = job->gates->width - gate;
            kernels()->state_gates(job->gates, span, gate, gate + (rest < GATES ? rest : GATES));
        } else {
            kernels()->delta_betas(job->delta, span);
        }
    }
}

static void run_delta_heads(const void *context, long begin, long end) {
    const struct delta *call = context;
    for (long i = begin; i < end; i++)
        kernels()->delta_head(call, call->spans + i / call->value_heads, i % call->value_heads);
}

/* Cuts one allocation into buffers of whole cache lines. */
static void *cut(char **rest, size_t bytes) {
    void *found = *rest;
    *rest += (bytes + 63) / 64 * 64;
    return found;
}

static float *cut_floats(char **rest, long count) { return cut(rest, (size_t)count * sizeof(float)); }

static int delta_buffers(struct delta *call, long width, long gates) {
    const long values = call->value_heads * call->value_dim, state = values * call->key_dim;
    const long floats = PORTION * (width + gates + call->value_heads + values) + 2 * state;
    char *rest = pool_scratch((size_t)floats * sizeof(float) + PORTION * sizeof(struct span) + 64 * 8);
    if (rest == NULL) return -1;
    call->spans = cut(&rest, PORTION * sizeof(struct span));
    call->active = cut_floats(&rest, PORTION * width);
    call->decay = cut_floats(&rest, PORTION * gates);
    call->beta = cut_floats(&rest, PORTION * call->value_heads);
    call->found = cut_floats(&rest, PORTION * values);
    call->carry_in = cut_floats(&rest, state);
    call->carry_out = cut_floats(&rest, state);
    return 0;
}

/* Swaps the two buffers of a state that continues: the next portion begins with the state that this portion left. */
#define SWAP_CARRY(call)                                   \
    do {                                                   \
        float *left = (call)->carry_out;                   \
        (call)->carry_out = (float *)(call)->carry_in;     \
        (call)->carry_in = left;                           \
    } while (0)

int op_delta(const struct delta *given) {
    struct delta call = *given;
    const long values = call.value_heads * call.value_dim, width = 2 * call.key_heads * call.key_dim + values;
    const long share = call.per_channel ? call.key_dim : 1, size = call.bf16 ? 2 : 4;
    const void *a = (const char *)call.x + (width + values + call.value_heads) * size;
    if (delta_buffers(&call, width, call.value_heads * share) != 0) return -1;
    const struct convolution inputs = {
        &call.steps, call.active, call.x, call.taps, NULL, call.before, call.inputs, call.x_stride, width, call.count,
        call.bf16, 0,
    };
    const struct gates gates = {
        &call.steps, a, call.dt_bias, call.a_log, NULL, call.decay, call.gates, call.x_stride, call.value_heads * share,
        share, call.bf16,
    };
    struct job job = {&inputs, &gates, &call, NULL, call.spans, 2 * call.key_heads + call.value_heads, 0, 0};
    job.gate_parts = (gates.width + GATES - 1) / GATES;
    job.units = job.parts + job.gate_parts + 1;
    struct cursor cursor = {0, 0};
    struct span *spans = (struct span *)call.spans;
    for (long count; (count = next_spans(&call.steps, &cursor, PORTION, spans)) > 0;) {
        call.first_token = spans[0].token + (spans[0].begin > spans[0].start ? spans[0].begin - spans[0].start : 0);
        parallel_for(count * job.units, worth(spans, count, call.value_dim), run_inputs, &job);
        parallel_for(count * call.value_heads, worth(spans, count, call.key_dim * call.value_dim), run_delta_heads, &call);
        SWAP_CARRY(&call);
    }
    clear_rest(&call.steps, call.out, call.tokens, values, call.bf16);
    return 0;
}

static void run_ssd_heads(const void *context, long begin, long end) {
    const struct ssd *call = context;
    for (long i = begin; i < end; i++) kernels()->ssd_head(call, call->spans + i / call->heads, i % call->heads);
}

static void run_ssd_gates(const void *call, long begin, long end) { kernels()->ssd_gate(call, begin, end); }

static int ssd_buffers(struct ssd *call, long inner, long width) {
    const long state = inner * call->state_size;
    const long floats = PORTION * (width + 2 * call->heads + inner) + 2 * state;
    char *rest = pool_scratch((size_t)floats * sizeof(float) + PORTION * sizeof(struct span) + 64 * 8);
    if (rest == NULL) return -1;
    call->spans = cut(&rest, PORTION * sizeof(struct span));
    call->active = cut_floats(&rest, PORTION * width);
    call->decay = cut_floats(&rest, PORTION * call->heads);
    call->steps_of = cut_floats(&rest, PORTION * call->heads);
    call->found = cut_floats(&rest, PORTION * inner);
    call->carry_in = cut_floats(&rest, state);
    call->carry_out = cut_floats(&rest, state);
    return 0;
}

/* Number of tokens of a portion; they are consecutive in the batch. */
static long tokens_of(const struct span *spans, long count) {
    long tokens = 0;
    for (long i = 0; i < count; i++)
        tokens += spans[i].stop - (spans[i].begin > spans[i].start ? spans[i].begin : spans[i].start);
    return tokens;
}

int op_ssd(const struct ssd *given) {
    struct ssd call = *given;
    const long inner = call.heads * call.head_dim, keys = call.groups * call.state_size, width = inner + 2 * keys;
    const char *x = call.x;
    const long size = call.bf16 ? 2 : 4;
    if (ssd_buffers(&call, inner, width) != 0) return -1;
    const struct convolution inputs = {
        &call.steps, call.active, x + inner * size, call.taps, call.bias, call.before, call.inputs, call.x_stride, width,
        call.count, call.bf16, 0,
    };
    const struct gates gates = {
        &call.steps, x + (inner + width) * size, call.dt_bias, call.a_log, call.steps_of, call.decay, call.times,
        call.x_stride, call.heads, 1, call.bf16,
    };
    struct job job = {&inputs, &gates, NULL, &call, call.spans, 0, (call.heads + GATES - 1) / GATES, 0};
    job.parts = (inner + keys + UNIT - 1) / UNIT + (keys + UNIT - 1) / UNIT;
    job.units = job.parts + job.gate_parts;
    struct cursor cursor = {0, 0};
    struct span *spans = (struct span *)call.spans;
    for (long count; (count = next_spans(&call.steps, &cursor, PORTION, spans)) > 0;) {
        call.first_token = spans[0].token + (spans[0].begin > spans[0].start ? spans[0].begin - spans[0].start : 0);
        parallel_for(count * job.units, worth(spans, count, UNIT), run_inputs, &job);
        parallel_for(count * call.heads, worth(spans, count, call.head_dim * call.state_size), run_ssd_heads, &call);
        parallel_for(tokens_of(spans, count) * call.groups, WORTH / (inner / call.groups) + 1, run_ssd_gates, &call);
        SWAP_CARRY(&call);
    }
    clear_rest(&call.steps, call.out, call.tokens, inner, call.bf16);
    return 0;
}

struct channels {
    const struct convolution *convolution;
    const struct selective *selective;
    const struct span *spans;
    long width, units;
};

static void run_convolution(const void *context, long begin, long end) {
    const struct channels *job = context;
    for (long i = begin; i < end; i++) {
        const long first = i % job->units * UNIT, rest = job->width - first;
        const struct columns columns = {.begin = first, .end = first + (rest < UNIT ? rest : UNIT)};
        kernels()->convolve(job->convolution, job->spans + i / job->units, &columns);
    }
}

static void run_channels(const void *context, long begin, long end) {
    const struct channels *job = context;
    for (long i = begin; i < end; i++) {
        const long first = i % job->units * UNIT, rest = job->width - first;
        kernels()->selective_channels(job->selective, job->spans + i / job->units, first, first + (rest < UNIT ? rest : UNIT));
    }
}

int op_convolution(const struct convolution *call, long tokens) {
    const struct steps *steps = call->steps;
    struct span *spans = pool_scratch((size_t)(steps->rows + 1) * sizeof(struct span));
    if (spans == NULL) return -1;
    struct cursor cursor = {0, 0};
    const long count = next_spans(steps, &cursor, count_lines(steps) + 1, spans);
    for (long i = 0; i < count; i++) { /* one line per token; positions before the step have no line */
        spans[i].line = spans[i].token;
        spans[i].begin = spans[i].start;
    }
    const struct channels job = {call, NULL, spans, call->width, (call->width + UNIT - 1) / UNIT};
    if (count > 0) parallel_for(count * job.units, worth(spans, count, UNIT), run_convolution, &job);
    clear_rest(steps, call->out, tokens, call->width, call->out_bf16);
    return 0;
}

int op_selective(const struct selective *given) {
    struct selective call = *given;
    const long lines = count_lines(&call.steps), span_bytes = (call.steps.rows + 1) * (long)sizeof(struct span);
    char *rest = pool_scratch((size_t)(span_bytes + lines * 2 * call.state_size * (long)sizeof(float) + 64 * 4));
    if (rest == NULL) return -1;
    struct span *spans = cut(&rest, (size_t)span_bytes);
    call.few = cut_floats(&rest, lines * 2 * call.state_size);
    call.spans = spans;
    struct cursor cursor = {0, 0};
    const long count = next_spans(&call.steps, &cursor, lines + 1, spans);
    for (long i = 0; i < count; i++) kernels()->selective_keys(&call, spans + i);
    const struct channels job = {NULL, &call, spans, call.inner, (call.inner + UNIT - 1) / UNIT};
    if (count > 0) parallel_for(count * job.units, worth(spans, count, UNIT * call.state_size), run_channels, &job);
    clear_rest(&call.steps, call.out, call.tokens, call.inner, call.bf16);
    return 0;
}
