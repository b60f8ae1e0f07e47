cdef enum:
    LARGEST = 65536  # bytes of what lies on a shelf; what is larger is malloc's
    NUM_SIZES = 7


cdef struct Shelves:  # all zero at first
    void* free_at[7]  # by size, the smallest first: pieces nobody uses, each with the next one's address in it
    char* chunk  # the newest; each begins with the address of the one before
    size_t used  # of it


cdef void* take_pages(size_t size) noexcept nogil
cdef void give_pages(void* at, size_t size) noexcept nogil
cdef void* take(Shelves* own, size_t* size) noexcept nogil
cdef void give(Shelves* own, void* at, size_t size) noexcept nogil
cdef bint holds(const Shelves* own, const void* at) noexcept nogil
cdef void clear(Shelves* own) noexcept nogil


cdef class Pages:
    cdef void* at
    cdef size_t size


cdef class Columns:
    cdef Pages newest
    cdef size_t used  # of it
    cdef list full

    cdef size_t _claim(self, size_t size) except? 0
    cdef void* room(self, size_t size) except NULL
    cdef object array(self, str code, size_t count)
