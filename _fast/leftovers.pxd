from _fast.seqs cimport SeqTable
from _fast.shares cimport TokenShares
from _fast.tables cimport BlockTables
from _fast.types cimport int32_t, slot_t


cdef class Leftovers:
    cdef SeqTable seqs
    cdef BlockTables tables
    cdef TokenShares shares

    cdef int32_t to_prompts(self, int32_t updates_left) noexcept nogil
    cdef int32_t to_held(self, int32_t updates_left) noexcept nogil
    cdef bint _has_blocks(self, slot_t slot, int32_t end) noexcept nogil
