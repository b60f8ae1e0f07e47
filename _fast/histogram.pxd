"""Layout of Histogram; see histogram.pyx."""

from libc.stdint cimport int64_t


cdef class Histogram:
    cdef double* _bounds
    cdef int64_t* _counts
    cdef Py_ssize_t _num_bounds
    cdef readonly double total

    cdef void add(self, double value) noexcept nogil
