from _fast.types cimport block_t, int32_t, int64_t, uint8_t


cdef enum:  # what a run is for
    PLAIN = 0  # a block by itself
    STATE_RUN = 1
    TAIL_RUN = 2


cdef enum:  # the lists of idle blocks and of heads of idle runs
    IDLE_BLOCKS = 0
    IDLE_STATES = 1  # not named; as STATE_RUN
    IDLE_TAILS = 2  # as TAIL_RUN
    SPARE_STATES = 3  # named, dropped first
    WORN_STATES = 4  # named, dropped last
    NUM_PLACES = 5


cdef class BlockPool:
    cdef readonly int32_t total
    cdef readonly int32_t num_free  # idle, not in the prefix index
    cdef readonly int32_t num_cached  # idle, in the prefix index
    cdef readonly int32_t num_used  # referenced by at least one row
    cdef int32_t[::1] refs
    cdef int32_t[::1] before
    cdef int32_t[::1] after
    cdef uint8_t[::1] named  # of a state: 1: dropped first, 2: dropped last
    cdef int32_t[::1] next  # the run's next member, by block; 0: it is the last
    cdef uint8_t[::1] kinds  # by block, of a run's head; PLAIN of every other block
    cdef int32_t[::1] ids  # by block, of a run's head
    cdef int32_t[::1] heads  # by run id; of a free id: minus the next free one
    cdef int32_t free_id
    cdef int32_t sizes[3]  # blocks of a run, by kind; without runs the last two are 0
    cdef int32_t idle_blocks[5]  # in the lists of runs, by place

    cdef int32_t num_idle(self) noexcept nogil
    cdef block_t take(self) noexcept nogil
    cdef void hold(self, block_t block) noexcept nogil
    cdef void release(self, block_t block) noexcept nogil
    cdef void name(self, block_t block) noexcept nogil
    cdef void unname(self, block_t block) noexcept nogil
    cdef bint is_loose(self) noexcept nogil
    cdef bint loosen(self) noexcept nogil
    cdef block_t first_run(self, int32_t place) noexcept nogil
    cdef block_t form(self, int32_t kind) noexcept nogil
    cdef void break_up(self, block_t head) noexcept nogil
    cdef void mark(self, block_t head, uint8_t mark) noexcept nogil
    cdef int32_t _place(self, block_t block) noexcept nogil
    cdef void _link(self, block_t block, int32_t place, bint first) noexcept nogil
    cdef void _unlink(self, block_t block) noexcept nogil
    cdef _check(self, int32_t block)
