from _fast.types cimport int32_t, int64_t, slot_t, uint8_t

cdef enum:
    LOOK_PAST = 64  # slots that may stand aside in a step


cdef class WaitQueue:
    cdef readonly int32_t size
    cdef readonly bint by_priority
    cdef readonly bint looks_past  # of whole prompts: some may be overtaken
    cdef int32_t[::1] heap
    cdef int32_t[::1] place
    cdef int32_t[::1] rank
    cdef double[::1] arrival
    cdef int64_t[::1] order
    cdef uint8_t[::1] overtaken  # by slot: later ones started before it, in one step
    cdef int32_t[::1] aside  # [LOOK_PAST] slots
    cdef int32_t num_aside
    cdef int32_t num_overtaken  # of those: a request started behind them

    cdef slot_t first(self) noexcept nogil
    cdef void push(self, slot_t slot, int32_t priority, double arrival, int64_t order, bint again) noexcept nogil
    cdef bint remove(self, slot_t slot) noexcept nogil
    cdef void _enter(self, slot_t slot) noexcept nogil
    cdef bint set_aside(self, slot_t slot) noexcept nogil
    cdef bint _leave(self, slot_t slot) noexcept nogil
    cdef void take_back(self) noexcept nogil
    cdef bint ahead(self, slot_t a, slot_t b) noexcept nogil
    cdef void _rise(self, int32_t at) noexcept nogil
    cdef void _sink(self, int32_t at) noexcept nogil
