from _fast.types cimport block_t, int32_t, int64_t, uint8_t


cdef enum:  # kinds of runs
    PLAIN = 0  # a single block
    STATE_RUN = 1
    TAIL_RUN = 2


cdef enum:  # lists: idle blocks, and heads of idle runs
    IDLE_BLOCKS = 0
    IDLE_STATES = 1  # not named; same number as STATE_RUN
    IDLE_TAILS = 2  # not named; same number as TAIL_RUN
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
    cdef uint8_t[::1] named  # for a state: 1: dropped first, 2: dropped last
    cdef int32_t[::1] next  # by block: the run's next member; 0: none
    cdef uint8_t[::1] kinds  # by block: kind of the run if the block is its head; PLAIN for other blocks
    cdef int32_t[::1] ids  # by block: id of the run if the block is its head
    cdef int32_t[::1] heads  # by run id; for a free id: minus the next free id
    cdef int32_t free_id
    cdef int32_t sizes[3]  # blocks of a run, by kind; the last two are 0 if there are no runs
    cdef int32_t idle_blocks[5]  # by place: blocks in the lists of runs

    cdef int32_t num_idle(self) noexcept nogil
    cdef void fetch_idle(self, int32_t count) noexcept nogil
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
