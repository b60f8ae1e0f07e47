from _fast.turns cimport Turns
from _fast.types cimport int32_t, int64_t, slot_t, uint8_t

cdef enum:
    LOOK_PAST = 64  # slots that may stand aside in a step


cdef class WaitQueue:
    cdef readonly int32_t size
    cdef readonly bint by_priority
    cdef readonly bint looks_past  # of whole prompts: some may be overtaken
    cdef readonly Turns turns
    cdef int32_t num_slots
    cdef int32_t[::1] slots  # those that wait, in no order: the first `size`
    cdef int32_t[::1] place  # where a slot stands there; -1: it does not wait
    cdef int32_t preempted  # the line of preempted slots, behind those of the flows
    cdef int32_t[::1] line  # by slot
    cdef int32_t[::1] flow  # by slot
    cdef int32_t[::1] before  # the neighbours in the slot's line
    cdef int32_t[::1] behind
    cdef int32_t[::1] head  # by line
    cdef int32_t[::1] tail
    cdef int32_t[::1] rank
    cdef double[::1] arrival
    cdef int64_t[::1] order
    cdef int64_t[::1] cost  # tokens of the prompt; 0: paid before
    cdef double[::1] deadline  # of the first step
    cdef double next_deadline  # no slot that waits has an earlier one
    cdef int32_t[::1] expired
    cdef readonly int32_t num_expired
    cdef uint8_t[::1] overtaken  # by slot: later ones started before it, in one step
    cdef int32_t[::1] aside  # [LOOK_PAST] slots
    cdef int32_t num_aside
    cdef int32_t num_overtaken  # of those: a request started behind them

    cdef check_flow(self, int32_t flow, int32_t weight)
    cdef _check(self, int32_t slot)
    cdef void enlist(self, slot_t slot, int32_t flow, int32_t weight, int64_t cost, double deadline,
                     int32_t priority, double arrival, int64_t order) noexcept nogil
    cdef slot_t first(self) noexcept nogil
    cdef void push(self, slot_t slot, int32_t priority, double arrival, int64_t order, bint again) noexcept nogil
    cdef bint remove(self, slot_t slot) noexcept nogil
    cdef void serve(self, slot_t slot) noexcept nogil
    cdef void charge(self, slot_t slot, int64_t tokens) noexcept nogil
    cdef void drop_expired(self) noexcept nogil
    cdef bint set_aside(self, slot_t slot) noexcept nogil
    cdef void take_back(self) noexcept nogil
    cdef bint precedes(self, slot_t a, slot_t b) noexcept nogil
    cdef void _enter(self, slot_t slot) noexcept nogil
    cdef bint _leave(self, slot_t slot) noexcept nogil
    cdef void _offer(self, int32_t line) noexcept nogil
    cdef void _expire(self, double at) noexcept nogil
