from _fast.types cimport int32_t, int64_t, uint8_t

cdef enum:
    UNIT = 1024  # virtual time that a token costs a flow of weight 1


cdef class Turns:
    cdef readonly int32_t num_flows
    cdef readonly int32_t num_active
    cdef int64_t[::1] due  # by flow: the virtual time at which all its tokens are paid
    cdef int32_t[::1] weight
    cdef int64_t[::1] since  # by flow: when it was last served or began to wait, to break ties
    cdef int32_t[::1] active  # waiting flows, unordered: the first `num_active`
    cdef int32_t[::1] place  # by flow: its index in `active`, or -1
    cdef uint8_t[::1] passed  # by flow: flow() skips it
    cdef int64_t clock  # the virtual time
    cdef int64_t latest  # the latest of all due times
    cdef int64_t count
    cdef int32_t newest  # the flow that something new came of, or -1
    cdef int32_t shared_for  # so many new things of the newest flow may come until it counts as alone

    cdef _check(self, int32_t flow)
    cdef int32_t flow(self) noexcept nogil
    cdef void meet(self, int32_t flow) noexcept nogil
    cdef bint is_shared(self) noexcept nogil
    cdef void offer(self, int32_t flow, bint waits) noexcept nogil
    cdef void serve(self, int32_t flow, int64_t tokens) noexcept nogil
    cdef void pay(self, int32_t flow, int64_t tokens) noexcept nogil
    cdef void rest(self) noexcept nogil
