from _fast.estimates cimport Estimates
from _fast.rest cimport Rest
from _fast.types cimport int32_t, int64_t, slot_t


cdef class Budget:
    cdef readonly bint adaptive  # False: every row verifies all of its drafts
    cdef readonly int32_t variant  # the bit of the graphs that draft; 0: every step drafts
    cdef readonly Estimates estimates
    cdef readonly Rest rest
    cdef int32_t[::1] most  # by number of rows: most drafts of a row
    cdef const double[::1] plain  # seconds of a step in which all rows decode, by rows; empty: no times are known
    cdef const double[::1] mixed  # seconds of the forward of any other step, by tokens
    cdef const double[::1] choice  # seconds of the choice of tokens, by places for which one is chosen
    cdef double reading  # seconds of a step per token of its rows' contexts
    # The step that is being planned:
    cdef int64_t contexts  # tokens that its rows attend to
    cdef int32_t count  # drafts that could be verified
    cdef int32_t rows_with  # rows that have them
    cdef int32_t eligible  # rows that decode and may have drafts
    cdef int32_t[::1] survivals  # of these drafts
    cdef int32_t[::1] room  # to sort them

    cdef void learn(self, slot_t slot, int32_t verified, int32_t right) noexcept nogil
    cdef int32_t cap(self, int32_t rows) noexcept nogil
    cdef void begin(self) noexcept nogil
    cdef void offer(self, slot_t slot, int32_t drafts) noexcept nogil
    cdef int32_t decide(self, int32_t rows, int32_t tokens, int32_t most, bint decodes) noexcept nogil
    cdef int32_t best(self, int32_t rows, int32_t tokens, int32_t most, bint decodes) noexcept nogil
    cdef int32_t _probe(self, int32_t most) noexcept nogil
    cdef void _sort(self) noexcept nogil
