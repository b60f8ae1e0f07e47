from _fast.types cimport int32_t, int64_t


cdef class Rest:
    cdef readonly bint active  # steps have drafts; False: the drafter rests
    cdef readonly int64_t num_probes  # since start
    cdef bint probing  # a rest has ended, and the outcome of a probe decides
    cdef int32_t length  # of the rest, in steps; while drafts are used: half of the next rest's
    cdef int32_t rested
    cdef int32_t rows  # rows that could have drafts when the rest began
    cdef int32_t wait  # plans until the probe's outcome is known
    cdef int32_t probes  # since the rest
    cdef int32_t right  # right drafts since the newest probe
    cdef int32_t seen  # verified drafts since the newest probe
    cdef int32_t since_probe  # steps with drafts

    cdef bint goes_on(self, int32_t rows) noexcept nogil
    cdef bint waits(self) noexcept nogil
    cdef bint tries_again(self) noexcept nogil
    cdef bint is_due(self) noexcept nogil
    cdef void begin(self, int32_t rows) noexcept nogil
    cdef void probe(self) noexcept nogil
