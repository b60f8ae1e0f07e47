/* A device runtime whose stream runs as late, or as early, as events allow, and whose graphs do a step's bookkeeping.

   The stream is a list of calls. A lazy one runs them only when the test waits for an event behind them, an eager one
   at once. So a buffer that is written too early changes what is read. The functions have CUDA's names, so that the
   library can stand for libcudart.

   The model behind "prep", "forward" and "sample": records take turns; a record is taken apart by its header; a slot's
   words travel once; a token is a hash of the slot's seed and the token's place; a fed token is the slot's newest; the
   tokens go to the ring buffer that the header names. A step whose own numbers do not fit together sets `fault`.

   With set_cache() the model also has a cache of one group, which holds identities: position p of a row stores a hash of
   the row's tokens up to p. A row that reads a block of another prefix, or a block that was never sent, sets `fault`. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "layout.h" /* the members of _fast/layout.py */

enum { MAX_OPS = 64, MAX_LOG = 1 << 16, EVENTS = 512, SLOTS = 1024, ROWS = 1024, PREP_NS = 5000 };
enum { BLOCKS = 1 << 10, LINE = 1 << 8, CONTEXT = 1 << 10 };
enum { COPY, GRAPH, RECORD };
enum { LOG_GRAPH, LOG_COPY, LOG_RECORD, LOG_SYNC, LOG_QUERY, LOG_ELAPSED };

typedef struct { int kind, event; int64_t version; void *to; const void *from; size_t size; int64_t graph; } Op;
typedef struct { Op ops[MAX_OPS]; int64_t begin, end; int eager; } Stream;
typedef struct { int64_t asked, reached; int used; unsigned flags; int64_t at, stamp; } Event;

static Stream stream;                /* handle 1 */
static Event events[EVENTS + 1];     /* handles 1 .. EVENTS */
static int32_t calls[MAX_LOG][2];    /* (what, of which) */
static int64_t num_calls;
static int fail_call = -1, fail_code, fail_after;
static int32_t max_rows, max_tokens, *ring[8], *records[8], num_records, *turn;
static int32_t words[SLOTS][SLOT_WORDS], last_token[SLOTS], table_updates;
static int32_t length[SLOTS]; /* of each slot: its tokens, those included that the host does not know yet */
static int32_t found[SLOTS];  /* drafts for the tokens after these */
static int32_t header[HEADER_LEN], rows_slot[ROWS], rows_place[ROWS], rows_end[ROWS], rows_drafts[ROWS], rows_sampled, rows_lines;
static int64_t fault, device_end, step_ns, faulty_step = -1;
static int32_t faulty_run[3] = {-1, -1, -1}; /* what the first sampled row of that step brings home */
static int32_t plain; /* the graph that runs leaves drafts out */
static int32_t vocab = 1000, bare, width = 1; /* width: places of a row's run */
static int32_t in_order = 1, next_prep;  /* every step's record was read, once, in order */
static int32_t block_size, factor, modulus;          /* of the cache, 0: none; of the prompts: token p is p * factor % modulus */
static int32_t table[SLOTS][LINE];                   /* blocks of each slot */
static uint64_t held[BLOCKS * 16];                   /* identity at each block's positions */
static uint64_t own[SLOTS][CONTEXT + 1];             /* identities of a slot's tokens; at 0 that of no token */
static int32_t num_own[SLOTS];
static int wake_fd, wake_after; /* written when that many forwards have been launched */

static int64_t clock_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int note(int what, int which)
{
    if (num_calls < MAX_LOG) {
        calls[num_calls][0] = what;
        calls[num_calls][1] = which;
    }
    num_calls++;
    if (what == fail_call && fail_after-- == 0)
        return fail_code;
    return 0;
}

int32_t draw(int32_t seed, int32_t place)
{
    uint32_t x = (uint32_t)seed * 2654435761u + (uint32_t)place * 40503u + 12345u;
    x ^= x >> 15;
    x *= 2246822519u;
    x ^= x >> 13;
    return (int32_t)(x % (uint32_t)vocab);
}

/* The identity of the slot's tokens up to position p, from the prompts' rule and from what is drawn. */
static uint64_t identity(int32_t slot, int32_t p)
{
    for (; num_own[slot] <= p; num_own[slot]++) {
        int32_t at = num_own[slot], prompt_len = words[slot][SLOT_PROMPT_LEN];
        uint64_t token = at < prompt_len ? at * factor % modulus : draw(words[slot][SLOT_SEED_LOW], at - prompt_len);
        own[slot][at + 1] = (own[slot][at] + token + 1) * 6364136223846793005u + 1442695040888963407u;
    }
    return own[slot][p + 1];
}

static uint64_t *cell(int32_t slot, int32_t p)
{
    int32_t block = table[slot][p / block_size];
    fault |= (block < 1 || block >= BLOCKS) << 13;
    return &held[(block & (BLOCKS - 1)) * 16 + p % block_size];
}

/* A row reads the positions before its own and writes its own. */
static void read_and_write(int32_t slot, int32_t start, int32_t count)
{
    int32_t p;
    for (p = 0; p < start; p++)
        fault |= (*cell(slot, p) != identity(slot, p)) << 14;
    for (p = start; p < start + count; p++)
        *cell(slot, p) = identity(slot, p);
}

static void prep(const int32_t *record)
{
    const int32_t *rows = record + HEADER_LEN, column = max_rows + 1;
    const int32_t *slot = rows + ROW_SLOT * column, *start = rows + ROW_START * column, *len = rows + ROW_LEN * column;
    const int32_t *computed = rows + ROW_COMPUTED * column, *flags = rows + ROW_FLAGS * column;
    const int32_t *token = rows + (ROW_FLAGS + 1) * column;
    const int32_t *tail = record + (token + max_tokens - record + ALIGNED - 1) / ALIGNED * ALIGNED;
    const int32_t *param = tail + UPDATE_WORDS * record[HEADER_NUM_UPDATES];
    int32_t row, k, places;
    memcpy(header, record, sizeof header);
    in_order &= header[HEADER_STEP_LOW] == next_prep++;
    if (bare) {
        rows_lines = record[HEADER_NUM_TOKENS] - start[record[HEADER_NUM_ROWS]];
        return;
    }
    table_updates += record[HEADER_NUM_UPDATES];
    for (k = 0; k < record[HEADER_NUM_PARAMS]; k++, param += SLOT_WORDS) {
        memcpy(words[param[SLOT_SLOT]], param, SLOT_WORDS * sizeof(int32_t));
        num_own[param[SLOT_SLOT]] = 0;
    }
    for (k = 0; block_size && k < record[HEADER_NUM_UPDATES]; k++, tail += UPDATE_WORDS)
        table[tail[UPDATE_SLOT]][tail[UPDATE_INDEX]] = tail[UPDATE_BLOCK];
    rows_sampled = rows_lines = 0;
    places = record[HEADER_NUM_TOKENS] - start[record[HEADER_NUM_ROWS]]; /* for drafts; the first rows get them */
    fault |= (places < 0) << 16;
    for (row = 0; row < record[HEADER_NUM_ROWS]; row++) {
        int32_t s = slot[row];
        /* A fed row begins at the slot's newest token; its record says where at least, or exactly. Drafts follow. */
        int32_t fed = flags[row] & ROW_FEED, moved = fed && !(flags[row] & ROW_EXACT);
        int32_t begin = moved && width > 1 ? length[s] - 1 : computed[row];
        int32_t count = fed ? 1 : len[row], room = words[s][SLOT_TOP_K] - 2 - begin;
        room = room < len[row] - 1 ? room : len[row] - 1;
        room = room < places ? room : places;
        rows_drafts[row] = !fed || room < 0 ? 0 : found[s] < room ? found[s] : room;
        places -= rows_drafts[row];
        fault |= (begin < computed[row] || (width == 1 && begin != computed[row])) << 15;
        rows_end[row] = begin + count;
        fault |= start[row + 1] - start[row] != count || words[s][SLOT_SLOT] != s;
        for (k = 0; k < count; k++)
            fault |= fed ? (token[start[row] + k] != -1) << 1 : (token[start[row] + k] < 0) << 2;
        rows_slot[row] = s;
        rows_place[row] = flags[row] & ROW_SAMPLE ? rows_end[row] - words[s][SLOT_PROMPT_LEN] : -1;
        rows_sampled += flags[row] & ROW_SAMPLE ? 1 : 0;
        rows_lines += flags[row] & ROW_SAMPLE ? 1 + rows_drafts[row] : 0;
        /* What a row reads: its newest token, fed here or known to the host, is the one drawn last. */
        if (begin >= words[s][SLOT_PROMPT_LEN]) {
            int32_t newest = fed ? last_token[s] : token[start[row]];
            fault |= (newest != draw(words[s][SLOT_SEED_LOW], begin - words[s][SLOT_PROMPT_LEN])) << 3;
        }
        if (block_size && (width == 1 || begin < words[s][SLOT_TOP_K] - 1)) /* no answer reaches further */
            read_and_write(s, begin, count);
    }
    fault |= (rows_sampled != record[HEADER_NUM_SAMPLED]) << 4;
}

/* Without bookkeeping every row gets token 7; its drafts are dealt out evenly, and of up to two each is right or not. */
static void bare_runs(int32_t *tokens)
{
    int32_t row, k, rows = header[HEADER_NUM_ROWS], share, right;
    for (row = 0; row < rows; row++) {
        share = rows_lines / rows + (row < rows_lines % rows);
        right = (uint32_t)(row * 40503 + header[HEADER_STEP_LOW] * 12345) / 64 % 3;
        right = right < share ? right : share;
        for (k = 0; k < width; k++)
            tokens[row * width + k] = k <= right ? 7 : TOKEN_END - (width - 2) - RUN_VERIFIED * share;
    }
}

static void sample(int32_t size)
{
    int32_t row, *tokens = ring[header[HEADER_HOME]];
    if (bare) {
        bare_runs(tokens);
        return;
    }
    fault |= (rows_lines > size) << 5;
    for (row = 0; row < header[HEADER_NUM_ROWS]; row++)
        if (rows_place[row] >= 0) {
            int32_t s = rows_slot[row], token = draw(words[s][SLOT_SEED_LOW], rows_place[row]);
            int32_t k, p, count = 1 + token % (1 + rows_drafts[row]);
            for (k = 0; k < count; k++)
                tokens[row * width + k] = last_token[s] = draw(words[s][SLOT_SEED_LOW], rows_place[row] + k);
            fault |= (plain && rows_drafts[row]) << 17;
            for (; k < width; k++)
                tokens[row * width + k] = TOKEN_END;
            if (plain)
                continue; /* the slot's length and drafts stay what they were */
            found[s] = width > 2 ? token / 8 % (width - 1) : 0;
            for (k = count; k < width; k++)
                tokens[row * width + k] -= found[s] + RUN_VERIFIED * rows_drafts[row];
            length[s] = rows_end[row] + count;
            /* The step has computed its run but for the newest token; of what no answer may have, nothing. */
            for (p = rows_end[row]; block_size && p < length[s] - 1; p++)
                if (p < words[s][SLOT_TOP_K] - 1)
                    read_and_write(s, p, 1);
        } else
            tokens[row * width] = -7; /* must not be read */
    if (faulty_step >= 0 && header[HEADER_STEP_LOW] == faulty_step)
        for (row = 0; row < header[HEADER_NUM_ROWS]; row++)
            if (rows_place[row] >= 0) {
                memcpy(tokens + row * width, faulty_run, (width < 3 ? width : 3) * sizeof(int32_t));
                break;
            }
}

/* Graph handles: 1000 prep, 20000 + decode size, 30000 + mixed size, 40000 + sample size, 50000 + size of a whole step;
   and 100000 for the choice without drafts, on a server with drafts. */
enum { PREP = 1000, DECODE = 20000, MIXED = 30000, SAMPLE = 40000, STEP = 50000, PLAIN = 100000 };

static int num_streams = 1; /* handles 1 to num_streams */
static void (*bodies)(int64_t); /* runs the graph of a handle, where tests bring graphs of their own */

static void graph(int64_t handle)
{
    if (bodies) {
        bodies(handle);
        return;
    }
    plain = handle >= PLAIN;
    handle -= plain * PLAIN;
    int32_t size = (int32_t)(handle % 10000);
    if (handle < DECODE || handle >= STEP) {
        prep(records[*turn]);
        *turn = (*turn + 1) % num_records;
    }
    if ((handle >= DECODE && handle < SAMPLE) || handle >= STEP)
        fault |= (header[HEADER_NUM_TOKENS] > size) << 6 | ((handle < MIXED || handle >= STEP) && header[HEADER_NUM_TOKENS] != header[HEADER_NUM_ROWS]) << 7;
    if (handle >= SAMPLE)
        sample(size);
    fault |= (handle >= STEP && !bare && rows_sampled != header[HEADER_NUM_ROWS]) << 10;
}

static void run_one(void)
{
    Op *op = &stream.ops[stream.begin % MAX_OPS];
    stream.begin++;
    if (op->kind == COPY)
        memcpy(op->to, op->from, op->size);
    else if (op->kind == GRAPH)
        graph(op->graph);
    else
        events[op->event].reached = op->version;
}

static void reach(int event, int64_t version)
{
    while (events[event].reached < version && stream.begin < stream.end)
        run_one();
}

static int push(void *handle, Op op)
{
    fault |= ((intptr_t)handle < 1 || (intptr_t)handle > num_streams) << 12;
    if (stream.end - stream.begin == MAX_OPS)
        run_one();
    stream.ops[stream.end++ % MAX_OPS] = op;
    while (stream.eager && stream.begin < stream.end)
        run_one();
    return 0;
}

int cudaGraphLaunch(void *handle, void *on)
{
    Op op = {.kind = GRAPH, .graph = (int64_t)(intptr_t)handle};
    int code = note(LOG_GRAPH, (int)(intptr_t)handle);
    int64_t of = op.graph % PLAIN;
    int forward = (of >= DECODE && of < SAMPLE) || of >= STEP;
    if (!code && step_ns) {
        int64_t now = clock_ns();
        device_end = (device_end > now ? device_end : now) + (forward ? step_ns : of < DECODE ? PREP_NS : 0);
    }
    if (forward && wake_after && --wake_after == 0) {
        int64_t one = 1;
        if (write(wake_fd, &one, sizeof one) < 0)
            fault |= 1 << 8;
    }
    return code ? code : push(on, op);
}

int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *on)
{
    Op op = {.kind = COPY, .to = to, .from = from, .size = size};
    int code = note(LOG_COPY, (int)size);
    fault |= (kind != 1) << 11;
    return code ? code : push(on, op);
}

int cudaEventCreateWithFlags(void **event, unsigned flags)
{
    intptr_t i;
    for (i = 1; i <= EVENTS; i++)
        if (!events[i].used) {
            events[i] = (Event){.used = 1, .flags = flags};
            *event = (void *)i;
            return 0;
        }
    return 2;
}

int cudaEventDestroy(void *event)
{
    events[(intptr_t)event].used = 0;
    return 0;
}

int cudaEventRecord(void *event, void *on)
{
    Event *own = &events[(intptr_t)event];
    Op op = {.kind = RECORD, .event = (int)(intptr_t)event, .version = ++own->asked};
    int code = note(LOG_RECORD, (int)(intptr_t)event);
    own->at = device_end;
    own->stamp = device_end > clock_ns() ? device_end : clock_ns();
    return code ? code : push(on, op);
}

int cudaEventQuery(void *event)
{
    Event *own = &events[(intptr_t)event];
    int code = note(LOG_QUERY, (int)(intptr_t)event);
    if (code)
        return code;
    return own->reached < own->asked || own->at > clock_ns() ? 600 : 0;
}

int cudaEventSynchronize(void *event)
{
    Event *own = &events[(intptr_t)event];
    int code = note(LOG_SYNC, (int)(intptr_t)event);
    if (code)
        return code;
    reach((int)(intptr_t)event, own->asked);
    if (own->at > clock_ns()) {
        struct timespec until = {own->at / 1000000000LL, own->at % 1000000000LL};
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
    }
    return 0;
}

int cudaEventElapsedTime(float *milliseconds, void *start, void *end)
{
    Event *from = &events[(intptr_t)start], *to = &events[(intptr_t)end];
    int code = note(LOG_ELAPSED, (int)(intptr_t)end);
    if (code || from->flags & 2 || to->flags & 2)
        return code ? code : 400;
    if (from->reached < from->asked || to->reached < to->asked || from->at > clock_ns() || to->at > clock_ns())
        return 600;
    *milliseconds = (float)(to->stamp - from->stamp) * 1e-6f;
    return 0;
}

const char *cudaGetErrorString(int code)
{
    return code == 700 ? "an illegal memory access was encountered" : "unknown";
}

/* What tests set and read. */

void setup(int32_t rows, int32_t tokens, int32_t **host_ring, int32_t **host_records, int32_t count, int32_t *next, int32_t run)
{
    memset(&stream, 0, sizeof stream);
    memset(events, 0, sizeof events);
    memset(words, 255, sizeof words);
    memset(last_token, 255, sizeof last_token);
    memset(table, 0, sizeof table);
    memset(held, 0, sizeof held);
    memset(num_own, 0, sizeof num_own);
    max_rows = rows;
    max_tokens = tokens;
    memcpy(ring, host_ring, count * sizeof(int32_t *));
    memcpy(records, host_records, count * sizeof(int32_t *));
    num_records = count;
    width = run;
    turn = next;
    num_calls = fault = device_end = step_ns = table_updates = bare = wake_after = next_prep = block_size = 0;
    in_order = 1;
    fail_call = -1;
    faulty_step = -1;
    faulty_run[0] = faulty_run[1] = faulty_run[2] = -1;
    bodies = NULL;
    num_streams = 1;
}

/* Graphs of the caller's, each run when it is launched: torch's calls between two launches stand behind the first. */
void set_bodies(void (*run)(int64_t))
{
    memset(&stream, 0, sizeof stream); /* what another test left behind writes into memory that is gone */
    bodies = run, num_streams = 8, stream.eager = 1, step_ns = 0, fail_call = -1, wake_after = 0;
}

void set_eager(int eager) { stream.eager = eager; }
void set_failure(int call, int code, int after) { fail_call = call, fail_code = code, fail_after = after; }
void set_step_ns(int64_t ns) { step_ns = ns; }
void set_faulty_step(int64_t step) { faulty_step = step; }
void set_faulty_run(int32_t a, int32_t b, int32_t c) { faulty_run[0] = a, faulty_run[1] = b, faulty_run[2] = c; }
void set_wake(int fd, int after) { wake_fd = fd, wake_after = after; }
void set_bare(int32_t value) { bare = value; }
void set_cache(int32_t size, int32_t by, int32_t in) { block_size = size, factor = by, modulus = in; }
void set_vocab(int32_t value) { vocab = value; }
int64_t get_fault(void) { return fault | !in_order << 9; }
int64_t get_num_events(void) { int64_t n = 0; for (int i = 1; i <= EVENTS; i++) n += events[i].used; return n; }
int64_t take_calls(int32_t *into, int64_t room)
{
    int64_t n = num_calls < MAX_LOG ? num_calls : MAX_LOG;
    n = n < room ? n : room;
    memcpy(into, calls, n * sizeof calls[0]);
    num_calls = 0;
    return n;
}
