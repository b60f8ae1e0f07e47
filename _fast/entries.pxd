from _fast.types cimport int32_t, int64_t


cdef enum State:
    NEW = 0
    READY = 1
    EVICTED = 2  # its embedding will be dropped; the engine has not taken it from the list yet
    BEGUN = 3  # pieces of its tower have run; room for its rows is reserved


cdef struct Entry:  # one image, audio or video, shared by the requests that contain it
    int32_t rows  # tower rows in the cache; 0: the id is free
    int32_t work  # cost of its tower's run, in the unit of the budget
    int32_t refs  # live requests that name it
    int32_t pins  # live requests whose next chunks need its embedding
    int32_t state
    int32_t before
    int32_t after
    int64_t last_use  # newest step that reads it
    int64_t encoded_in  # step whose plan runs its tower
    int64_t stamp  # newest limit() call that visited it


cdef class Entries:
    cdef readonly int32_t budget  # per step, in the unit of work
    cdef readonly int32_t capacity  # rows of all embeddings
    cdef readonly int32_t num_entries
    cdef readonly int32_t num_in_use  # entries that live requests name
    cdef readonly int64_t rows_held
    cdef readonly int32_t num_evicted
    cdef readonly int32_t num_large  # entries whose work exceeds the budget
    cdef Entry* entries
    cdef int32_t* gone  # num_evicted entries
    cdef int32_t room  # size of both arrays
    cdef int32_t free_id
    cdef int64_t settled  # steps up to this one are committed

    cdef _grow(self, int32_t room)
    cdef void _renew(self, int32_t entry) noexcept nogil
    cdef bint _is_large(self, int32_t entry) noexcept nogil
    cdef int64_t _evictable(self) noexcept nogil
    cdef void _release(self, int32_t entry) noexcept nogil
    cdef bint _make_room(self, int32_t rows) noexcept nogil
    cdef void _evict(self, int32_t entry) noexcept nogil
    cdef void _recall(self, int32_t entry) noexcept nogil
    cdef void _forget(self, int32_t entry) noexcept nogil
    cdef void _append(self, int32_t entry) noexcept nogil
    cdef void _unlink(self, int32_t entry) noexcept nogil
