from _fast.clock cimport StepClock
from _fast.launcher cimport Launcher
from _fast.params cimport SlotParams
from _fast.plan cimport StepPlan
from _fast.ring cimport OutputRing, StepNumbers
from _fast.scheduler cimport Scheduler
from _fast.types cimport int32_t, int64_t, uint8_t

cdef enum:
    MAX_PLANS = 8
    NUM_CLASSES = 32


cdef class SteadyLoop:
    cdef readonly int32_t in_flight  # plan that is launched and not committed; -1: none (same for the next three)
    cdef readonly int32_t planned  # scheduled, not packed, not launched
    cdef readonly int32_t uncommitted  # its tokens are on the host, not committed
    cdef readonly int32_t unpublished  # committed, its news is in its out arrays
    cdef readonly bint freed  # the last commit freed slots or evicted media
    cdef readonly double last_beat  # seconds of time.monotonic
    cdef readonly int64_t num_steps  # settled here since start
    cdef readonly double free_s  # seconds spent here without the GIL since start, including waiting
    cdef readonly StepClock clock  # its kinds are the bit lengths of token counts
    cdef Scheduler scheduler
    cdef SlotParams params
    cdef Launcher launcher
    cdef OutputRing ring
    cdef list plans
    cdef void* plan_at[MAX_PLANS]
    cdef int32_t num_plans
    cdef const uint8_t[::1] special
    cdef const int32_t[:, ::1] watched  # by slot: tokens that Python handles at once; -1 is none
    cdef int wake_fd
    cdef double report_s  # seconds for handing on the previous step's news
    cdef bint timed  # planning has waited for its time
    cdef bint exact  # ended_at of the launcher is when the step ended, not when the thread checked
    cdef int32_t variant  # variant of the graphs for the plan that was examined last
    cdef StepNumbers last

    cdef int32_t _run(self) noexcept nogil
    cdef bint _inbox_wakes(self) noexcept nogil
    cdef double _until(self, StepPlan plan, int32_t index) noexcept nogil
    cdef int32_t _next(self, StepPlan plan, int32_t index) noexcept nogil
    cdef int32_t _size(self, StepPlan plan) noexcept nogil
    cdef int32_t _settle(self, StepPlan plan, int32_t index) noexcept nogil
    cdef bint _all_sampled(self, StepPlan plan, const int32_t* tokens) noexcept nogil
    cdef bint _wakes(self, StepPlan plan, const int32_t* tokens) noexcept nogil
    cdef void _note_numbers(self, StepPlan plan) noexcept nogil
    cdef double _learn(self, StepPlan plan, double launched, double before) noexcept nogil
