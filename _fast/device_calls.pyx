"""DeviceCalls: calls functions of the device's runtime for steps, through C function pointers and without the GIL.

Owner: the device thread, whose current device owns the stream. In: addresses of the functions, from
engine/kernels/target.py, and for each rank the single stream on which its work runs; most engines have one rank. Out:
whether a call succeeded; a failed call is recorded by name and error number until it is raised. Whatever is launched
is launched on all ranks, in rank order, before anything else: kernels of the ranks wait for each other, and a launch
may block until earlier work has run.

CUDA and HIP share these numbers: copy kind 1 (to the device), event flags 1 (block, do not spin) and 2 (no timing),
error 600 (not ready).
"""

cimport cython
from libc.stdint cimport uintptr_t

cdef enum:
    TO_DEVICE = 1
    NOT_READY = 600

cdef enum:  # places in CALLS
    GRAPH_LAUNCH = 0
    MEMCPY_ASYNC
    EVENT_CREATE
    EVENT_DESTROY
    EVENT_RECORD
    EVENT_QUERY
    EVENT_SYNCHRONIZE
    EVENT_ELAPSED_TIME

CALLS = (
    "GraphLaunch", "MemcpyAsync", "EventCreateWithFlags", "EventDestroy", "EventRecord", "EventQuery",
    "EventSynchronize", "EventElapsedTime", "GetErrorString",
)


@cython.final
cdef class DeviceCalls:
    """The calls of an engine's devices. A method that returns False has recorded the failed call."""

    def __init__(self, dict calls not None, uintptr_t stream):
        missing = [name for name in CALLS if not calls.get(name)]
        if missing:
            raise ValueError(f"the device runtime lacks {', '.join(missing)}")
        self.graph_launch = <GraphLaunch><uintptr_t>calls["GraphLaunch"]
        self.memcpy_async = <MemcpyAsync><uintptr_t>calls["MemcpyAsync"]
        self.event_create = <EventCreateWithFlags><uintptr_t>calls["EventCreateWithFlags"]
        self.event_destroy = <EventDestroy><uintptr_t>calls["EventDestroy"]
        self.event_record = <EventRecord><uintptr_t>calls["EventRecord"]
        self.event_query = <EventQuery><uintptr_t>calls["EventQuery"]
        self.event_synchronize = <EventSynchronize><uintptr_t>calls["EventSynchronize"]
        self.event_elapsed_time = <EventElapsedTime><uintptr_t>calls["EventElapsedTime"]
        self.get_error_string = <GetErrorString><uintptr_t>calls["GetErrorString"]
        self.streams[0] = <void*>stream
        self.num_ranks = 1

    cdef bint ok(self, int call, int code) noexcept nogil:
        """Record a failure code of a call (its place in CALLS); return whether the call succeeded."""
        if code:
            self.failed_call = call
            self.failed_code = code
        return code == 0

    cdef bint launch(self, void** graphs) noexcept nogil:
        """Launch a captured graph on each rank, after everything that was launched before."""
        cdef int32_t rank
        for rank in range(self.num_ranks):
            if not self.ok(GRAPH_LAUNCH, self.graph_launch(graphs[rank], self.streams[rank])):
                return False
        return True

    cdef bint send(self, void** to, const void* source, size_t size) noexcept nogil:
        """Copy from the host to an address on each rank's device, on its stream."""
        cdef int32_t rank
        for rank in range(self.num_ranks):
            if not self.ok(MEMCPY_ASYNC, self.memcpy_async(to[rank], source, size, TO_DEVICE, self.streams[rank])):
                return False
        return True

    cdef bint mark(self, void* event) noexcept nogil:
        """Record the event, which is reached when everything launched before on the first rank has run."""
        return self.ok(EVENT_RECORD, self.event_record(event, self.streams[0]))

    cdef bint ranks_agree(self) noexcept nogil:
        """Whether no rank's kernel has waited in vain for another rank."""
        return self.waited_in_vain == NULL or self.ok(EXCHANGE, self.waited_in_vain[0])

    cdef bint await_all(self, void** events) noexcept nogil:
        """Wait until everything launched before has run; `events`: an event of each rank's device."""
        cdef int32_t rank
        for rank in range(self.num_ranks):
            if not self.ok(EVENT_RECORD, self.event_record(events[rank], self.streams[rank])):
                return False
        for rank in range(self.num_ranks):
            if not self.await_event(events[rank]):
                return False
        return True

    cdef bint await_event(self, void* event) noexcept nogil:
        """Wait until the event has been reached; there is no time limit, because the driver's call has none."""
        return self.ok(EVENT_SYNCHRONIZE, self.event_synchronize(event))

    cdef bint elapsed(self, void* begin, void* end, double* seconds) noexcept nogil:
        """Return the time between two timed events that have been reached."""
        cdef float milliseconds = 0.0
        if not self.ok(EVENT_ELAPSED_TIME, self.event_elapsed_time(&milliseconds, begin, end)):
            return False
        seconds[0] = 1e-3 * <double>milliseconds
        return True

    cdef int reached(self, void* event) noexcept nogil:
        """Return 1: the event has been reached; 0: not yet; -1: the call failed."""
        cdef int code = self.event_query(event)
        if code == NOT_READY:
            return 0
        return 1 if self.ok(EVENT_QUERY, code) else -1

    cdef void destroy(self, void* event) noexcept nogil:
        """Destroy an event, unless it is NULL."""
        if event:
            self.event_destroy(event)

    cdef create(self, void** event, unsigned int flags):
        """Create an event; raise RuntimeError if the runtime refuses."""
        if not self.ok(EVENT_CREATE, self.event_create(event, flags)):
            event[0] = NULL
            self.raise_failed()

    cdef add_stream(self, size_t stream):
        """Add the stream of the next rank."""
        if self.num_ranks == MAX_RANKS:
            raise ValueError(f"{MAX_RANKS} ranks are the most")
        self.streams[self.num_ranks] = <void*>stream
        self.num_ranks += 1

    cdef raise_failed(self):
        """Raise RuntimeError with the failed call and the runtime's error message."""
        if self.failed_call == EXCHANGE:
            raise RuntimeError(f"exchange returned {self.failed_code}: a GPU has waited in vain for another GPU")
        cdef const char* text = self.get_error_string(self.failed_code)
        words = f" ({text.decode('utf-8', 'replace')})" if text else ""
        raise RuntimeError(f"{CALLS[self.failed_call]} returned {self.failed_code}{words}")
