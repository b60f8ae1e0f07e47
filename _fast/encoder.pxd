from _fast.plan cimport StepPlan
from _fast.seqs cimport SeqTable
from _fast.types cimport int32_t, int64_t, slot_t


cdef struct Entry:  # one picture, sound or film, shared by the requests that show it
    int32_t rows  # tower rows it takes in the cache; 0: the id is free
    int32_t work  # what its tower's run costs, in the unit of the budget
    int32_t refs  # live requests that name it
    int32_t pins  # live requests that are reading it: their next chunks need its embedding
    int32_t state
    int32_t before
    int32_t after
    int64_t last_use  # newest step that reads it
    int64_t encoded_in  # step whose plan runs its tower
    int64_t stamp  # limit() call that saw it last


cdef class EncoderTable:
    cdef readonly int32_t budget
    cdef readonly int32_t capacity
    cdef readonly int32_t num_entries
    cdef readonly int32_t num_in_use
    cdef readonly int64_t rows_held
    cdef readonly int32_t num_evicted
    cdef Entry* entries
    cdef int32_t* gone
    cdef int32_t room
    cdef int32_t free_id
    cdef int32_t spent
    cdef readonly int32_t num_large
    cdef readonly int32_t under_way
    cdef int32_t pieces_left
    cdef int32_t wanted
    cdef bint crowded
    cdef int64_t advanced_in
    cdef int32_t advanced  # the entry of the newest piece
    cdef int64_t stamp
    cdef int64_t settled

    cdef void begin(self, int64_t settled, bint crowded, StepPlan plan, int64_t step) noexcept nogil
    cdef void _renew(self, int32_t entry) noexcept nogil
    cdef void start_wanted(self, StepPlan plan, int64_t step) noexcept nogil
    cdef int32_t limit(self, SeqTable seqs, slot_t slot, int32_t start, int32_t count) noexcept nogil
    cdef void claim(self, SeqTable seqs, slot_t slot, int32_t start, int32_t count, StepPlan plan,
                    int64_t step) noexcept nogil
    cdef void passed(self, SeqTable seqs, slot_t slot) noexcept nogil
    cdef void unpin(self, SeqTable seqs, slot_t slot) noexcept nogil
    cdef void hold(self, SeqTable seqs, slot_t slot) noexcept nogil
    cdef void drop(self, SeqTable seqs, slot_t slot) noexcept nogil
    cdef bint tainted(self, SeqTable seqs, slot_t slot, int64_t step) noexcept nogil
    cdef void fail(self, int64_t step) noexcept nogil
    cdef int32_t largest_need(self, const int32_t[:, ::1] media) except -1
    cdef void _advance(self, StepPlan plan, int64_t step) noexcept nogil
    cdef bint _is_large(self, int32_t entry) noexcept nogil
    cdef int64_t _evictable(self) noexcept nogil
    cdef void _pin(self, SeqTable seqs, slot_t slot, int32_t item, int64_t step) noexcept nogil
    cdef void _release(self, int32_t entry) noexcept nogil
    cdef bint _make_room(self, int32_t rows) noexcept nogil
    cdef void _evict(self, int32_t entry) noexcept nogil
    cdef void _recall(self, int32_t entry) noexcept nogil
    cdef void _forget(self, int32_t entry) noexcept nogil
    cdef void _append(self, int32_t entry) noexcept nogil
    cdef void _unlink(self, int32_t entry) noexcept nogil
    cdef _grow(self, int32_t room)
