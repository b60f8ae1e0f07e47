from _fast.device_calls cimport MAX_RANKS, DeviceCalls
from _fast.gap_clock cimport GapClock
from _fast.graph_table cimport GraphTable
from _fast.plan cimport StepPlan
from _fast.types cimport int32_t, int64_t

cdef enum:
    MAX_BUFFERS = 8  # records or ring buffers


cdef struct Turn:  # the next record
    int32_t next  # same as the devices' counters; -1: a device's counter may differ
    void* counted[MAX_RANKS]  # the ranks' counters


cdef struct Home:  # host buffer for the tokens of a record's step
    void* tokens  # the ring buffer
    void* event  # reached when the ring buffer holds the tokens
    int64_t step  # -1: none was launched


cdef double now() noexcept nogil


cdef class Launcher:
    cdef readonly int32_t max_rows
    cdef readonly double ended_at  # seconds of time.perf_counter when the last wait() returned
    cdef readonly int64_t waited_step  # everything up to this step has run on the device
    cdef readonly double gap_s  # idle time before the forward of the step waited for last; 0: not measured
    cdef DeviceCalls calls
    cdef GraphTable graphs
    cdef GapClock gaps
    cdef int32_t num_records
    cdef Turn turn
    cdef int32_t record  # record of the newest step; -1: none was begun
    cdef void* passed[MAX_RANKS]  # by rank: event that marks a place in the compute stream
    cdef void* records[8]
    cdef Home home[8]  # per record
    cdef int64_t record_step[8]  # the newest step of each record
    cdef double launched_at[8]  # per record

    cdef int32_t choose(self, int32_t kind, int32_t variant, int32_t count) noexcept nogil
    cdef bint await_read(self, int32_t record) noexcept nogil
    cdef bint launch_prep(self, StepPlan plan, int32_t record) noexcept nogil
    cdef bint launch_passes(self, StepPlan plan) noexcept nogil
    cdef bint launch_reader(self, void** graphs, StepPlan plan, int32_t record) noexcept nogil
    cdef bint record_done(self) noexcept nogil
    cdef bint launch_plain(self, StepPlan plan, int32_t record, int32_t kind, int32_t variant,
                           int32_t size, int32_t sample_size) noexcept nogil
    cdef bint await_tokens(self, int32_t record) noexcept nogil
    cdef const int32_t* tokens_at(self, int32_t record) noexcept nogil
    cdef _raise(self)
    cdef _check_index(self, str what, int32_t index, int32_t count)
