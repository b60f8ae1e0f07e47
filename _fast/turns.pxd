from _fast.types cimport int32_t, int64_t

cdef enum:
    QUANTUM = 256  # tokens of credit that a turn brings a flow of weight 1
    IDLE_ROUNDS = 1 << 20  # that a moment in which nothing waits counts for: more than any flow owes


cdef class Turns:
    cdef readonly int32_t num_flows
    cdef readonly int32_t num_active
    cdef int64_t[::1] credit  # tokens, by flow
    cdef int32_t[::1] weight
    cdef int64_t[::1] price  # by flow: tokens of what the flow has to serve next; -1: it has nothing now
    cdef int64_t[::1] seen  # by flow: the round in which its credit was last brought up to date
    cdef int32_t[::1] active  # flows that wait, in the order of their turns: the first `num_active`
    cdef int32_t[::1] place  # by flow: where it stands there, or -1
    cdef int32_t at  # whose turn it is
    cdef int64_t rounds

    cdef _check(self, int32_t flow)
    cdef int32_t flow(self) noexcept nogil
    cdef void offer(self, int32_t flow, int64_t price) noexcept nogil
    cdef void pay(self, int32_t flow, int64_t tokens) noexcept nogil
    cdef void rest(self) noexcept nogil
    cdef void _wake(self, int32_t flow) noexcept nogil
    cdef void _leave(self, int32_t flow) noexcept nogil
    cdef void _update(self, int32_t flow) noexcept nogil
    cdef void _turn_on(self) noexcept nogil
