from _fast.estimates cimport PLACES, Estimates
from _fast.rest cimport Rest
from _fast.types cimport int32_t, int64_t, slot_t


cdef class StepTimes:
    """Seconds by size; the last value of an array is that of all larger sizes."""
    cdef const double[::1] plain  # of a step in which all rows decode, by rows; empty: no times are known
    cdef const double[::1] mixed  # of the forward of any other step, by tokens
    cdef const double[::1] choice  # of the choice of tokens, by places for which one is chosen
    cdef const double[::1] first  # of a drafter's first pass, by rows with drafts; empty: it has none
    cdef const double[::1] further  # of each further pass; empty: the first guesses all drafts
    cdef double reading  # of a step per token of its rows' contexts
    cdef double pass_reading  # of a pass per token of its rows' contexts

    cdef double step(self, int32_t tokens, int32_t places) noexcept nogil
    cdef double plain_step(self, int32_t rows) noexcept nogil
    cdef double passes(self, int32_t rows, int32_t depth, double context) noexcept nogil


cdef class Offers:
    """The drafts that the step that is being planned could verify."""
    cdef int32_t max_rows
    cdef int32_t count
    cdef int32_t rows  # with drafts
    cdef int32_t deepest  # most drafts of a row
    cdef int32_t rows_at[PLACES]  # by place of a draft: rows that have this draft
    cdef int32_t[::1] survivals  # [PLACES, max_rows]
    cdef int32_t[::1] sorted  # those up to a depth, largest first
    cdef int32_t[::1] room  # to sort them

    cdef void clear(self) noexcept nogil
    cdef void count_row(self, int32_t drafts) noexcept nogil
    cdef void add(self, const int32_t* own, int32_t drafts) noexcept nogil
    cdef int32_t gather(self, int32_t gathered, int32_t depth, int32_t most) noexcept nogil
    cdef void _sort(self, int32_t gathered, int32_t most) noexcept nogil


cdef class Budget:
    cdef readonly bint adaptive  # False: every row verifies all of its drafts
    cdef readonly int32_t variant  # the bit of the graphs that draft; 0: every step drafts
    cdef readonly StepTimes times
    cdef readonly Estimates estimates
    cdef readonly Rest rest
    cdef int32_t[::1] most  # by number of rows: most drafts of a row
    # The step that is being planned:
    cdef Offers offers
    cdef readonly int32_t depth  # most drafts of a row
    cdef int64_t contexts  # tokens that its rows attend to
    cdef int64_t drafted  # of them, those of rows with drafts
    cdef int32_t eligible  # rows that decode and may have drafts
    cdef int32_t verified  # drafts of the fastest step with the depth that was tried last

    cdef void learn(self, slot_t slot, int32_t verified, int32_t right) noexcept nogil
    cdef int32_t cap(self, int32_t rows) noexcept nogil
    cdef void begin(self) noexcept nogil
    cdef void offer(self, slot_t slot, int32_t drafts, int64_t context) noexcept nogil
    cdef int32_t decide(self, int32_t rows, int32_t tokens, int32_t most, bint decodes) noexcept nogil
    cdef int32_t best(self, int32_t rows, int32_t tokens, int32_t most, bint decodes) noexcept nogil
    cdef int32_t _probe(self, int32_t most) noexcept nogil
    cdef double _speed(self, int32_t rows, int32_t tokens, int32_t most, int32_t depth) noexcept nogil
