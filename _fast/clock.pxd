from _fast.types cimport int32_t

cpdef double believe(double known, double took, bint at_once) noexcept nogil


cdef class StepClock:
    cdef readonly double margin  # seconds before a step's expected end at which the next one is planned
    cdef readonly double[::1] seconds  # duration of steps, by kind; 0: unknown
    cdef readonly double[::1] periods  # by kind, if steps are found done: the time between two of them
    cdef double least_margin

    cpdef double expected(self, int32_t kind) noexcept nogil
    cpdef double plan_at(self, double begun, double took) noexcept nogil
    cpdef void adapt(self, double expected, double waited) noexcept nogil
    cpdef bint learn(self, int32_t kind, double took, bint begun_exact, double waited) noexcept nogil
