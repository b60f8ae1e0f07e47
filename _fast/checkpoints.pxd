from _fast.blocks cimport BlockPool
from _fast.names cimport BlockNames
from _fast.plan cimport StepPlan
from _fast.types cimport block_t, int32_t, int64_t, slot_t, uint8_t


cdef class Checkpoints:
    cdef BlockPool pool
    cdef BlockNames names
    cdef int32_t group  # its number in the prefix index
    cdef int32_t most_idle  # most blocks of idle named states
    cdef int32_t most_new  # most new runs in a plan
    cdef int32_t num_new
    cdef int32_t[::1] new  # ids of runs whose blocks were not sent to the device
    cdef int64_t[::1] sent  # by id of a run: the newest step whose plan sends its blocks to the device
    cdef int32_t[::1] below  # by block of the primary group: the head of the state attached to it; 0: none
    cdef int32_t[::1] under  # by head: the block to which it is attached
    cdef uint8_t[::1] hits  # by head: number of rows that began at this state
    cdef readonly int32_t num_named  # named states
    cdef readonly int64_t num_stored  # states named since start
    cdef readonly int64_t num_hit  # rows that began at a state
    cdef readonly int64_t num_dropped  # states that lost their names, or were not written, for lack of room

    cdef block_t acquire(self, int32_t kind) noexcept nogil
    cdef bint free_block(self) noexcept nogil
    cdef void release(self, block_t head) noexcept nogil
    cdef void forget(self, block_t block) noexcept nogil
    cdef block_t find(self, slot_t slot, int32_t j, block_t above) noexcept nogil
    cdef bint name(self, slot_t slot, int32_t j, block_t above, block_t head, uint8_t mark) noexcept nogil
    cdef void hit(self, block_t head) noexcept nogil
    cdef void supersede(self, block_t head, block_t above) noexcept nogil
    cdef void drop(self, block_t head) noexcept nogil
    cdef void drop_all(self) noexcept nogil
    cdef void send(self, StepPlan plan, int64_t step) noexcept nogil
    cdef bint is_new(self, block_t head, StepPlan plan) noexcept nogil
    cdef void send_again(self, StepPlan plan) noexcept nogil
    cdef block_t _oldest(self) noexcept nogil
    cdef bint _evict(self) noexcept nogil
