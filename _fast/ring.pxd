from _fast.plan cimport StepPlan
from _fast.types cimport int32_t, int64_t, uint8_t


cdef struct StepNumbers:  # what a step did and how long its parts took, seconds
    int64_t step_id
    int64_t preemptions
    int64_t prefix_queries
    int64_t prefix_hits
    int32_t num_rows
    int32_t num_tokens
    int32_t num_sampled
    int32_t running
    int32_t waiting
    int32_t blocks_used
    double schedule_s
    double launch_s
    double wait_s
    double commit_s
    double device_s
    double gap_s
    double launched_at
    double ended_at


cdef struct Entry:
    StepNumbers numbers
    int32_t count
    int32_t num_reported  # tokens with log-probabilities
    bint is_object


cdef struct Reported:  # the log-probabilities of a token
    int32_t place  # among the step's news
    int32_t k  # of the most likely


cdef object named(StepNumbers* of)  # step_numbers.StepNumbers


cdef class OutputRing:
    cdef readonly int32_t max_rows
    cdef readonly int32_t num_entries
    cdef readonly int fd  # becomes readable with each entry
    cdef int64_t pushed  # entries ever written; the producer's
    cdef int64_t popped  # entries ever read; the consumer's
    cdef int64_t overflow  # objects in `backlog`
    cdef char* room  # the next four: entries, then a line for each
    cdef Entry* entries
    cdef int64_t* requests
    cdef int32_t* tokens
    cdef uint8_t* finishes
    cdef Reported* reported
    cdef int32_t* words  # num_words for each entry of `reported`
    cdef int32_t num_words  # of a row's log-probabilities
    cdef const uint8_t[::1] asked
    cdef const int32_t[:, :, :, ::1] lines
    cdef int32_t stride  # tokens of a line
    cdef readonly int32_t width  # tokens that a row may have in a step
    cdef list objects  # by entry
    cdef object backlog  # deque

    cdef bint push(self, StepPlan plan, StepNumbers* numbers) noexcept nogil
    cdef void _report(self, StepPlan plan, int64_t place) noexcept nogil
    cdef void _write(self, StepPlan plan, int64_t place, StepNumbers* numbers) noexcept nogil
    cdef void wake(self) noexcept nogil
