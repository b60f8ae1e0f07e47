"""Histogram: counts by upper bound, for /metrics.

Owner: the loop. In: one number per observation, from Python or from code without the GIL. Out: counts as the exposition
format requires. This is not written in Python, because every streamed token costs the loop one observation.
"""

cimport cython
from libc.stdlib cimport calloc, free


@cython.final
cdef class Histogram:
    """A value belongs to the first bound >= value, else to a last bucket."""

    def __cinit__(self, bounds):
        cdef Py_ssize_t at
        self._num_bounds = len(bounds)
        self._bounds = <double*>calloc(self._num_bounds + 1, sizeof(double))
        self._counts = <int64_t*>calloc(self._num_bounds + 1, sizeof(int64_t))
        if not (self._bounds and self._counts):
            raise MemoryError
        for at in range(self._num_bounds):
            self._bounds[at] = bounds[at]

    def __dealloc__(self):
        free(self._bounds)
        free(self._counts)

    def observe(self, double value):
        """Count a value."""
        self.add(value)

    cdef void add(self, double value) noexcept nogil:
        cdef Py_ssize_t at = 0
        while at < self._num_bounds and self._bounds[at] < value:
            at += 1
        self._counts[at] += 1
        self.total += value

    @property
    def counts(self):
        """Counts per bound, then the count of larger values."""
        return [self._counts[at] for at in range(self._num_bounds + 1)]

    def buckets(self):
        """Return (upper bound, cumulative count) pairs; the last bound is "+Inf"."""
        cdef int64_t running = 0
        cdef Py_ssize_t at
        cdef list found = []
        for at in range(self._num_bounds + 1):
            running += self._counts[at]
            found.append((str(self._bounds[at]) if at < self._num_bounds else "+Inf", running))
        return found
