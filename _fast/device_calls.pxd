from libc.stdint cimport uintptr_t

from _fast.types cimport int32_t

ctypedef int (*GraphLaunch)(void* graph, void* stream) noexcept nogil
ctypedef int (*MemcpyAsync)(void* to, const void* source, size_t size, int kind, void* stream) noexcept nogil
ctypedef int (*EventCreateWithFlags)(void** event, unsigned int flags) noexcept nogil
ctypedef int (*EventDestroy)(void* event) noexcept nogil
ctypedef int (*EventRecord)(void* event, void* stream) noexcept nogil
ctypedef int (*EventQuery)(void* event) noexcept nogil
ctypedef int (*EventSynchronize)(void* event) noexcept nogil
ctypedef int (*EventElapsedTime)(float* milliseconds, void* start, void* end) noexcept nogil
ctypedef const char* (*GetErrorString)(int code) noexcept nogil

cdef enum:  # flags of an event
    BLOCKING = 1
    NO_TIMING = 2


cdef class DeviceCalls:
    cdef int failed_call
    cdef int failed_code
    cdef void* stream
    cdef GraphLaunch graph_launch
    cdef MemcpyAsync memcpy_async
    cdef EventCreateWithFlags event_create
    cdef EventDestroy event_destroy
    cdef EventRecord event_record
    cdef EventQuery event_query
    cdef EventSynchronize event_synchronize
    cdef EventElapsedTime event_elapsed_time
    cdef GetErrorString get_error_string

    cdef bint ok(self, int call, int code) noexcept nogil
    cdef bint launch(self, void* graph) noexcept nogil
    cdef bint send(self, void* to, const void* source, size_t size) noexcept nogil
    cdef bint mark(self, void* event) noexcept nogil
    cdef bint await_event(self, void* event) noexcept nogil
    cdef bint elapsed(self, void* begin, void* end, double* seconds) noexcept nogil
    cdef int reached(self, void* event) noexcept nogil
    cdef void destroy(self, void* event) noexcept nogil
    cdef create(self, void** event, unsigned int flags)
    cdef raise_failed(self)
