"""SteadyLoop: runs plain steps in sequence, without the GIL, until Python is needed.

Owner: the device thread. In: scheduler, plans in their records, staged words, a launcher with graphs, the inbox's
eventfd. Out: news in an OutputRing; a reason to return, and the states of plans. An iteration is like
engine/run/loop's:

    thread   wait for the inbox | plan N+1, pack, launch all of it | wait for N | commit N | push N's news | wait ...
    device   ... N ............................................... | N+1 .............................. | ...

A step is plain if it runs no tower, takes no media rows, has a graph, and no row is `special`. Bit 0 of a slot's byte:
Python handles all of its steps. Bit 1: Python handles the steps that compute tokens of its prompt, including the step
that samples its first token. Bit 2: if a step chooses certain tokens (`watched`), it returns to Python uncommitted,
because the step launched after it did not take them into account. The bits from SPECIAL_VARIANT_SHIFT on are the
variant of the graphs that the row needs.
Plan and record of a step have the number step_id modulo the plans' count.
"""

cimport cython
from posix.time cimport timespec

from _fast.clock cimport StepClock
from _fast.launcher cimport now
from _fast.layout cimport GRAPH_DECODE, GRAPH_MIXED, GRAPH_SAMPLE, HEADER_VARIANT, ROW_SAMPLE, TOKEN_END
from _fast.ring cimport named
from _fast.types cimport slot_t

cdef extern from *:
    """
    #include <errno.h>
    #include <poll.h>
    #include <time.h>
    #ifdef __linux__
    #include <sys/prctl.h>
    #endif
    /* By default Linux may delay a thread's timers by 50 us, to serve several at once. */
    static void omniloop_be_punctual(void)
    {
    #ifdef __linux__
        prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);
    #endif
    }
    /* 1: fd is readable; 0: timeout. Outside of Linux the time is truncated to milliseconds. */
    static int omniloop_readable(int fd, const struct timespec *wait)
    {
        struct pollfd of = {fd, POLLIN, 0};
    #ifdef __linux__
        return ppoll(&of, 1, wait, NULL) > 0;
    #else
        return poll(&of, 1, (int)(wait->tv_sec * 1000 + wait->tv_nsec / 1000000)) > 0;
    #endif
    }
    """
    void be_punctual "omniloop_be_punctual"() noexcept nogil
    bint readable "omniloop_readable"(int fd, const timespec* wait) noexcept nogil

cdef enum:
    GOES_ON = 0
    INBOX = 1
    PYTHON = 2
    INVALID = 3
    RING = 4
    FREED = 5
    IDLE = 6
    FAILED = 7
    PREEMPTED = 8
    WOKEN = 9
    ALWAYS = 1  # bits of `special`
    PROMPT = 2
    WATCHED = 4
    VARIANT_SHIFT = 3

REASON_INBOX = INBOX  # the inbox has something
REASON_PYTHON = PYTHON  # `planned` is not plain
REASON_INVALID = INVALID  # `uncommitted` has rows that should have a token and have none
REASON_RING = RING  # the ring is full: `unpublished`
REASON_WOKEN = WOKEN  # `uncommitted` has a token that a slot watches
REASON_FREED = FREED  # slots or media entries were freed
REASON_IDLE = IDLE  # nothing is in flight, nothing can be planned
REASON_PREEMPTED = PREEMPTED  # a row was preempted: the budget of prompts must be set again

cdef double LEAST_MARGIN = 0.00015  # seconds that an iteration without the GIL takes
SPECIAL_ALWAYS = ALWAYS
SPECIAL_PROMPT = PROMPT
SPECIAL_WATCHED = WATCHED
SPECIAL_VARIANT_SHIFT = VARIANT_SHIFT


cdef inline int32_t size_class(int32_t num_tokens) noexcept nogil:
    """Return the bit length of a token count."""
    cdef int32_t bits = 0
    while num_tokens:
        num_tokens >>= 1
        bits += 1
    return bits


cdef inline int32_t run_length(const int32_t* run, int32_t width) noexcept nogil:
    """Return the number of tokens in a row's run."""
    cdef int32_t count = 0
    while count < width and run[count] >= 0:
        count += 1
    return count


@cython.final
cdef class SteadyLoop:
    """The loop of the device thread, which owns all arguments; other threads may read only `last_beat`."""

    def __init__(self, Scheduler scheduler not None, list plans not None, SlotParams params not None,
                 Launcher launcher not None, OutputRing ring not None, const uint8_t[::1] special not None,
                 const int32_t[:, ::1] watched not None, int wake_fd):
        cdef int32_t i = 0
        cdef StepPlan plan
        if len(plans) < 2 or len(plans) != launcher.num_records:
            raise ValueError(
                f"{len(plans)} plans, {launcher.num_records} records: need at least two plans, and as many records"
            )
        for plan in plans:
            if <void*>&plan.record[0] != launcher.records[i] or plan.number != i:
                raise ValueError(f"plan {i} does not lie in record {i}, or its number is another: {plan.number}")
            if plan.width > ring.width:
                raise ValueError(f"plan {i} brings {plan.width} tokens a row, and the ring takes {ring.width}")
            if plan.max_rows < scheduler.max_rows or plan.max_tokens < scheduler.max_tokens:
                raise ValueError(f"plan {i} is too small for the scheduler's {scheduler.max_rows} rows")
            if plan.updates.shape[0] < scheduler.tables.num_groups * scheduler.tables.max_blocks:
                raise ValueError(f"plan {i} has too few updates for {scheduler.tables.max_blocks} blocks per slot")
            if plan.lines.run_width < scheduler.run_width:
                raise ValueError(f"plan {i} has runs of {plan.lines.run_width} blocks, not {scheduler.run_width}")
            self.plan_at[i] = <void*>plan
            i += 1
        if min(special.shape[0], watched.shape[0], params.max_slots) < scheduler.max_slots:
            raise ValueError(f"special, watched and params need a place for each of {scheduler.max_slots} slots")
        if ring.max_rows < scheduler.max_rows or launcher.max_rows < scheduler.max_rows:
            raise ValueError(f"ring and launcher need room for {scheduler.max_rows} rows")
        self.scheduler, self.params, self.launcher, self.ring = scheduler, params, launcher, ring
        self.plans = plans
        self.num_plans = i
        self.special = special
        self.watched = watched
        self.wake_fd = wake_fd
        self.clock = StepClock(NUM_CLASSES, LEAST_MARGIN)
        self.in_flight = self.planned = self.uncommitted = self.unpublished = -1
        be_punctual()

    def run(self, int32_t in_flight):
        """Continue from plan `in_flight` (launched, plain; -1: none) and return a REASON; RuntimeError: device lost.

        The caller then must, in this order: commit `uncommitted`, publish `unpublished`, forget freed slots if `freed`,
        pack and launch `planned`; and settle `in_flight`, which was launched before it, or pass it to the next run().
        """
        cdef int32_t reason
        cdef double begun
        if not -1 <= in_flight < self.num_plans:
            raise ValueError(f"plan {in_flight}: there are 0 to {self.num_plans - 1}, and -1 is none")
        if self.scheduler._in_flight() != (in_flight >= 0):
            raise ValueError(f"{self.scheduler.num_in_flight} steps are in flight, and plan {in_flight} was given")
        if in_flight >= 0 and (<StepPlan>self.plan_at[in_flight]).step_id != self.scheduler.settler.settled_step + 1:
            raise ValueError(f"plan {in_flight} does not hold the step in flight")
        self.in_flight = in_flight
        self.planned = self.uncommitted = self.unpublished = -1
        self.freed = False
        self.exact = False
        with nogil:
            begun = now()
            reason = self._run()
            self.free_s += now() - begun
        if reason == FAILED:
            self.launcher._raise()
        return reason

    def is_plain(self, StepPlan plan not None):
        """Whether a scheduled plan's step may be passed to run()."""
        return self._size(plan) > 0

    def plan_until(self, int32_t index):
        """Return when to plan the step after plan `index` in flight, in seconds of time.perf_counter; 0: at once."""
        if not 0 <= index < self.num_plans:
            raise ValueError(f"plan {index}: there are 0 to {self.num_plans - 1}")
        return self._until(<StepPlan>self.plan_at[index], index)

    def learned(self):
        """Return [(bit length of a step's tokens, seconds)] of steps run here; only decodes, if prompts are special.

        This is a step's effective time, including the host's part if the device waits for it.
        """
        periods = self.clock.periods
        return [(bits, periods[bits]) for bits in range(NUM_CLASSES) if periods[bits] > 0.0]

    @property
    def numbers(self):
        """Numbers of an unpublished step, as from OutputRing.pop().

        For an `uncommitted` step its times are valid, except commit_s; for a `planned` step only schedule_s.
        """
        return named(&self.last)

    cdef int32_t _run(self) noexcept nogil:
        cdef int64_t preempted = self.scheduler.settler.num_preemptions
        cdef int32_t index
        cdef int32_t reason
        while True:
            self.last_beat = now()
            if self._inbox_wakes():
                return INBOX
            if self.scheduler.settler.num_preemptions != preempted:
                return PREEMPTED
            index = <int32_t>(self.scheduler.planner.next_step % self.num_plans)
            reason = self._next(<StepPlan>self.plan_at[index], index)
            if reason == IDLE:  # nothing can be planned before the step in flight is settled
                index = -1
                if self.in_flight < 0:
                    return IDLE
            elif reason:
                self.planned = index
                return reason
            if self.in_flight >= 0:
                reason = self._settle(<StepPlan>self.plan_at[self.in_flight], self.in_flight)
            self.in_flight = index
            if reason not in (GOES_ON, IDLE):
                return reason

    cdef bint _inbox_wakes(self) noexcept nogil:
        """Wait for the inbox. True: it has something; False: it had nothing until the next step must be planned."""
        cdef timespec wait
        cdef double left = 0.0
        if self.in_flight >= 0:
            left = max(0.0, self._until(<StepPlan>self.plan_at[self.in_flight], self.in_flight) - now())
        self.timed = left > 0.0
        wait.tv_sec = <long>left
        wait.tv_nsec = <long>((left - <double>wait.tv_sec) * 1e9)
        return readable(self.wake_fd, &wait)

    cdef double _until(self, StepPlan plan, int32_t index) noexcept nogil:
        cdef double begun = max(self.launcher.launched_at[index], self.launcher.ended_at)
        return self.clock.plan_at(begun, self.clock.expected(size_class(plan.num_tokens)))

    cdef int32_t _next(self, StepPlan plan, int32_t index) noexcept nogil:
        """Plan, pack and launch the whole next step. IDLE: there is none. PYTHON: it is not plain."""
        cdef double begun = now()
        cdef double packed
        cdef int32_t size
        cdef int32_t kind
        cdef int32_t sample_size = 0
        if not self.launcher.await_read(index):
            return FAILED
        self.scheduler.planner.plan(plan)
        self.last.schedule_s = now() - begun
        self.last.launch_s = 0.0
        if plan.num_rows == 0:
            return IDLE
        size = self._size(plan)
        if size == 0:
            return PYTHON
        if self.params.num_unsent:
            self.params.append(plan)
        packed = now()
        kind = GRAPH_DECODE if plan.num_decode_rows == plan.num_rows else GRAPH_MIXED
        if plan.num_sampled:
            sample_size = self.launcher.choose(GRAPH_SAMPLE, self.variant, plan.num_lines)
        if not self.launcher.launch_plain(plan, index, kind, self.variant, size, sample_size):
            return FAILED
        self.last.schedule_s = packed - begun
        self.last.launch_s = now() - packed
        return GOES_ON

    cdef int32_t _size(self, StepPlan plan) noexcept nogil:
        """Return the size of a plain plan's graph and set its `variant`; 0: the plan is not plain."""
        cdef const slot_t* slots = plan.lines.slot
        cdef const int32_t* computed = plan.lines.computed
        cdef const uint8_t* special = &self.special[0]
        cdef int32_t bits = 0
        cdef int32_t special_rows
        cdef int32_t row
        if plan.num_rows == 0 or plan.num_encodes or plan.num_media:
            return 0
        for row in range(plan.num_rows):
            bits |= special[slots[row]]
        special_rows = bits & ALWAYS
        if bits & PROMPT and plan.num_prompt_rows:
            for row in range(plan.num_rows):
                if computed[row] < self.scheduler.seqs.of[slots[row]].prompt_len:
                    special_rows |= special[slots[row]] & (ALWAYS | PROMPT)
        if special_rows:
            return 0
        self.variant = (bits >> VARIANT_SHIFT) | plan.lines.record[HEADER_VARIANT]
        if plan.num_sampled and self.launcher.choose(GRAPH_SAMPLE, self.variant, plan.num_lines) == 0:
            return 0
        return self.launcher.choose(
            GRAPH_DECODE if plan.num_decode_rows == plan.num_rows else GRAPH_MIXED, self.variant, plan.num_tokens
        )

    cdef int32_t _settle(self, StepPlan plan, int32_t index) noexcept nogil:
        """Wait for a step's tokens, commit them and publish the news."""
        cdef double before = self.launcher.ended_at
        cdef double waiting = now()
        cdef double done
        cdef const int32_t* tokens = self.launcher.tokens_at(index)
        self.scheduler.settler.load(plan)  # while the device computes
        self.ring.load(plan)
        if not self.launcher.await_tokens(index):
            return FAILED
        self.last.wait_s = self.launcher.ended_at - waiting
        if self.timed:
            self.clock.adapt(self.clock.expected(size_class(plan.num_tokens)), self.last.wait_s)
        self.last.device_s = self._learn(plan, self.launcher.launched_at[index], before)
        self.last.gap_s = self.launcher.gap_s
        self.last.launched_at, self.last.ended_at = self.launcher.launched_at[index], self.launcher.ended_at
        if not self._all_sampled(plan, tokens):
            self.uncommitted = index
            return INVALID
        if self._wakes(plan, tokens):
            self.uncommitted = index
            return WOKEN
        self.scheduler.settler.commit(plan, tokens, NULL)
        self.num_steps += 1
        self.freed = self.scheduler.settler.num_freed > 0 or self.scheduler.encoder.num_evicted > 0
        self._note_numbers(plan)
        done = now()
        self.last.commit_s = done - self.launcher.ended_at + self.report_s
        if not self.ring.push(plan, &self.last, self.scheduler.drafts):
            self.unpublished = index
            return RING
        self.report_s = now() - done
        return FREED if self.freed else GOES_ON

    cdef bint _all_sampled(self, StepPlan plan, const int32_t* tokens) noexcept nogil:
        """Whether each sampling row got a valid run: a token, and after each token another or the end."""
        cdef int32_t width = plan.width
        cdef int32_t missing = 0
        cdef int32_t row
        cdef int32_t k
        for row in range(plan.num_rows if width == 1 else 0):
            missing |= (plan.lines.flags[row] & ROW_SAMPLE) & (tokens[row] < 0)
        for row in range(plan.num_rows if width > 1 else 0):
            if plan.lines.flags[row] & ROW_SAMPLE:
                k = run_length(tokens + row * width, width)
                missing |= k == 0 or (k < width and tokens[row * width + k] > TOKEN_END)
        return not missing

    cdef bint _wakes(self, StepPlan plan, const int32_t* tokens) noexcept nogil:
        """Whether the run of a slot contains one of its watched tokens."""
        cdef const slot_t* slots = plan.lines.slot
        cdef int32_t row
        cdef int32_t k
        cdef int32_t place
        for row in range(plan.num_rows):
            if self.special[slots[row]] & WATCHED and plan.lines.flags[row] & ROW_SAMPLE:
                for place in range(run_length(tokens + row * plan.width, plan.width)):
                    for k in range(<int32_t>self.watched.shape[1]):
                        if self.watched[slots[row], k] == tokens[row * plan.width + place]:
                            return True
        return False

    cdef void _note_numbers(self, StepPlan plan) noexcept nogil:
        self.last.step_id = plan.step_id
        self.last.num_rows = plan.num_rows
        self.last.num_tokens = plan.num_tokens
        self.last.running = self.scheduler.running.size
        self.last.waiting = self.scheduler.queue.size
        self.last.blocks_used = self.scheduler.pool.num_used
        self.last.preemptions = self.scheduler.settler.num_preemptions
        self.last.prefix_queries = self.scheduler.planner.prefix_queries
        self.last.prefix_hits = self.scheduler.planner.prefix_hits

    cdef double _learn(self, StepPlan plan, double launched, double before) noexcept nogil:
        """Return the duration of the step just waited for. It began at its launch, or when the previous step ended."""
        cdef double took = self.launcher.ended_at - max(launched, before)
        cdef bint begun_exact = self.exact or launched >= before
        self.exact = self.clock.learn(size_class(plan.num_tokens), took, begun_exact, self.last.wait_s)
        return took
