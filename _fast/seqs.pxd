from _fast.types cimport int32_t, int64_t, slot_t, token_t, uint8_t, uint64_t


cdef extern from *:
    """
    #define omniloop_fetch(at) __builtin_prefetch(at, 1)
    static inline void omniloop_fetch_all(const void *at, size_t size)
    {
        for (size_t k = 0; k < size; k += 64)
            __builtin_prefetch((const char *)at + k, 1);
    }
    """
    void fetch "omniloop_fetch"(const void* at) noexcept nogil  # begin to load a cache line that will be written
    void fetch_all "omniloop_fetch_all"(const void* at, size_t size) noexcept nogil  # and all lines of so many bytes


cdef struct Span:  # a run of prompt positions that take rows of one media entry
    int32_t start
    int32_t length
    int32_t entry
    int32_t row  # first row of the entry that this run takes
    int32_t last  # index of the request's last span of this entry, which has the pin for all of them
    int32_t pinned  # only on that last span: this slot protects the entry's embedding from eviction


cdef struct BiSpan:  # a bidirectional span: prompt positions that attend to each other; one step computes them
    int32_t start
    int32_t end


cdef struct Seq:  # data of a slot; steps read the first two cache lines, in whole
    token_t* tokens
    int32_t num_tokens
    int32_t computed
    int32_t committed
    int32_t max_len
    int32_t min_len
    int32_t boundary
    int32_t token_room
    int32_t prompt_len
    uint8_t state
    uint8_t closing  # for a traced row: 1: its end is reported, some tokens are not yet computed; 2: all are
    uint8_t restarting  # starts over; results of its steps in flight are dropped
    uint8_t redoing  # the token that its step in flight chooses is dropped
    uint8_t fails_at_settle  # ends with an error when its next step is settled
    uint8_t traced  # ends only when all of its tokens, including the last, are computed
    uint8_t choosing  # steps in flight that choose tokens for the row
    uint8_t pending  # most tokens from these steps
    uint8_t in_flight
    uint8_t drafts  # most drafts of a step
    uint8_t found  # drafts that the device has found for the tokens after the newest known token
    uint8_t chained  # the device has the row's newest token, its place, and drafts for the tokens after it
    uint8_t epoch  # wraps around; may grow by one or two while a plan is in flight
    uint8_t read_cache
    uint8_t unnamed
    int64_t request
    uint64_t stop_bits  # bit `id modulo 64` of each stop id, so that few tokens are searched for in `stops`
    int32_t num_spans
    int32_t span_at
    int32_t span_done
    int32_t priority
    int32_t num_named
    int32_t num_hashed
    int32_t hash_room
    int32_t cached
    uint64_t* hashes
    uint64_t root_lo
    uint64_t root_hi
    double arrival
    int64_t order
    int64_t* keys  # [2, prompt_len]: two words per position; NULL if the token ids are the keys
    token_t* stops  # ids that end the answer: num_eos of one kind, then num_stop of the other
    BiSpan* bi_spans  # ascending, disjoint
    Span* spans
    int32_t num_eos
    int32_t num_stop
    int32_t num_bi_spans


cdef inline int32_t left_of(const Seq* own) noexcept nogil:
    """Return the number of tokens that a row could compute now; 0 if its last token is certainly pending.

    A closing row computes its known tokens and samples nothing.
    """
    cdef int32_t known = own.num_tokens + own.choosing
    if own.closing:
        return own.num_tokens - own.computed
    return known - own.computed if known < own.max_len else 0


cdef inline int32_t last_of(const Seq* own) noexcept nogil:
    """Return the most tokens of the slot that steps compute: the last one only for traces."""
    return own.max_len - (not own.traced)


cdef inline int32_t reach_of(const Seq* own, int32_t end, int32_t most) noexcept nogil:
    """Return the last end of KV of a step that computes the row at least to `end` and adds `most` tokens."""
    return max(end, min(end + own.pending - own.choosing + most - 1, last_of(own)))


cdef inline bint may_end(const Seq* own, token_t token) noexcept nogil:
    """Whether the token just appended may end its request; verdict() decides."""
    return own.stop_bits >> (token & 63) & 1 or own.num_tokens >= own.max_len


cdef inline void promise(Seq* own, int32_t most) noexcept nogil:
    """Record that a launched step samples for the row and will append up to `most` tokens."""
    own.choosing += 1
    own.pending += <uint8_t>most


cdef inline void settle_promise(Seq* own, int32_t most) noexcept nogil:
    """Undo `promise` when the step's tokens are appended or dropped; does nothing for a closing row."""
    if not own.closing:
        own.choosing -= 1
        own.pending -= <uint8_t>most


cdef int grow_tokens(Seq* own) noexcept nogil


cdef inline int append(Seq* own, token_t token) noexcept nogil:
    """Append a known token; -1: out of memory."""
    if own.num_tokens == own.token_room and grow_tokens(own) < 0:
        return -1
    own.tokens[own.num_tokens] = token
    own.num_tokens += 1
    return 0


cdef class SeqTable:
    cdef readonly int32_t num_slots
    cdef readonly int32_t num_used
    cdef int32_t[::1] free_slots
    cdef Seq* of  # by slot

    cdef void fetch_rows(self, const slot_t* slots, int32_t count) noexcept nogil
    cdef void fetch_ends(self, const slot_t* slots, int32_t count) noexcept nogil
    cdef slot_t take(self) noexcept nogil
    cdef void give(self, slot_t slot) noexcept nogil
    cdef void reset(self, slot_t slot) noexcept nogil
    cdef void drop_promises(self, slot_t slot) noexcept nogil
    cdef int32_t whole(self, slot_t slot, int32_t start, int32_t count, int32_t most) noexcept nogil
    cdef slot_t find(self, int64_t request) noexcept nogil
    cdef int32_t verdict(self, slot_t slot, token_t token) noexcept nogil
    cdef int32_t gather(self, slot_t slot, int32_t start, int32_t count, int64_t* into) noexcept nogil
    cdef int fill(self, slot_t slot, const token_t[::1] tokens, const int64_t[:, ::1] keys, object eos_ids,
                  object stop_ids, const int32_t[:, ::1] media, const int32_t[:, ::1] bi_spans) except -1
    cdef int _fill_spans(self, slot_t slot, const int32_t[:, ::1] media) except -1
