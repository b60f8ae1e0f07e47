from _fast.seqs cimport SeqTable
from _fast.types cimport int32_t, slot_t


cdef class RunningRows:
    cdef readonly int32_t size
    cdef SeqTable seqs
    cdef bint by_priority
    cdef int32_t[::1] slots

    cdef void enter(self, slot_t slot) noexcept nogil
    cdef void leave(self, slot_t slot) noexcept nogil
    cdef bint precedes(self, slot_t a, slot_t b) noexcept nogil
    cdef slot_t last_idle(self) noexcept nogil
    cdef int32_t num_idle(self) noexcept nogil
