from _fast.turns cimport Turns
from _fast.types cimport int32_t, int64_t, slot_t, uint8_t

cdef enum:
    LOOK_PAST = 64  # most slots that are set aside in a step


cdef class WaitQueue:
    cdef readonly int32_t size
    cdef readonly bint by_priority
    cdef readonly bint looks_past  # for whole prompts: some may be overtaken
    cdef readonly Turns turns
    cdef int32_t num_slots
    cdef int32_t[::1] slots  # waiting slots, unordered: the first `size`
    cdef int32_t[::1] place  # by slot: its index in `slots`; -1: it does not wait
    cdef int32_t preempted  # the line of preempted slots, after the lines of the flows and before that of idle slots
    cdef int32_t[::1] line  # by slot
    cdef int32_t[::1] flow  # by slot
    cdef int32_t[::1] before  # by slot: its neighbours in its line
    cdef int32_t[::1] behind
    cdef int32_t[::1] head  # by line
    cdef int32_t[::1] tail
    cdef int32_t[::1] rank
    cdef double[::1] arrival
    cdef int64_t[::1] order
    cdef int64_t[::1] cost  # tokens of the prompt; 0: already paid
    cdef double[::1] deadline  # deadline of the first step
    cdef double next_deadline  # no waiting slot has an earlier deadline
    cdef int32_t[::1] expired
    cdef readonly int32_t num_expired
    cdef uint8_t[::1] overtaken  # by slot: later slots started before it, in one step
    cdef int32_t[::1] aside  # [LOOK_PAST] slots
    cdef int32_t num_aside
    cdef int32_t num_overtaken  # slots in `aside` that were overtaken

    cdef check_flow(self, int32_t flow, int32_t weight)
    cdef _check(self, int32_t slot)
    cdef void enlist(self, slot_t slot, int32_t flow, int32_t weight, int64_t cost, double deadline,
                     int32_t priority, double arrival, int64_t order) noexcept nogil
    cdef slot_t first(self) noexcept nogil
    cdef slot_t first_client(self) noexcept nogil
    cdef int32_t num_clients(self) noexcept nogil
    cdef slot_t newcomer(self, int32_t[::1] running, int32_t count) noexcept nogil
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
