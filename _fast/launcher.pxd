from _fast.layout cimport NUM_GRAPH_KINDS
from _fast.plan cimport StepPlan
from _fast.types cimport int32_t, int64_t

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
    MAX_BUFFERS = 8  # records or ring buffers
    MAX_GRAPHS = 256  # of one kind and variant
    NUM_VARIANTS = 8  # bit fields of three bits


cdef struct Graphs:  # of one kind and variant, sizes ascending
    int32_t count
    int32_t size[MAX_GRAPHS]
    void* graph[MAX_GRAPHS]


cdef double now() noexcept nogil


cdef class Launcher:
    cdef readonly int32_t max_rows
    cdef readonly double ended_at  # seconds of time.perf_counter when the last wait() returned
    cdef readonly int64_t waited_step  # everything up to this step has run on the device
    cdef readonly double gap_s  # before the forward of the step waited for last; 0: not measured
    cdef readonly int32_t gap_every  # one step in so many has the gap behind it measured
    cdef int32_t num_records
    cdef int32_t turn  # the record that is next, as the device counts too; -1: it may count otherwise
    cdef int32_t record  # of the newest step
    cdef int64_t step
    cdef int64_t gap_after  # the step whose end was marked last; -1: none
    cdef int64_t gap_before  # the step whose beginning was marked last; -1: none
    cdef int failed_call
    cdef int failed_code
    cdef void* compute
    cdef void* device_turn  # the device's turn
    cdef void* passed  # event: the compute stream has come so far
    cdef void* gap_begin  # timed event: the tokens of step gap_after are chosen
    cdef void* gap_end  # timed event: the forward of step gap_before begins
    cdef void* records[8]
    cdef void* ring[8]
    cdef void* home[8]  # event per record: its ring buffer holds its step's tokens
    cdef int64_t record_step[8]
    cdef int64_t home_step[8]
    cdef double launched_at[8]  # per record
    cdef Graphs graphs[NUM_GRAPH_KINDS][NUM_VARIANTS]
    cdef int32_t variant_bits[NUM_GRAPH_KINDS]  # by kind: bits that some graph of the kind has
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
    cdef int32_t place(self, int32_t kind, int32_t variant, int32_t count) noexcept nogil
    cdef int32_t choose(self, int32_t kind, int32_t variant, int32_t count) noexcept nogil
    cdef void* find(self, int32_t kind, int32_t variant, int32_t size) noexcept nogil
    cdef bint await_read(self, int32_t record) noexcept nogil
    cdef bint launch_prep(self, StepPlan plan, int32_t record) noexcept nogil
    cdef bint launch_reader(self, void* graph, StepPlan plan, int32_t record) noexcept nogil
    cdef bint launch_graph(self, void* graph) noexcept nogil
    cdef bint record_done(self) noexcept nogil
    cdef bint launch_plain(self, StepPlan plan, int32_t record, int32_t kind, int32_t variant,
                           int32_t size, int32_t sample_size) noexcept nogil
    cdef bint await_tokens(self, int32_t record) noexcept nogil
    cdef bint ends_gap(self, int64_t step) noexcept nogil
    cdef bint mark_begin(self) noexcept nogil
    cdef bint mark_end(self) noexcept nogil
    cdef bint measure_gap(self) noexcept nogil
    cdef const int32_t* tokens_at(self, int32_t record) noexcept nogil
    cdef _raise(self)
    cdef _event(self, void** event, unsigned int flags)
    cdef _check_index(self, str what, int32_t index, int32_t count)
    cdef _check_kind(self, int32_t kind, int32_t variant)
