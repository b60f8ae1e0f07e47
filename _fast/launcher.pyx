"""Launcher: the device runtime's calls of one step, made through C function pointers without the GIL.

Owner: the device thread, on whose current device the events are created. In: a sealed plan in its pinned record, the
handles of captured graphs. Out: tokens in pinned buffers. There is one stream, and nothing is copied on it:

    record n (pinned) <--reads-- prep | forward | sample --writes--> ring buffer n (pinned), then the event `home`

A plain decode step is one graph, for each boundary between graphs costs the device some microseconds and the host as
many: a launch and the event are all its calls. Others are prep, forward and sample, which are graphs of their own.
Whatever samples ends by writing the tokens into the pinned buffer that has the number of the step's record. Prep,
wherever it runs, counts on the device which record is next, as `turn` does here. Where the two may differ, at first
and after a step that was planned and not launched, the record's own number is copied over the device's.

One rule lives here and nowhere else: a record may be rewritten when the prep that reads it has run (wait_until_read).
That is known for free once a wait() for its step or a later one has returned; what was launched and never waited for
(its step failed) costs an extra event.

The runtime's functions are in device_calls, the graphs of each size in graph_table; gap_clock measures how long the
device stands idle between steps. wait() has no time limit, because the driver's call has none and nothing polls: the
watch over this thread's beat (engine/base/stall.py) notices a device that hangs.
"""

cimport cython
from libc.stdint cimport uintptr_t
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from _fast.device_calls cimport BLOCKING, NO_TIMING
from _fast.layout cimport GRAPH_DECODE, GRAPH_SAMPLE, GRAPH_STEP, HEADER_HOME

cdef enum:
    MEASURED = 64  # one step in so many has its gap measured, which costs next to nothing


cdef double now() noexcept nogil:
    """Seconds of time.perf_counter()."""
    cdef timespec at
    clock_gettime(CLOCK_MONOTONIC, &at)
    return <double>at.tv_sec + 1e-9 * <double>at.tv_nsec


cdef int _addresses(object values, void** into, str what) except -1:
    """Copies a list of addresses; returns how many."""
    cdef int count = 0
    if not 1 <= len(values) <= MAX_BUFFERS:
        raise ValueError(f"{len(values)} {what}: a launcher holds 1 to {MAX_BUFFERS}")
    for value in values:
        if not value:
            raise ValueError(f"an address of {what} is null")
        into[count] = <void*><uintptr_t>value
        count += 1
    return count


@cython.final
@cython.no_gc_clear  # the events go by `calls`
cdef class Launcher:
    """The stream, graphs and buffers of a device; every method but pick() may raise RuntimeError with the call's name.

    `calls` are the addresses that engine.kernels.target.runtime_calls() found; records, ring buffers and `device_turn`,
    the int32 on the device that says which record is next, are addresses whose memory the caller keeps alive.
    """

    def __init__(self, dict calls not None, uintptr_t compute, records, uintptr_t device_turn, token_ring,
                 int32_t max_rows):
        cdef int32_t i
        cdef void* ring[MAX_BUFFERS]
        if max_rows < 1:
            raise ValueError(f"max_rows={max_rows}: a step has at least one row")
        if len(token_ring) != len(records):
            raise ValueError(f"{len(token_ring)} ring buffers for {len(records)} records: each record has its own")
        self.calls = DeviceCalls(calls, compute)
        self.graphs = GraphTable()
        self.max_rows = max_rows
        self.num_records = _addresses(records, self.records, "records")
        _addresses([device_turn], &self.turn.counted, "turns")
        _addresses(token_ring, ring, "ring buffers")
        self.waited_step = self.record = self.turn.next = -1
        for i in range(MAX_BUFFERS):
            self.record_step[i] = self.home[i].step = -1
        self.gaps = GapClock(self.calls, MEASURED)
        self.calls.create(&self.passed, NO_TIMING | BLOCKING)
        for i in range(self.num_records):
            self.home[i].tokens = ring[i]
            self.calls.create(&self.home[i].event, NO_TIMING | BLOCKING)

    def __dealloc__(self):
        cdef int32_t i
        if self.calls is None:
            return
        self.calls.destroy(self.passed)
        for i in range(MAX_BUFFERS):
            self.calls.destroy(self.home[i].event)

    # Graphs.

    def set_graph(self, int32_t kind, int32_t variant, int32_t size, uintptr_t graph):
        """A graph for up to `size` tokens or rows; kinds and variants as graph_table has them."""
        self.graphs.check(kind, variant)
        self.graphs.add(kind, variant, size, <void*>graph)

    def pick(self, int32_t kind, int32_t count, int32_t variant=0):
        """The smallest size that holds `count` tokens or rows; 0: launch eagerly (none does, or most is padding)."""
        self.graphs.check(kind, variant)
        return self.graphs.choose(kind, variant, count)

    cdef int32_t choose(self, int32_t kind, int32_t variant, int32_t count) noexcept nogil:
        """The same without the GIL and without checks."""
        return self.graphs.choose(kind, variant, count)

    # The parts of a step, in order. Only waits release the GIL: with another thread busy, taking it again is slow.

    def wait_until_read(self, int32_t record_index):
        """Before schedule() rewrites the record: returns when the prep that read it has run."""
        cdef bint done
        self._check_index("record", record_index, self.num_records)
        if self.record_step[record_index] <= self.waited_step:
            return  # as nearly always
        with nogil:
            done = self.await_read(record_index)
        if not done:
            self._raise()

    def prep(self, StepPlan plan not None, int32_t record_index):
        """Begins the plan's step: launches the prep graph, which reads the plan's record."""
        self._check_plan(plan, record_index)
        if not self.launch_prep(plan, record_index):
            self._raise()

    def replay(self, int32_t kind, int32_t size, int32_t variant=0):
        """Launches the graph of exactly this size: a forward, or the choice of tokens."""
        cdef void* graph
        self.graphs.check(kind, variant)
        graph = self.graphs.find(kind, variant, size)
        if graph == NULL:
            raise ValueError(f"there is no graph of kind {kind} and size {size}; pick() gives the sizes there are")
        if not self.calls.launch(graph):
            self._raise()

    def finish(self):
        """All of the newest step has been launched, by whatever means: wait() says when its tokens are there."""
        if self.record < 0:
            raise ValueError("no step was begun: there is none to finish")
        if not self.record_done():
            self._raise()

    def launch(self, StepPlan plan not None, int32_t record_index, int32_t kind, int32_t size, int32_t sample_size,
               int32_t variant=0):
        """A whole plain step: prep, forward, sample (0: no row does); one graph for all where there is one."""
        self._check_plan(plan, record_index)
        self.graphs.check(kind, variant)
        if self.graphs.find(kind, variant, size) == NULL or (
            sample_size and self.graphs.find(GRAPH_SAMPLE, variant, sample_size) == NULL
        ):
            raise ValueError(f"no graphs for kind {kind}, size {size}, sample size {sample_size}; pick() knows them")
        if not self.launch_plain(plan, record_index, kind, variant, size, sample_size):
            self._raise()

    def wait(self, int32_t record_index, double timeout_s):
        """Blocks until the tokens of the record's step are home. False: they are there, but later than timeout_s."""
        cdef bint done
        cdef double begun = now()
        self._check_index("record", record_index, self.num_records)
        if self.home[record_index].step < 0:
            raise ValueError(f"no step of record {record_index} was launched: finish() comes before wait()")
        with nogil:
            done = self.await_tokens(record_index)
        if not done:
            self._raise()
        return self.ended_at - begun <= timeout_s

    def measure_gaps(self, int32_t every):
        """Has the gap behind one step in `every` measured; 64 at first, which costs next to nothing."""
        self.gaps.set_every(every)

    @property
    def gap_every(self):
        """One step in so many has the gap behind it measured."""
        return self.gaps.every

    def launched_at_of(self, int32_t record_index):
        """When the step in this record was begun, in seconds of time.perf_counter."""
        self._check_index("record", record_index, self.num_records)
        return self.launched_at[record_index]

    def done(self, int32_t record_index):
        """True when wait() would return at once."""
        cdef int reached
        self._check_index("record", record_index, self.num_records)
        reached = self.calls.reached(self.home[record_index].event)
        if reached < 0:
            self._raise()
        return reached == 1

    # The same without the GIL. False: a call failed, and _raise() says which.

    cdef bint await_read(self, int32_t record) noexcept nogil:
        """Until the prep that read the record has run."""
        if self.record_step[record] <= self.waited_step:
            return True
        # The step that it held was never waited for: its prep may still be about to read it.
        return self.calls.mark(self.passed) and self.calls.await_event(self.passed)

    cdef bint launch_prep(self, StepPlan plan, int32_t record) noexcept nogil:
        """Prep by itself; the step's forward follows."""
        if not self.launch_reader(self.graphs.prep(), plan, record):
            return False
        return self.gaps.mark_begin(plan.step_id, self.waited_step)

    cdef bint launch_reader(self, void* graph, StepPlan plan, int32_t record) noexcept nogil:
        """A graph that begins with prep, for the plan in this record."""
        cdef int32_t* number = <int32_t*>self.records[record] + HEADER_HOME
        self.launched_at[record] = now()
        self.record = record
        self.record_step[record] = plan.step_id
        if record != self.turn.next and not self.calls.send(self.turn.counted, number, sizeof(int32_t)):
            return False
        self.turn.next = -1  # a launch that fails may have run or not
        if not self.calls.launch(graph):
            return False
        self.turn.next = record + 1 if record + 1 < self.num_records else 0
        return True

    cdef bint record_done(self) noexcept nogil:
        """Behind everything of the newest step."""
        cdef Home* home = &self.home[self.record]
        home.step = self.record_step[self.record]
        return self.gaps.mark_end(home.step, self.waited_step) and self.calls.mark(home.event)

    cdef bint launch_plain(self, StepPlan plan, int32_t record, int32_t kind, int32_t variant,
                           int32_t size, int32_t sample_size) noexcept nogil:
        """Sizes of graphs there are; sample_size 0: no row samples."""
        cdef void* whole = NULL
        cdef bint measured = self.gaps.ends(plan.step_id, self.waited_step)
        if kind == GRAPH_DECODE and plan.num_sampled == plan.num_rows and not measured:
            whole = self.graphs.find(GRAPH_STEP, variant, size)
        if whole:
            return self.launch_reader(whole, plan, record) and self.record_done()
        if not (self.launch_prep(plan, record) and self.calls.launch(self.graphs.find(kind, variant, size))):
            return False
        if sample_size and not self.calls.launch(self.graphs.find(GRAPH_SAMPLE, variant, sample_size)):
            return False
        return self.record_done()

    cdef bint await_tokens(self, int32_t record) noexcept nogil:
        """Until the tokens of the record's step are home."""
        if not self.calls.await_event(self.home[record].event):
            return False
        self.ended_at = now()
        if not self.gaps.measure(self.home[record].step, &self.gap_s):
            return False
        self.waited_step = max(self.waited_step, self.home[record].step)
        return True

    cdef const int32_t* tokens_at(self, int32_t record) noexcept nogil:
        """The ring buffer of the record: its step's tokens, once they are home."""
        return <const int32_t*>self.home[record].tokens

    # Faults.

    cdef _raise(self):
        """RuntimeError with the call that failed."""
        self.calls.raise_failed()

    cdef _check_index(self, str what, int32_t index, int32_t count):
        if not 0 <= index < count:
            raise ValueError(f"{what} {index}: there are 0 to {count - 1}")

    def _check_plan(self, StepPlan plan, int32_t record_index):
        self._check_index("record", record_index, self.num_records)
        if <void*>&plan.record[0] != self.records[record_index]:
            raise ValueError(f"the plan does not lie in record {record_index}")
        if plan.number != record_index:
            raise ValueError(f"the plan's number is {plan.number}: its tokens would not go home to {record_index}")
        if plan.num_rows < 1 or plan.num_rows > self.max_rows:
            raise ValueError(f"the plan has {plan.num_rows} rows: a step has 1 to {self.max_rows}")
        if self.graphs.prep() == NULL:
            raise ValueError("there is no prep graph; set_graph() comes before steps")
