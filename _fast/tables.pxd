from _fast.blocks cimport BlockPool
from _fast.kinds cimport Group
from _fast.names cimport BlockNames
from _fast.plan cimport StepPlan
from _fast.seqs cimport SeqTable
from _fast.states cimport StateRuns
from _fast.types cimport block_t, int32_t, slot_t


cdef class BlockTables:
    cdef BlockPool pool
    cdef readonly StateRuns states
    cdef SeqTable seqs
    cdef BlockNames names
    cdef bint caching
    cdef int32_t num_slots
    cdef int32_t num_groups
    cdef int32_t block_size
    cdef int32_t max_blocks
    cdef int32_t primary  # the first group whose names prove the prefix for the others (kinds.pyx); -1: none
    cdef Group* groups
    cdef int32_t[::1] size  # by slot: number of entries, the same in every group
    cdef int32_t[::1] dirty  # by slot: entries from here on were not sent to the device
    cdef int32_t[::1] room
    cdef int32_t[::1] first  # by slot and group: entries below are dropped
    cdef int32_t** rows  # by slot and group
    cdef int32_t[::1] hits  # scratch of match(): blocks by group and index
    cdef int32_t num_revived

    cdef int32_t blocks_for(self, int32_t length) noexcept nogil
    cdef int32_t demand(self, int32_t hit, int32_t length) noexcept nogil
    cdef int32_t chunk_end(self, int32_t start, int32_t end) noexcept nogil
    cdef bint covers(self, slot_t slot, int32_t reach) noexcept nogil
    cdef int32_t missing(self, slot_t slot, int32_t end, int32_t reach) noexcept nogil
    cdef int grow(self, slot_t slot, int32_t end, int32_t reach) noexcept nogil
    cdef bint grow_idle(self, slot_t slot, int32_t end, int32_t reach) noexcept nogil
    cdef int _append(self, slot_t slot, int32_t least, int32_t target) noexcept nogil
    cdef int32_t match(self, slot_t slot) noexcept nogil
    cdef int attach(self, slot_t slot, int32_t count) noexcept nogil
    cdef void settle(self, slot_t slot) noexcept nogil
    cdef void release(self, slot_t slot) noexcept nogil
    cdef int32_t num_changed(self, slot_t slot) noexcept nogil
    cdef void send(self, slot_t slot, StepPlan plan) noexcept nogil
    cdef void forget_names(self) noexcept nogil
    cdef void disown(self, slot_t slot) noexcept nogil
    cdef void _names(self, slot_t slot, int32_t end) noexcept nogil
    cdef const int32_t* primary_row(self, slot_t slot) noexcept nogil
    cdef void _trim(self, slot_t slot, int32_t position) noexcept nogil
    cdef int32_t _common(self, slot_t slot, int32_t count) noexcept nogil
    cdef int32_t _walk(self, slot_t slot, int32_t count) noexcept nogil
    cdef int _reserve(self, slot_t slot, int32_t count) noexcept nogil
    cdef block_t _lookup(self, slot_t slot, int32_t group, int32_t j) noexcept nogil
