from _fast.device_calls cimport DeviceCalls
from _fast.types cimport int32_t, int64_t


cdef class GapClock:
    cdef readonly int32_t every  # the gap after one step in `every` is measured
    cdef DeviceCalls calls
    cdef int64_t after  # the step whose end was marked last; -1: none
    cdef int64_t before  # the step whose beginning was marked last; -1: none
    cdef void* begin  # timed event: the tokens of step `after` are chosen
    cdef void* end  # timed event: the forward of step `before` begins

    cdef bint ends(self, int64_t step, int64_t waited_step) noexcept nogil
    cdef bint mark_begin(self, int64_t step, int64_t waited_step) noexcept nogil
    cdef bint mark_end(self, int64_t step, int64_t waited_step) noexcept nogil
    cdef bint measure(self, int64_t step, double* seconds) noexcept nogil
