"""Shelves: small buffers side by side in pages of 2 MiB, which the system gives to those who ask where it has them.

Owner: the object that has the struct, and its thread. In: sizes in bytes. Out: memory. A core that has slept finds its
pages anew, in a virtual machine through two tables for each: when the newest tokens of 256 rows lay in 256 pages, that
took a quarter of the time in which a step is settled.

A chunk of 2 MiB is cut into pieces of 1, 2, 4 .. 64 KiB from its front. A piece that comes back waits for the next one
who wants its size; chunks go back all together, at the end. Columns are arrays that stay as long as their owner does.
"""

import struct

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport uintptr_t
from libc.stdlib cimport free, malloc

cdef extern from *:
    """
    #include <stdint.h>
    #include <sys/mman.h>
    enum { OMNILOOP_PAGE = 1 << 21 };
    static size_t omniloop_whole(size_t size) { return (size + OMNILOOP_PAGE - 1) / OMNILOOP_PAGE * OMNILOOP_PAGE; }
    /* Zeros from the beginning of a large page on; NULL: there is no memory. */
    static void *omniloop_map(size_t size)
    {
        size_t whole = omniloop_whole(size), before;
        char *at = mmap(0, whole + OMNILOOP_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (at == MAP_FAILED)
            return 0;
        before = (OMNILOOP_PAGE - (uintptr_t)at % OMNILOOP_PAGE) % OMNILOOP_PAGE;
        if (before)
            munmap(at, before);
        munmap(at + before + whole, OMNILOOP_PAGE - before);
    #ifdef MADV_HUGEPAGE
        madvise(at + before, whole, MADV_HUGEPAGE); /* refused where there are none: then they are small */
    #endif
        return at + before;
    }
    static void omniloop_unmap(void *at, size_t size) { munmap(at, omniloop_whole(size)); }
    """
    void* map_pages "omniloop_map"(size_t size) noexcept nogil
    void unmap_pages "omniloop_unmap"(void* at, size_t size) noexcept nogil

cdef enum:
    CHUNK = 2097152
    LINE = 64  # bytes: before the first piece, and between two, so that equal places do not share a cache's few lines
    SMALLEST = 1024


cdef void* take_pages(size_t size) noexcept nogil:
    """Zeros, in pages of their own; NULL: there is no memory."""
    return map_pages(size)


cdef void give_pages(void* at, size_t size) noexcept nogil:
    """What take_pages() gave for this size."""
    if at:
        unmap_pages(at, size)


cdef void* take(Shelves* own, size_t* size) noexcept nogil:
    """At least so many bytes, of any content; `size` becomes how many. NULL: there is no memory."""
    cdef int which = 0
    cdef size_t piece = SMALLEST
    cdef void* found
    cdef char* chunk
    if size[0] > LARGEST:
        return malloc(size[0])
    while piece < size[0]:
        piece *= 2
        which += 1
    found = own.free_at[which]
    if found:
        own.free_at[which] = (<void**>found)[0]
    else:
        if not own.chunk or own.used + piece > CHUNK:
            chunk = <char*>map_pages(CHUNK)
            if not chunk:
                return NULL
            (<void**>chunk)[0] = own.chunk
            own.chunk = chunk
            own.used = LINE
        found = own.chunk + own.used
        own.used += piece + LINE
    size[0] = piece
    return found


cdef void give(Shelves* own, void* at, size_t size) noexcept nogil:
    """A piece comes back, with the size that take() told; NULL is none."""
    cdef int which = 0
    cdef size_t piece = SMALLEST
    if size > LARGEST or not at:
        free(at)
        return
    while piece < size:
        piece *= 2
        which += 1
    (<void**>at)[0] = own.free_at[which]
    own.free_at[which] = at


cdef bint holds(const Shelves* own, const void* at) noexcept nogil:
    """Whether a piece lies in a chunk, or is malloc's."""
    cdef char* chunk = own.chunk
    while chunk:
        if <uintptr_t>chunk < <uintptr_t>at < <uintptr_t>chunk + CHUNK:
            return True
        chunk = <char*>(<void**>chunk)[0]
    return False


cdef void clear(Shelves* own) noexcept nogil:
    """All chunks go back; nobody may use a piece of them."""
    cdef char* before
    while own.chunk:
        before = <char*>(<void**>own.chunk)[0]
        unmap_pages(own.chunk, CHUNK)
        own.chunk = before


@cython.final
cdef class Pages:
    """Zeros in pages of their own; views keep them."""

    def __cinit__(self, size_t size):
        self.size = size
        self.at = take_pages(size)
        if not self.at:
            raise MemoryError(f"no memory for {size} bytes")

    def __dealloc__(self):
        give_pages(self.at, self.size)

    def __getbuffer__(self, Py_buffer* into, int flags):
        PyBuffer_FillInfo(into, self, self.at, <Py_ssize_t>self.size, False, flags)


@cython.final
cdef class Columns:
    """Arrays of zeros side by side, each from the beginning of a line on."""

    def __cinit__(self):
        self.full = []

    cdef size_t _claim(self, size_t size) except? 0:
        """Where so many bytes are free in the newest pages."""
        if self.newest is None or self.used + size > self.newest.size:
            if self.newest is not None:
                self.full.append(self.newest)
            self.newest = Pages(max(size, <size_t>CHUNK))
            self.used = 0
        self.used += (size + LINE - 1) // LINE * LINE
        return self.used - (size + LINE - 1) // LINE * LINE

    cdef void* room(self, size_t size) except NULL:
        """So many bytes, for as long as this object is there."""
        cdef size_t at = self._claim(size)
        return <char*>self.newest.at + at

    cdef object array(self, str code, size_t count):
        """A memoryview of so many values, which keeps its pages."""
        cdef size_t size = count * <size_t>struct.calcsize(code)
        cdef size_t at = self._claim(size)
        return memoryview(self.newest)[at:at + size].cast(code)
