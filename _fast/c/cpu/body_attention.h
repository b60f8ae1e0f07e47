/* Attention with running sums, over body_linear.h and body_keys.h: paged and dense, any mix of rows.
 *
 * Keys are processed in tiles of 64 at absolute positions 64 t, queries in units of up to PAIRS (query, head) pairs
 * that share a KV head. Per tile: K transposed to a panel, scores by tile_sums, softmax with a running maximum, V as
 * panels, sums by tile_sums. Running sums restart every SEGMENT keys and are merged in ascending order, no matter how
 * many threads computed the segments. A pair is computed only in tiles in which it sees a key, and a hidden key adds an
 * exact zero. So a query's bits depend only on its own position, keys and values. */

enum { FEW = 4 }; /* up to this many pairs a copy of the values does not pay */
enum { STATE_SUMS = 2 * PAIRS }; /* layout of a state: maxima [PAIRS], weights [PAIRS], sums [width / 64][PAIRS][64] */

static void load_queries(const struct attention *call, const struct unit *unit, float *q) {
    const long group = call->heads / call->kv_heads;
    for (long pair = unit->pair_begin; pair < unit->pair_end; pair++, q += X_STRIDE) {
        const long from = (call->starts[unit->row] + pair / group) * call->q_stride +
                          (unit->kv_head * group + pair % group) * call->q_head_stride;
        for (long d = 0; d < call->dim; d += W)
            t_store(q, d, t_load(call->q, from + d, call->dim - d, call->bf16), call->dim - d, 0);
    }
}

/* Multiplies rows of x by a panel into 64 sums each; the rows' sums are contiguous. */
static void panel_product(const float *x, const void *panel, long stride, long columns, int bf16, long depth,
                          float *sums, long rows, const char *ahead) {
    const int width = columns < PANEL ? (int)columns : PANEL;
    for (long row = 0, height; row < rows; row += height) {
        height = tile_height(rows - row);
        TILES[bf16][height - 1](x + row * X_STRIDE, panel, stride, width, depth, sums + row * PANEL, ahead);
    }
}

/* Adds weights times values. For a few pairs, whole runs of the cache are read directly if the width allows. For many
 * pairs, or widths that end within a panel, the values are first gathered. Each sum adds keys in ascending order. */
static void add_values(const struct attention *call, struct workplace *place, long count, long a, long b, float *state) {
    const long dim = call->dim, bytes = number_bytes(call->kv_type);
    const int direct = b - a <= FEW && dim % PANEL == 0 && call->kv_type <= CACHE_BF16;
    if (!direct) all_values(call, place, count);
    for (long c = 0; c < panels_of(dim); c++) {
        float *sums = state + STATE_SUMS + (c * PAIRS + a) * PANEL;
        const float *weights = place->weights + a * X_STRIDE;
        if (!direct) {
            panel_product(weights, place->values + c * PANEL * PANEL, PANEL, dim - c * PANEL, 0, count, sums, b - a,
                          place->next_at[0]);
            continue;
        }
        for (long key = 0, run; key < count; key += run) {
            const char *from = place->values_at[key];
            for (run = 1; key + run < count && place->values_at[key + run] == from + run * dim * bytes;) run++;
            panel_product(weights + key, from + c * PANEL * bytes, dim, PANEL, call->kv_type, run, sums, b - a,
                          place->next_at[key] + c * PANEL * bytes);
        }
    }
}

/* Turns the scores of one pair into weights and updates its maximum and sum; returns the factor for its previous sums.
 * Keys outside `seen` (relative to the tile) get weight 0. */
static float softmax_row(const struct attention *call, const float *scores, const float *bias, float *weights,
                         struct range seen, float *maximum, float *total) {
    vf s[PANEL / W], most = v_set(-INFINITY);
    for (int v = 0; v < PANEL / W; v++) {
        s[v] = v_load(scores + v * W) * v_set(call->scale);
        if (call->softcap > 0.0f)
            s[v] = v_set(call->softcap) * v_tanh(s[v] * v_set(1.0f / call->softcap));
        if (bias != NULL) s[v] += v_load(bias + v * W);
        if (seen.begin > 0 || seen.end < PANEL) {
            vf key = v_set((float)(v * W)) + v_load(COUNTING);
            s[v] = v_if_less(key, v_set((float)seen.end), s[v], v_set(-INFINITY));
            s[v] = v_if_less(key, v_set((float)seen.begin), v_set(-INFINITY), s[v]);
        }
        most = v_max(s[v], most);
    }
    const float highest = v_max_lane(most), before = *maximum, now = highest > before ? highest : before;
    vf sum = v_zero();
    for (int v = 0; v < PANEL / W; v++) {
        s[v] = v_exp(s[v] - v_set(now));
        v_store(weights + v * W, s[v]);
        sum += s[v];
    }
    float decay = 1.0f;
    if (now != before) {
        float lanes[W];
        v_store(lanes, v_exp(v_set(before - now)));
        decay = lanes[0];
    }
    *maximum = now;
    *total = *total * decay + v_sum(sum);
    return decay;
}

/* Returns the bias of one pair for a tile's keys, or NULL. */
static const float *bias_of(const struct attention *call, const struct unit *unit, long first, long p, float found[PANEL]) {
    if (call->bias == NULL) return NULL;
    const long group = call->heads / call->kv_heads, pair = unit->pair_begin + p, reach = call->reach;
    const float *line = call->bias + (unit->kv_head * group + pair % group) * (2 * reach + 1) + reach;
    for (long i = 0; i < PANEL; i++) {
        const long away = first + i - pair / group;
        found[i] = line[away < -reach ? -reach : away > reach ? reach : away];
    }
    return found;
}

/* Finds the keys to prefetch while this tile's values are added: the keys of the next tile, or of the first tile of the
 * next KV head, which the same thread most likely computes next. */
static void find_next(const struct attention *call, const struct unit *unit, long first, long last,
                      struct workplace *place) {
    struct unit then = *unit;
    first += PANEL;
    if (first >= last) {
        first = keys_of(call, unit->row, unit->pair_begin).begin / PANEL * PANEL;
        then.kv_head++;
    }
    memcpy(place->next_at, place->keys_at, sizeof place->next_at);
    if (then.kv_head == call->kv_heads) return;
    const long count = last - first < PANEL ? last - first : PANEL;
    locate(call, &then, call->k, call->k_stride, call->k_head_stride, first, count, first, place->next_at);
}

/* Processes one tile of keys for the pairs [a, b) of the unit, each of which sees at least one of these keys. */
static void tile_of_keys(const struct attention *call, const struct unit *unit, struct workplace *place, long first,
                         long a, long b, float *state) {
    const long dim = call->dim;
    const long last = keys_of(call, unit->row, unit->pair_begin + b - 1).end;
    const long count = last - first < PANEL ? last - first : PANEL;
    const long floor = keys_of(call, unit->row, unit->pair_begin + a).begin;
    locate(call, unit, call->v, call->v_stride, call->v_head_stride, first, count, floor, place->values_at);
    locate(call, unit, call->k, call->k_stride, call->k_head_stride, first, count, floor, place->keys_at);
    find_next(call, unit, first, last, place);
    if (call->kv_type > CACHE_BF16) {
        locate_scales(call, unit, call->scales.k, first, count, floor, place->key_scales);
        locate_scales(call, unit, call->scales.v, first, count, floor, place->value_scales);
    }
    all_keys(call, place, count);
    memset(place->scores + a * PANEL, 0, (size_t)((b - a) * PANEL) * sizeof(float));
    panel_product(place->q + a * X_STRIDE, place->keys, PANEL, count, 0, dim, place->scores + a * PANEL, b - a,
                  (const char *)place->keys);
    for (long p = a; p < b; p++) {
        struct range seen = keys_of(call, unit->row, unit->pair_begin + p);
        seen.begin -= first, seen.end -= first;
        _Alignas(64) float raised[PANEL];
        const float decay =
            softmax_row(call, place->scores + p * PANEL, bias_of(call, unit, first, p, raised),
                        place->weights + p * X_STRIDE, seen, state + p, state + PAIRS + p);
        if (decay == 1.0f) continue;
        for (long c = 0; c < panels_of(dim); c++) {
            float *sums = state + STATE_SUMS + (c * PAIRS + p) * PANEL;
            for (int v = 0; v < PANEL; v += W) v_store(sums + v, v_load(sums + v) * v_set(decay));
        }
    }
    add_values(call, place, count, a, b, state);
}

static void clear_state(long dim, long pairs, float *state) {
    for (long p = 0; p < pairs; p++) state[p] = -INFINITY, state[PAIRS + p] = 0.0f;
    for (long c = 0; c < panels_of(dim); c++)
        memset(state + STATE_SUMS + c * PAIRS * PANEL, 0, (size_t)(pairs * PANEL) * sizeof(float));
}

/* Processes the keys of one segment, from an empty state. */
static void segment_sums(const struct attention *call, const struct unit *unit, struct workplace *place, long segment,
                         float *state) {
    const long pairs = unit->pair_end - unit->pair_begin;
    clear_state(call->dim, pairs, state);
    for (long first = segment * SEGMENT; first < (segment + 1) * SEGMENT; first += PANEL) {
        /* Both ends of a pair's visible range grow with the pair, so the pairs that see this tile are consecutive. */
        long a = 0, b = pairs;
        while (a < b && keys_of(call, unit->row, unit->pair_begin + a).end <= first) a++;
        while (b > a && keys_of(call, unit->row, unit->pair_begin + b - 1).begin >= first + PANEL) b--;
        if (a < b) tile_of_keys(call, unit, place, first, a, b, state);
    }
}

/* Merges segment into total; a pair without keys has weight 0, any other pair at least 1 (or NaN). */
static void merge_state(long dim, long pairs, float *total, const float *segment) {
    for (long p = 0; p < pairs; p++) {
        if (segment[PAIRS + p] == 0.0f) continue;
        const float most = segment[p] > total[p] ? segment[p] : total[p];
        float old[W], new[W];
        v_store(old, v_exp(v_set(total[p] - most)));
        v_store(new, v_exp(v_set(segment[p] - most)));
        total[p] = most;
        total[PAIRS + p] = total[PAIRS + p] * old[0] + segment[PAIRS + p] * new[0];
        for (long c = 0; c < panels_of(dim); c++) {
            const long at = STATE_SUMS + (c * PAIRS + p) * PANEL;
            for (int v = 0; v < PANEL; v += W)
                v_store(total + at + v, v_fma(v_load(segment + at + v), v_set(new[0]),
                                              v_load(total + at + v) * v_set(old[0])));
        }
    }
}

static void write_out(const struct attention *call, const struct unit *unit, const float *state) {
    const long dim = call->dim, group = call->heads / call->kv_heads;
    for (long p = 0; p < unit->pair_end - unit->pair_begin; p++) {
        const long pair = unit->pair_begin + p, token = call->starts[unit->row] + pair / group;
        const long at = (token * call->heads + unit->kv_head * group + pair % group) * dim;
        float sink[W] = {0.0f};
        if (call->sinks != NULL)
            v_store(sink, v_exp(v_set(call->sinks[unit->kv_head * group + pair % group] - state[p])));
        const vf scale = v_set(1.0f / (state[PAIRS + p] + sink[0]));
        for (long d = 0; d < dim; d += W) {
            const float *sums = state + STATE_SUMS + (d / PANEL * PAIRS + p) * PANEL + d % PANEL;
            t_store(call->out, at + d, v_load(sums) * scale, dim - d, call->bf16);
        }
    }
}

enum { STATE_MAX = STATE_SUMS + PAIRS * HEAD_MAX };

static void attend(const struct attention *call, const struct unit *unit) {
    struct workplace place;
    _Alignas(64) float total[STATE_MAX], part[STATE_MAX];
    const long pairs = unit->pair_end - unit->pair_begin;
    const long first = keys_of(call, unit->row, unit->pair_begin).begin / SEGMENT;
    const long last = (keys_of(call, unit->row, unit->pair_end - 1).end - 1) / SEGMENT;
    load_queries(call, unit, place.q);
    segment_sums(call, unit, &place, first, total);
    for (long segment = first + 1; segment <= last; segment++) {
        segment_sums(call, unit, &place, segment, part);
        merge_state(call->dim, pairs, total, part);
    }
    write_out(call, unit, total);
}

static void attend_segment(const struct attention *call, const struct unit *unit, long segment, float *state) {
    struct workplace place;
    load_queries(call, unit, place.q);
    segment_sums(call, unit, &place, segment, state);
}

static void merge_segments(const struct attention *call, const struct unit *unit, long segments, float *states) {
    const long pairs = unit->pair_end - unit->pair_begin, floats = STATE_SUMS + panels_of(call->dim) * PAIRS * PANEL;
    for (long s = 1; s < segments; s++) merge_state(call->dim, pairs, states, states + s * floats);
    write_out(call, unit, states);
}
