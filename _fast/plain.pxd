from _fast.plan cimport StepPlan
from _fast.running cimport RunningRows
from _fast.seqs cimport SeqTable
from _fast.tables cimport BlockTables
from _fast.types cimport int32_t, slot_t, token_t


cdef class PlainRows:
    cdef SeqTable seqs
    cdef BlockTables tables
    cdef RunningRows running
    cdef int32_t[::1] crossed  # slots whose committed KV has crossed a block's end
    cdef int32_t num_crossed

    cdef bint fit(self, StepPlan plan) noexcept nogil
    cdef void emit(self, StepPlan plan) noexcept nogil
    cdef int32_t settle(self, StepPlan plan, int32_t row, const token_t* sampled) noexcept nogil
    cdef void name_blocks(self) noexcept nogil
