from _fast.types cimport block_t, int32_t, int64_t, uint8_t


cdef class BlockPool:
    cdef readonly int32_t total
    cdef readonly int32_t num_free  # idle, not in the prefix index
    cdef readonly int32_t num_cached  # idle, in the prefix index
    cdef readonly int32_t num_used  # referenced by at least one row
    cdef int32_t[::1] refs
    cdef int32_t[::1] before
    cdef int32_t[::1] after
    cdef uint8_t[::1] named

    cdef int32_t num_idle(self) noexcept nogil
    cdef block_t take(self) noexcept nogil
    cdef void hold(self, block_t block) noexcept nogil
    cdef void release(self, block_t block) noexcept nogil
    cdef void name(self, block_t block) noexcept nogil
    cdef void unname(self, block_t block) noexcept nogil
    cdef void _link(self, block_t block, bint first) noexcept nogil
    cdef void _unlink(self, block_t block) noexcept nogil
    cdef _check(self, int32_t block)
