from _fast.plan cimport StepPlan
from _fast.types cimport int32_t, slot_t, uint8_t


cdef class SlotParams:
    cdef readonly int32_t max_slots
    cdef readonly int32_t num_unsent
    cdef int32_t[::1] words  # [max_slots * SLOT_WORDS]
    cdef uint8_t[::1] unsent

    cdef void append(self, StepPlan plan) noexcept nogil
    cdef _check_slot(self, int32_t slot)
