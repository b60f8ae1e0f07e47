"""SeqTable: a row of integers per live request; also allocates slots.

Owner: the device thread, only through Scheduler. In: a request's tokens, keys, limits, stop ids, media spans and
bidirectional spans. Out: arrays indexed by slot that the scheduler reads and writes, and whether a new token ends its
request.
Each slot has three lengths; the scheduler reduces the difference between the first and the last:

    committed <= computed <= num_tokens + choosing <= num_tokens + pending
    (KV of steps whose result is known) (KV of launched steps) (tokens known here + those promised by steps in flight)

Steps and tokens are counted separately: `choosing` steps in flight choose tokens for the row, each a run of at least
one token; `pending` is the maximum number of these tokens. A run is longer than a token if the step verifies drafts: it
computes each token of its run except the newest. The next step begins at this newest token, and until the run has
arrived on the host only the device knows its position. So `computed` is a minimum, too, while more than one token is
pending for a step.

Token, key and hash buffers are allocated per slot and grow by half, so only requests of a million tokens use memory for
a million tokens.
"""

from array import array

cimport cython
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy

from _fast.types cimport FINISH_LENGTH, FINISH_NONE, FINISH_STOP, FINISH_STOP_TOKEN, FREE


cdef inline bint _holds(const token_t* ids, int32_t count, token_t token) noexcept nogil:
    """Binary search in ascending ids."""
    cdef int32_t low = 0
    cdef int32_t high = count
    cdef int32_t mid
    while low < high:
        mid = (low + high) >> 1
        if ids[mid] < token:
            low = mid + 1
        else:
            high = mid
    return low < count and ids[low] == token


@cython.final
cdef class SeqTable:
    """The scheduler's data of live requests, one array per property."""

    def __cinit__(self, int32_t num_slots):
        if num_slots < 1:
            raise ValueError(f"num_slots={num_slots}: need at least 1")
        self.tokens = <token_t**>calloc(num_slots, sizeof(token_t*))
        self.keys = <int64_t**>calloc(num_slots, sizeof(int64_t*))
        self.hashes = <uint64_t**>calloc(num_slots, sizeof(uint64_t*))
        self.stops = <token_t**>calloc(num_slots, sizeof(token_t*))
        self.bi_spans = <BiSpan**>calloc(num_slots, sizeof(BiSpan*))
        self.spans = <Span**>calloc(num_slots, sizeof(Span*))
        if not (self.tokens and self.keys and self.hashes and self.stops and self.bi_spans and self.spans):
            raise MemoryError(f"no memory for {num_slots} slots")
        self.num_slots = num_slots

    def __init__(self, int32_t num_slots):
        cdef int32_t i
        self.num_used = 0
        self.free_slots = array("i", bytes(4 * num_slots))
        self.state = array("B", bytes(num_slots))
        self.read_cache = array("B", bytes(num_slots))
        self.unnamed = array("B", bytes(num_slots))
        self.fails_at_settle = array("B", bytes(num_slots))
        self.restarting = array("B", bytes(num_slots))
        self.redoing = array("B", bytes(num_slots))
        self.traced = array("B", bytes(num_slots))
        self.closing = array("B", bytes(num_slots))
        self.request = array("q", bytes(8 * num_slots))
        self.prompt_len = array("i", bytes(4 * num_slots))
        self.num_tokens = array("i", bytes(4 * num_slots))
        self.computed = array("i", bytes(4 * num_slots))
        self.committed = array("i", bytes(4 * num_slots))
        self.choosing = array("B", bytes(num_slots))
        self.pending = array("B", bytes(num_slots))
        self.in_flight = array("B", bytes(num_slots))
        self.drafts = array("B", bytes(num_slots))
        self.found = array("B", bytes(num_slots))
        self.chained = array("B", bytes(num_slots))
        self.max_len = array("i", bytes(4 * num_slots))
        self.min_len = array("i", bytes(4 * num_slots))
        self.priority = array("i", bytes(4 * num_slots))
        self.arrival = array("d", bytes(8 * num_slots))
        self.order = array("q", bytes(8 * num_slots))
        self.epoch = array("B", bytes(num_slots))
        self.num_named = array("i", bytes(4 * num_slots))
        self.boundary = array("i", bytes(4 * num_slots))
        self.cached = array("i", bytes(4 * num_slots))
        self.root_lo = array("Q", bytes(8 * num_slots))
        self.root_hi = array("Q", bytes(8 * num_slots))
        self.num_hashed = array("i", bytes(4 * num_slots))
        self.num_eos = array("i", bytes(4 * num_slots))
        self.num_stop = array("i", bytes(4 * num_slots))
        self.num_bi_spans = array("i", bytes(4 * num_slots))
        self.num_spans = array("i", bytes(4 * num_slots))
        self.span_at = array("i", bytes(4 * num_slots))
        self.span_done = array("i", bytes(4 * num_slots))
        self.token_room = array("i", bytes(4 * num_slots))
        self.hash_room = array("i", bytes(4 * num_slots))
        for i in range(num_slots):
            self.free_slots[i] = num_slots - 1 - i
            self.epoch[i] = 0
            self.reset(i)

    def __dealloc__(self):
        cdef int32_t i
        for i in range(self.num_slots):
            free(self.tokens[i])
            free(self.keys[i])
            free(self.hashes[i])
            free(self.stops[i])
            free(self.bi_spans[i])
            free(self.spans[i])
        free(self.tokens)
        free(self.keys)
        free(self.hashes)
        free(self.stops)
        free(self.bi_spans)
        free(self.spans)

    cdef slot_t take(self) noexcept nogil:
        """Return a clean free slot, or -1."""
        if self.num_used == self.num_slots:
            return -1
        self.num_used += 1
        return self.free_slots[self.num_slots - self.num_used]

    cdef void give(self, slot_t slot) noexcept nogil:
        """Free a slot and clear its data."""
        self.reset(slot)
        self.free_slots[self.num_slots - self.num_used] = slot
        self.num_used -= 1

    cdef void reset(self, slot_t slot) noexcept nogil:
        """Clear all data and buffers of a slot. Only `epoch` increases: plans of the former request must not match."""
        self.state[slot] = FREE
        self.read_cache[slot] = 0
        self.unnamed[slot] = 0
        self.fails_at_settle[slot] = 0
        self.restarting[slot] = 0
        self.redoing[slot] = 0
        self.traced[slot] = 0
        self.closing[slot] = 0
        self.request[slot] = -1
        self.prompt_len[slot] = 0
        self.num_tokens[slot] = 0
        self.computed[slot] = 0
        self.committed[slot] = 0
        self.choosing[slot] = 0
        self.pending[slot] = 0
        self.in_flight[slot] = 0
        self.drafts[slot] = 0
        self.found[slot] = 0
        self.chained[slot] = 0
        self.max_len[slot] = 0
        self.min_len[slot] = 0
        self.priority[slot] = 0
        self.arrival[slot] = 0
        self.order[slot] = 0
        self.num_named[slot] = 0
        self.boundary[slot] = 0
        self.cached[slot] = -1
        self.root_lo[slot] = 0
        self.root_hi[slot] = 0
        self.num_hashed[slot] = 0
        self.num_eos[slot] = 0
        self.num_stop[slot] = 0
        self.num_bi_spans[slot] = 0
        self.num_spans[slot] = 0
        self.span_at[slot] = 0
        self.span_done[slot] = 0
        self.token_room[slot] = 0
        self.hash_room[slot] = 0
        self.epoch[slot] += 1
        free(self.tokens[slot])
        free(self.keys[slot])
        free(self.hashes[slot])
        free(self.stops[slot])
        free(self.bi_spans[slot])
        free(self.spans[slot])
        self.tokens[slot] = NULL
        self.keys[slot] = NULL
        self.hashes[slot] = NULL
        self.stops[slot] = NULL
        self.bi_spans[slot] = NULL
        self.spans[slot] = NULL

    cdef int32_t left(self, slot_t slot) noexcept nogil:
        """Return the number of tokens that a row could compute now; 0 if its last token is certainly pending.

        A closing row computes its known tokens and samples nothing.
        """
        cdef int32_t known = self.num_tokens[slot] + self.choosing[slot]
        if self.closing[slot]:
            return self.num_tokens[slot] - self.computed[slot]
        return known - self.computed[slot] if known < self.max_len[slot] else 0

    cdef void promise(self, slot_t slot, int32_t most) noexcept nogil:
        """Record that a launched step samples for the row and will append up to `most` tokens."""
        self.choosing[slot] += 1
        self.pending[slot] += <uint8_t>most

    cdef void settle_promise(self, slot_t slot, int32_t most) noexcept nogil:
        """Undo `promise` when the step's tokens are appended or dropped; does nothing for a closing row."""
        if not self.closing[slot]:
            self.choosing[slot] -= 1
            self.pending[slot] -= <uint8_t>most

    cdef void drop_promises(self, slot_t slot) noexcept nogil:
        """Ignore the tokens that steps in flight choose for the row."""
        self.choosing[slot] = self.pending[slot] = 0

    cdef int32_t reach(self, slot_t slot, int32_t end, int32_t most) noexcept nogil:
        """Return the last end of KV of a step that computes the row at least to `end` and adds `most` tokens."""
        cdef int32_t last = self.max_len[slot] - (not self.traced[slot])  # the last token is computed only for traces
        return max(end, min(end + self.pending[slot] - self.choosing[slot] + most - 1, last))

    cdef int32_t whole(self, slot_t slot, int32_t start, int32_t count, int32_t most) noexcept nogil:
        """Return the length of a chunk from `start` on, about `count` positions, that cuts no bidirectional span.

        The chunk ends before a span that it would cut. If it would then be empty, it extends to the end of the span, if
        this takes at most `most` positions; else it is empty.
        """
        cdef int32_t k
        cdef BiSpan* bi_span
        for k in range(self.num_bi_spans[slot]):
            bi_span = &self.bi_spans[slot][k]
            if bi_span.start >= start + count:
                break
            if bi_span.end > start + count:
                if bi_span.start > start:
                    return bi_span.start - start
                return bi_span.end - start if bi_span.end - start <= most else 0
        return count

    cdef slot_t find(self, int64_t request) noexcept nogil:
        """Return the slot of a live request, or -1. A linear scan, because aborts are rare and the array is small."""
        cdef int32_t i
        for i in range(self.num_slots):
            if self.request[i] == request and self.state[i] != FREE:
                return i
        return -1

    cdef int append(self, slot_t slot, token_t token) noexcept nogil:
        """Append a known token; -1: out of memory."""
        cdef int32_t room = self.token_room[slot]
        cdef token_t* grown
        if self.num_tokens[slot] == room:
            room += (room >> 1) + 16
            grown = <token_t*>realloc(self.tokens[slot], <size_t>room * sizeof(token_t))
            if not grown:
                return -1
            self.tokens[slot] = grown
            self.token_room[slot] = room
        self.tokens[slot][self.num_tokens[slot]] = token
        self.num_tokens[slot] += 1
        return 0

    cdef int32_t verdict(self, slot_t slot, token_t token) noexcept nogil:
        """Return why the token just appended ends its request, or FINISH_NONE. Below min_len only length can."""
        cdef const token_t* ids = self.stops[slot]
        if self.num_tokens[slot] >= self.min_len[slot]:
            if self.num_eos[slot] and _holds(ids, self.num_eos[slot], token):
                return FINISH_STOP
            if self.num_stop[slot] and _holds(ids + self.num_eos[slot], self.num_stop[slot], token):
                return FINISH_STOP_TOKEN
        if self.num_tokens[slot] >= self.max_len[slot]:
            return FINISH_LENGTH
        return FINISH_NONE

    cdef int32_t gather(self, slot_t slot, int32_t start, int32_t count, int64_t* into) noexcept nogil:
        """Write the keys of positions start .. start + count - 1: the engine's keys if given, else the token ids.

        Return the number of words written: `count`, or 2 * count if a position has a second word. Second words that are
        all 0 are omitted, so that text has the same keys in prompts with and without media.
        """
        cdef int32_t i
        cdef int32_t given = self.prompt_len[slot] if self.keys[slot] else 0
        cdef const int64_t* keys = self.keys[slot]
        cdef int64_t seconds = 0
        for i in range(count):
            if start + i < given:
                into[i] = keys[start + i]
                into[count + i] = keys[given + start + i]
                seconds |= into[count + i]
            else:
                into[i] = self.tokens[slot][start + i]
                into[count + i] = 0
        return 2 * count if seconds else count

    cdef int fill(self, slot_t slot, const token_t[::1] tokens, const int64_t[:, ::1] keys, object eos_ids,
                  object stop_ids, const int32_t[:, ::1] media, const int32_t[:, ::1] bi_spans) except -1:
        """Copy a request's buffers into a clean slot."""
        cdef int32_t n = <int32_t>tokens.shape[0]
        cdef int32_t i = 0
        cdef list eos = sorted(set(eos_ids))
        cdef list stop = sorted(set(stop_ids))
        self.tokens[slot] = <token_t*>malloc((<size_t>n + 16) * sizeof(token_t))
        self.token_room[slot] = n + 16
        self.stops[slot] = <token_t*>malloc((<size_t>(len(eos) + len(stop)) + 1) * sizeof(token_t))
        if keys is not None:
            self.keys[slot] = <int64_t*>malloc(2 * <size_t>n * sizeof(int64_t))
        if media is not None and media.shape[0]:
            self.spans[slot] = <Span*>malloc(<size_t>media.shape[0] * sizeof(Span))
            self.num_spans[slot] = <int32_t>media.shape[0]
        if bi_spans is not None and bi_spans.shape[0]:
            self.bi_spans[slot] = <BiSpan*>malloc(<size_t>bi_spans.shape[0] * sizeof(BiSpan))
            self.num_bi_spans[slot] = <int32_t>bi_spans.shape[0]
        if (
            not self.tokens[slot]
            or not self.stops[slot]
            or (keys is not None and not self.keys[slot])
            or (self.num_spans[slot] and not self.spans[slot])
            or (self.num_bi_spans[slot] and not self.bi_spans[slot])
        ):
            raise MemoryError(f"no memory for a prompt of {n} tokens")
        memcpy(self.tokens[slot], &tokens[0], <size_t>n * sizeof(token_t))
        if keys is not None:
            memcpy(self.keys[slot], &keys[0, 0], 2 * <size_t>n * sizeof(int64_t))
        for value in eos + stop:
            self.stops[slot][i] = value
            i += 1
        self.num_tokens[slot] = n
        self.prompt_len[slot] = n
        self.num_eos[slot] = <int32_t>len(eos)
        self.num_stop[slot] = <int32_t>len(stop)
        self._fill_spans(slot, media)
        for i in range(self.num_bi_spans[slot]):
            self.bi_spans[slot][i] = BiSpan(bi_spans[i, 0], bi_spans[i, 1])
        return 0

    cdef int _fill_spans(self, slot_t slot, const int32_t[:, ::1] media) except -1:
        cdef int32_t i
        cdef Span* span
        cdef dict last = {}
        for i in range(self.num_spans[slot] - 1, -1, -1):
            span = &self.spans[slot][i]
            span.start = media[i, 0]
            span.length = media[i, 1]
            span.entry = media[i, 2]
            span.row = media[i, 3]
            span.last = last.setdefault(span.entry, i)
            span.pinned = 0
        return 0

    def snapshot(self, int32_t slot):
        """Return all data of a slot by name (for tests); equal after each reset, except `epoch`."""
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot {slot}: this table has slots 0 to {self.num_slots - 1}")
        return {
            "state": self.state[slot],
            "read_cache": self.read_cache[slot],
            "unnamed": self.unnamed[slot],
            "fails_at_settle": self.fails_at_settle[slot],
            "restarting": self.restarting[slot],
            "redoing": self.redoing[slot],
            "traced": self.traced[slot],
            "closing": self.closing[slot],
            "request": self.request[slot],
            "prompt_len": self.prompt_len[slot],
            "num_tokens": self.num_tokens[slot],
            "computed": self.computed[slot],
            "committed": self.committed[slot],
            "choosing": self.choosing[slot],
            "pending": self.pending[slot],
            "in_flight": self.in_flight[slot],
            "drafts": self.drafts[slot],
            "found": self.found[slot],
            "chained": self.chained[slot],
            "max_len": self.max_len[slot],
            "min_len": self.min_len[slot],
            "priority": self.priority[slot],
            "arrival": self.arrival[slot],
            "order": self.order[slot],
            "epoch": self.epoch[slot],
            "num_named": self.num_named[slot],
            "boundary": self.boundary[slot],
            "cached": self.cached[slot],
            "root_lo": self.root_lo[slot],
            "root_hi": self.root_hi[slot],
            "num_hashed": self.num_hashed[slot],
            "num_eos": self.num_eos[slot],
            "num_stop": self.num_stop[slot],
            "num_bi_spans": self.num_bi_spans[slot],
            "num_spans": self.num_spans[slot],
            "span_at": self.span_at[slot],
            "span_done": self.span_done[slot],
            "token_room": self.token_room[slot],
            "hash_room": self.hash_room[slot],
            "tokens": self.tokens[slot] != NULL,
            "keys": self.keys[slot] != NULL,
            "hashes": self.hashes[slot] != NULL,
            "stops": self.stops[slot] != NULL,
            "bi_spans": self.bi_spans[slot] != NULL,
            "spans": self.spans[slot] != NULL,
        }
