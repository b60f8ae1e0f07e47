from _fast.entries cimport Entries
from _fast.plan cimport StepPlan
from _fast.seqs cimport SeqTable
from _fast.types cimport int32_t, int64_t, slot_t


cdef class EncoderTable(Entries):
    cdef readonly int32_t under_way  # the entry whose tower is running in pieces; 0: none
    cdef int32_t spent  # work in the step that is being planned
    cdef int32_t pieces_left
    cdef int32_t wanted  # the first large entry that shortened a chunk
    cdef bint crowded  # rows decode in the step
    cdef int64_t advanced_in  # the step of the newest piece
    cdef int32_t advanced  # the entry of the newest piece
    cdef int64_t stamp  # number of the newest limit() call

    cdef void begin(self, int64_t settled, bint crowded, StepPlan plan, int64_t step) noexcept nogil
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
    cdef void _pin(self, SeqTable seqs, slot_t slot, int32_t item, int64_t step) noexcept nogil
