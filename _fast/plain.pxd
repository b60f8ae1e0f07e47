from _fast.plan cimport StepPlan
from _fast.running cimport RunningRows
from _fast.seqs cimport Near, SeqTable
from _fast.tables cimport BlockTables
from _fast.types cimport int32_t, int64_t, slot_t, token_t, uint8_t


cdef class PlainRows:
    cdef SeqTable seqs
    cdef BlockTables tables
    cdef RunningRows running
    cdef int32_t num_crossed
    # Where arrays lie, most of them others': side by side here, as each view has a line of memory of its own.
    cdef const slot_t* slots
    cdef int32_t* computed
    cdef int32_t* open_to  # by slot: tokens below it can be computed with what the row has; 0: not known
    cdef uint8_t* pending
    cdef uint8_t* in_flight
    cdef const uint8_t* epoch
    cdef int32_t* num_tokens
    cdef int32_t* goes_to  # by slot: with fewer tokens it goes on, unless the new one says no; 0: not known
    cdef int32_t* committed
    cdef const Near* near
    cdef token_t** tokens
    cdef slot_t* crossed  # slots whose committed KV has crossed a block's end

    cdef bint fit(self, StepPlan plan) noexcept nogil
    cdef void emit(self, StepPlan plan) noexcept nogil
    cdef bint _opened(self, slot_t slot, StepPlan plan) noexcept nogil
    cdef void _write(self, StepPlan plan, int32_t row, slot_t slot, int32_t start) noexcept nogil
    cdef int32_t settle(self, StepPlan plan, int32_t row, const token_t* sampled) noexcept nogil
    cdef bint _goes_on(self, slot_t slot, int32_t length) noexcept nogil
    cdef void name_blocks(self) noexcept nogil
    cdef void forget(self, slot_t slot) noexcept nogil
