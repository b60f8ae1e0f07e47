from _fast.estimates cimport PLACES, Estimates
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
    cdef const double[::1] first  # seconds of a drafter's first pass, by rows with drafts; empty: it has none
    cdef const double[::1] further  # seconds of each further pass; empty: the first guesses all drafts
    cdef double reading  # seconds of a step per token of its rows' contexts
    cdef double pass_reading  # seconds of a pass per token of its rows' contexts
    cdef int32_t max_rows
    # The step that is being planned:
    cdef readonly int32_t depth  # most drafts of a row
    cdef int64_t contexts  # tokens that its rows attend to
    cdef int64_t drafted  # of them, those of rows with drafts
    cdef int32_t count  # drafts that could be verified
    cdef int32_t rows_with  # rows that have them
    cdef int32_t deepest  # most of them in a row
    cdef int32_t eligible  # rows that decode and may have drafts
    cdef int32_t verified  # drafts of the fastest step with the depth that was tried last
    cdef int32_t rows_at[PLACES]  # by place of a draft: rows that have this draft
    cdef int32_t[::1] survivals  # [PLACES, max_rows]
    cdef int32_t[::1] sorted  # those up to a depth, largest first
    cdef int32_t[::1] room  # to sort them

    cdef void learn(self, slot_t slot, int32_t verified, int32_t right) noexcept nogil
    cdef int32_t cap(self, int32_t rows) noexcept nogil
    cdef void begin(self) noexcept nogil
    cdef void offer(self, slot_t slot, int32_t drafts, int64_t context) noexcept nogil
    cdef void _take(self, const int32_t* own, int32_t drafts) noexcept nogil
    cdef int32_t decide(self, int32_t rows, int32_t tokens, int32_t most, bint decodes) noexcept nogil
    cdef int32_t best(self, int32_t rows, int32_t tokens, int32_t most, bint decodes) noexcept nogil
    cdef int32_t _probe(self, int32_t most) noexcept nogil
    cdef double seconds(self, int32_t tokens, int32_t places) noexcept nogil
    cdef double passes(self, int32_t rows, int32_t depth) noexcept nogil
    cdef double _speed(self, int32_t rows, int32_t tokens, int32_t most, int32_t depth) noexcept nogil
    cdef int32_t _gather(self, int32_t gathered, int32_t depth, int32_t most) noexcept nogil
    cdef void _sort(self, int32_t gathered, int32_t most) noexcept nogil
