from _fast.drafts cimport Drafts, DraftTotals
from _fast.plan cimport StepPlan
from _fast.types cimport int32_t, int64_t, uint8_t


cdef struct StepNumbers:  # a step's counts, and durations of its parts in seconds
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
    DraftTotals drafts  # since start; only with runs of several tokens
    int32_t num_reported  # tokens with log-probabilities
    int32_t num_drafted  # rows that verified drafts
    bint is_object


cdef struct Reported:  # log-probabilities of a token
    int32_t place  # index in the step's news
    int32_t k  # number of most likely tokens


cdef struct Drafted:  # drafts of a row
    int64_t request
    uint8_t verified
    uint8_t accepted


cdef object named(StepNumbers* of)  # step_numbers.StepNumbers


cdef class OutputRing:
    cdef readonly int32_t max_rows
    cdef readonly int32_t num_entries
    cdef readonly int fd  # becomes readable with each entry
    cdef int64_t pushed  # entries ever written; written by the producer
    cdef int64_t popped  # entries ever read; written by the consumer
    cdef int64_t overflow  # objects in `backlog`
    cdef char* room  # memory of the next four: entries, then a line for each
    cdef Entry* entries
    cdef int64_t* requests
    cdef int32_t* tokens
    cdef uint8_t* finishes
    cdef Reported* reported
    cdef Drafted* drafted
    cdef int32_t* words  # num_words for each entry of `reported`
    cdef int32_t num_words  # words of a row's log-probabilities
    cdef const uint8_t[::1] asked
    cdef const int32_t[:, :, :, ::1] lines
    cdef int32_t stride  # tokens per line
    cdef readonly int32_t width  # most tokens per row and step
    cdef bint lists_drafted
    cdef list objects  # by entry
    cdef object backlog  # deque

    cdef bint push(self, StepPlan plan, StepNumbers* numbers, Drafts drafts) noexcept nogil
    cdef void load(self, StepPlan plan) noexcept nogil
    cdef void _report(self, StepPlan plan, int64_t place) noexcept nogil
    cdef void _write(self, StepPlan plan, int64_t place, StepNumbers* numbers) noexcept nogil
    cdef void _note_drafted(self, StepPlan plan, int64_t place) noexcept nogil
    cdef list _drafted(self, int64_t place)
    cdef void wake(self) noexcept nogil
