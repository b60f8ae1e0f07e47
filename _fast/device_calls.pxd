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

cdef enum:
    MAX_RANKS = 8

cdef enum:
    EXCHANGE = 9  # a place behind those of CALLS: not a call, but what the ranks' kernels report

cdef enum:  # flags of an event
    BLOCKING = 1
    NO_TIMING = 2


cdef class DeviceCalls:
    cdef int failed_call
    cdef int failed_code
    cdef const int32_t* waited_in_vain  # not 0 after a rank has waited so for another; NULL: there is one rank
    cdef int32_t num_ranks
    cdef void* streams[8]  # by rank
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
    cdef bint launch(self, void** graphs) noexcept nogil
    cdef bint send(self, void** to, const void* source, size_t size) noexcept nogil
    cdef bint mark(self, void* event) noexcept nogil
    cdef bint ranks_agree(self) noexcept nogil
    cdef bint await_all(self, void** events) noexcept nogil
    cdef bint await_event(self, void* event) noexcept nogil
    cdef bint elapsed(self, void* begin, void* end, double* seconds) noexcept nogil
    cdef int reached(self, void* event) noexcept nogil
    cdef void destroy(self, void* event) noexcept nogil
    cdef create(self, void** event, unsigned int flags)
    cdef add_stream(self, size_t stream)
    cdef raise_failed(self)
