from _fast.types cimport int32_t, int64_t, slot_t, token_t, uint8_t, uint64_t


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


cdef class SeqTable:
    cdef readonly int32_t num_slots
    cdef readonly int32_t num_used
    cdef int32_t[::1] free_slots
    # From here on one value per slot; reset() clears them.
    cdef uint8_t[::1] state
    cdef uint8_t[::1] read_cache
    cdef uint8_t[::1] unnamed
    cdef uint8_t[::1] fails_at_settle  # ends with an error when its next step is settled
    cdef readonly uint8_t[::1] restarting  # starts over; results of its steps in flight are dropped
    cdef uint8_t[::1] redoing  # the token that its step in flight chooses is dropped
    cdef uint8_t[::1] traced  # ends only when all of its tokens, including the last, are computed
    cdef uint8_t[::1] closing  # for a traced row: 1: its end is reported, some tokens are not yet computed; 2: all are
    cdef int64_t[::1] request
    cdef int32_t[::1] prompt_len
    cdef int32_t[::1] num_tokens
    cdef int32_t[::1] computed
    cdef int32_t[::1] committed
    cdef uint8_t[::1] choosing  # steps in flight that choose tokens for the row
    cdef uint8_t[::1] pending  # most tokens from these steps
    cdef uint8_t[::1] in_flight
    cdef uint8_t[::1] drafts  # most drafts of a step
    cdef uint8_t[::1] found  # drafts that the device has found for the tokens after the newest known token
    cdef uint8_t[::1] chained  # the device has the row's newest token, its place, and drafts for the tokens after it
    cdef int32_t[::1] max_len
    cdef int32_t[::1] min_len
    cdef int32_t[::1] priority
    cdef double[::1] arrival
    cdef int64_t[::1] order
    cdef uint8_t[::1] epoch  # wraps around; may grow by one or two while a plan is in flight
    cdef int32_t[::1] num_named
    cdef int32_t[::1] boundary
    cdef int32_t[::1] cached
    cdef uint64_t[::1] root_lo
    cdef uint64_t[::1] root_hi
    cdef int32_t[::1] num_hashed
    cdef int32_t[::1] num_eos
    cdef int32_t[::1] num_stop
    cdef int32_t[::1] num_bi_spans
    cdef int32_t[::1] num_spans
    cdef int32_t[::1] span_at
    cdef int32_t[::1] span_done
    cdef int32_t[::1] token_room
    cdef int32_t[::1] hash_room
    cdef token_t** tokens
    cdef int64_t** keys  # [2, prompt_len]: two words per position; NULL if the token ids are the keys
    cdef uint64_t** hashes
    cdef token_t** stops
    cdef BiSpan** bi_spans  # ascending, disjoint
    cdef Span** spans

    cdef slot_t take(self) noexcept nogil
    cdef void give(self, slot_t slot) noexcept nogil
    cdef void reset(self, slot_t slot) noexcept nogil
    cdef int32_t left(self, slot_t slot) noexcept nogil
    cdef void promise(self, slot_t slot, int32_t most) noexcept nogil
    cdef void settle_promise(self, slot_t slot, int32_t most) noexcept nogil
    cdef void drop_promises(self, slot_t slot) noexcept nogil
    cdef int32_t reach(self, slot_t slot, int32_t end, int32_t most) noexcept nogil
    cdef int32_t whole(self, slot_t slot, int32_t start, int32_t count, int32_t most) noexcept nogil
    cdef slot_t find(self, int64_t request) noexcept nogil
    cdef int append(self, slot_t slot, token_t token) noexcept nogil
    cdef int32_t verdict(self, slot_t slot, token_t token) noexcept nogil
    cdef int32_t gather(self, slot_t slot, int32_t start, int32_t count, int64_t* into) noexcept nogil
    cdef int fill(self, slot_t slot, const token_t[::1] tokens, const int64_t[:, ::1] keys, object eos_ids,
                  object stop_ids, const int32_t[:, ::1] media, const int32_t[:, ::1] bi_spans) except -1
    cdef int _fill_spans(self, slot_t slot, const int32_t[:, ::1] media) except -1
