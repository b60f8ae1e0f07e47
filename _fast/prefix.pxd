from _fast.types cimport block_t, int32_t, int64_t, uint64_t


cdef struct Name:  # identity of a block: link, depth, group and hash
    uint64_t hash_lo
    uint64_t hash_hi
    uint64_t link_lo
    uint64_t link_hi
    int32_t depth
    int32_t group


cdef struct Entry:  # entry of a block; one cache line, because it is usually read long after its last use
    Name name
    int64_t serial
    int64_t num_words
    int64_t unused


cdef class PrefixIndex:
    cdef readonly int32_t block_size
    cdef readonly int64_t num_entries
    cdef uint64_t key_lo
    cdef uint64_t key_hi
    cdef uint64_t keep_lo
    cdef uint64_t keep_hi
    cdef int32_t mask
    cdef int64_t next_serial
    cdef Entry* entries
    cdef int32_t num_blocks
    cdef int64_t* keys  # [num_blocks, block_size]: the first word of each position's key
    cdef int64_t* seconds  # [num_blocks, block_size]: the second words; memory stays untouched for blocks without
    cdef int32_t[::1] table

    cdef void chain(self, const uint64_t* parent, const int64_t* keys, int32_t num_words, uint64_t* out) noexcept nogil
    cdef block_t find(self, const Name* name, const int64_t* keys, int32_t num_words) noexcept nogil
    cdef bint _holds(self, block_t block, const int64_t* keys, int32_t num_words) noexcept nogil
    cdef void insert(self, block_t block, const Name* name, const int64_t* keys, int32_t num_words) noexcept nogil
    cdef void remove(self, block_t block) noexcept nogil
    cdef void clear(self) noexcept nogil
    cdef void fetch(self, block_t block) noexcept nogil
    cdef int32_t _home(self, const Name* name) noexcept nogil
    cdef _name(self, Name* name, bytes digest, bytes link, int32_t depth, int32_t group)
    cdef _check(self, object keys)
