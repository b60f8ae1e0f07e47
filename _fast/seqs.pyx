"""SeqTable: a row of integers per live request; also allocates slots.

Owner: the device thread, only through Scheduler. In: a request's tokens, keys, limits, stop ids, media spans and
bidirectional spans. Out: a Seq per slot that the scheduler reads and writes, and whether a new token ends its request.
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
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset
from posix.stdlib cimport posix_memalign

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


cdef int grow_tokens(Seq* own) noexcept nogil:
    """Enlarge the buffer of a slot's tokens; -1: out of memory."""
    cdef int32_t room = own.token_room + (own.token_room >> 1) + 16
    cdef token_t* grown = <token_t*>realloc(own.tokens, <size_t>room * sizeof(token_t))
    if not grown:
        return -1
    own.tokens = grown
    own.token_room = room
    return 0


@cython.final
cdef class SeqTable:
    """The scheduler's data of live requests, by slot."""

    def __cinit__(self, int32_t num_slots):
        if num_slots < 1:
            raise ValueError(f"num_slots={num_slots}: need at least 1")
        if posix_memalign(<void**>&self.of, 64, <size_t>num_slots * sizeof(Seq)):
            raise MemoryError(f"no memory for {num_slots} slots")
        memset(self.of, 0, <size_t>num_slots * sizeof(Seq))
        self.num_slots = num_slots

    def __init__(self, int32_t num_slots):
        cdef int32_t i
        self.num_used = 0
        self.free_slots = array("i", bytes(4 * num_slots))
        for i in range(num_slots):
            self.free_slots[i] = num_slots - 1 - i
            self.of[i].epoch = 0
            self.reset(i)

    def __dealloc__(self):
        cdef int32_t i
        for i in range(self.num_slots):
            self.reset(i)
        free(self.of)

    cdef void fetch_rows(self, const slot_t* slots, int32_t count) noexcept nogil:
        """Begin to load the slots' data: together, because other work has had the core's caches since the last step."""
        cdef int32_t i
        for i in range(count):
            fetch(&self.of[slots[i]])
            fetch(&self.of[slots[i]].stop_bits)

    cdef void fetch_ends(self, const slot_t* slots, int32_t count) noexcept nogil:
        """Begin to load the places after the slots' tokens."""
        cdef int32_t i
        for i in range(count):
            fetch(self.of[slots[i]].tokens + self.of[slots[i]].num_tokens)

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
        cdef Seq* own = &self.of[slot]
        cdef uint8_t epoch = own.epoch + 1
        free(own.tokens)
        free(own.keys)
        free(own.hashes)
        free(own.stops)
        free(own.bi_spans)
        free(own.spans)
        memset(own, 0, sizeof(Seq))
        own.epoch = epoch
        own.request = own.cached = -1
        own.state = FREE

    cdef void drop_promises(self, slot_t slot) noexcept nogil:
        """Ignore the tokens that steps in flight choose for the row."""
        self.of[slot].choosing = self.of[slot].pending = 0

    cdef int32_t whole(self, slot_t slot, int32_t start, int32_t count, int32_t most) noexcept nogil:
        """Return the length of a chunk from `start` on, about `count` positions, that cuts no bidirectional span.

        The chunk ends before a span that it would cut. If it would then be empty, it extends to the end of the span, if
        this takes at most `most` positions; else it is empty.
        """
        cdef int32_t k
        cdef BiSpan* bi_span
        for k in range(self.of[slot].num_bi_spans):
            bi_span = &self.of[slot].bi_spans[k]
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
            if self.of[i].request == request and self.of[i].state != FREE:
                return i
        return -1

    cdef int32_t verdict(self, slot_t slot, token_t token) noexcept nogil:
        """Return why the token just appended ends its request, or FINISH_NONE. Below min_len only length can."""
        cdef const Seq* own = &self.of[slot]
        if own.num_tokens >= own.min_len:
            if _holds(own.stops, own.num_eos, token):
                return FINISH_STOP
            if _holds(own.stops + own.num_eos, own.num_stop, token):
                return FINISH_STOP_TOKEN
        return FINISH_LENGTH if own.num_tokens >= own.max_len else FINISH_NONE

    cdef int32_t gather(self, slot_t slot, int32_t start, int32_t count, int64_t* into) noexcept nogil:
        """Write the keys of positions start .. start + count - 1: the engine's keys if given, else the token ids.

        Return the number of words written: `count`, or 2 * count if a position has a second word. Second words that are
        all 0 are omitted, so that text has the same keys in prompts with and without media.
        """
        cdef const Seq* own = &self.of[slot]
        cdef const token_t* tokens = own.tokens + start
        cdef int32_t given = own.prompt_len if own.keys else 0
        cdef int64_t seconds = 0
        cdef int32_t i
        for i in range(count):
            into[i] = tokens[i]
            into[count + i] = 0
        for i in range(min(given - start, count)):
            into[i] = own.keys[start + i]
            into[count + i] = own.keys[given + start + i]
            seconds |= into[count + i]
        return 2 * count if seconds else count

    cdef int fill(self, slot_t slot, const token_t[::1] tokens, const int64_t[:, ::1] keys, object eos_ids,
                  object stop_ids, const int32_t[:, ::1] media, const int32_t[:, ::1] bi_spans) except -1:
        """Copy a request's buffers into a clean slot."""
        cdef int32_t n = <int32_t>tokens.shape[0]
        cdef int32_t i = 0
        cdef Seq* own = &self.of[slot]
        cdef list eos = sorted(set(eos_ids))
        cdef list stop = sorted(set(stop_ids))
        own.tokens = <token_t*>malloc((<size_t>n + 16) * sizeof(token_t))
        own.token_room = n + 16
        own.stops = <token_t*>malloc((<size_t>(len(eos) + len(stop)) + 1) * sizeof(token_t))
        if keys is not None:
            own.keys = <int64_t*>malloc(2 * <size_t>n * sizeof(int64_t))
        if media is not None and media.shape[0]:
            own.spans = <Span*>malloc(<size_t>media.shape[0] * sizeof(Span))
            own.num_spans = <int32_t>media.shape[0]
        if bi_spans is not None and bi_spans.shape[0]:
            own.bi_spans = <BiSpan*>malloc(<size_t>bi_spans.shape[0] * sizeof(BiSpan))
            own.num_bi_spans = <int32_t>bi_spans.shape[0]
        if (
            not own.tokens
            or not own.stops
            or (keys is not None and not own.keys)
            or (own.num_spans and not own.spans)
            or (own.num_bi_spans and not own.bi_spans)
        ):
            raise MemoryError(f"no memory for a prompt of {n} tokens")
        memcpy(own.tokens, &tokens[0], <size_t>n * sizeof(token_t))
        if keys is not None:
            memcpy(own.keys, &keys[0, 0], 2 * <size_t>n * sizeof(int64_t))
        for value in eos + stop:
            own.stops[i] = value
            own.stop_bits |= <uint64_t>1 << (<token_t>value & 63)
            i += 1
        own.num_tokens = n
        own.prompt_len = n
        own.num_eos = <int32_t>len(eos)
        own.num_stop = <int32_t>len(stop)
        self._fill_spans(slot, media)
        for i in range(own.num_bi_spans):
            own.bi_spans[i] = BiSpan(bi_spans[i, 0], bi_spans[i, 1])
        return 0

    cdef int _fill_spans(self, slot_t slot, const int32_t[:, ::1] media) except -1:
        cdef int32_t i
        cdef Span* span
        cdef dict last = {}
        for i in range(self.of[slot].num_spans - 1, -1, -1):
            span = &self.of[slot].spans[i]
            span.start = media[i, 0]
            span.length = media[i, 1]
            span.entry = media[i, 2]
            span.row = media[i, 3]
            span.last = last.setdefault(span.entry, i)
            span.pinned = 0
        return 0

    def restarting(self):
        """Return the slots that start over."""
        return [slot for slot in range(self.num_slots) if self.of[slot].restarting]

    def snapshot(self, int32_t slot):
        """Return all data of a slot by name (for tests); equal after each reset, except `epoch`."""
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot {slot}: this table has slots 0 to {self.num_slots - 1}")
        cdef const Seq* own = &self.of[slot]
        return {
            "tokens": own.tokens != NULL,
            "num_tokens": own.num_tokens,
            "computed": own.computed,
            "committed": own.committed,
            "max_len": own.max_len,
            "min_len": own.min_len,
            "boundary": own.boundary,
            "token_room": own.token_room,
            "prompt_len": own.prompt_len,
            "state": own.state,
            "closing": own.closing,
            "restarting": own.restarting,
            "redoing": own.redoing,
            "fails_at_settle": own.fails_at_settle,
            "traced": own.traced,
            "choosing": own.choosing,
            "pending": own.pending,
            "in_flight": own.in_flight,
            "drafts": own.drafts,
            "found": own.found,
            "chained": own.chained,
            "epoch": own.epoch,
            "read_cache": own.read_cache,
            "unnamed": own.unnamed,
            "request": own.request,
            "stop_bits": own.stop_bits,
            "num_spans": own.num_spans,
            "span_at": own.span_at,
            "span_done": own.span_done,
            "priority": own.priority,
            "num_named": own.num_named,
            "num_hashed": own.num_hashed,
            "hash_room": own.hash_room,
            "cached": own.cached,
            "hashes": own.hashes != NULL,
            "root_lo": own.root_lo,
            "root_hi": own.root_hi,
            "arrival": own.arrival,
            "order": own.order,
            "keys": own.keys != NULL,
            "stops": own.stops != NULL,
            "bi_spans": own.bi_spans != NULL,
            "spans": own.spans != NULL,
            "num_eos": own.num_eos,
            "num_stop": own.num_stop,
            "num_bi_spans": own.num_bi_spans,
        }
