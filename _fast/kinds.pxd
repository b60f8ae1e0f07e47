from _fast.types cimport int32_t


cdef enum GroupKind:
    GROUP_FULL = 0
    GROUP_SLIDING = 1
    GROUP_STATE = 2


cdef struct Group:  # layers that share block tables
    int32_t kind
    int32_t window  # sliding: tokens that a token reads, including itself; state: tokens folded at once; full: 0
    int32_t block_size
    int32_t max_chunk  # most tokens that a row computes in a step


cdef int fill_group(Group* group, int32_t kind, int32_t window, int32_t block_size, int32_t max_chunk) except -1
cdef int32_t take_states(list groups) except -1
cdef int32_t needed_from(const Group* group, int32_t position) noexcept nogil
cdef int32_t demand(const Group* group, int32_t hit, int32_t entries) noexcept nogil
cdef bint takes(const Group* group, int32_t entry, int32_t least, int32_t target) noexcept nogil
cdef int32_t chunk_end(const Group* group, int32_t start, int32_t end) noexcept nogil
cdef bint is_named(const Group* group, int32_t entry, int32_t committed) noexcept nogil
cdef bint vouches(const Group* group) noexcept nogil
