"""Launcher: makes a step's calls of the device runtime, through C function pointers and without the GIL.

Owner: the device thread, on whose current device the events are created. In: a sealed plan in its pinned record, the
handles of captured graphs. Out: tokens in pinned buffers. Each rank has one stream, and nothing is copied on it:

    record n (pinned) <--reads-- prep | passes | forward | sample --writes--> ring buffer n (pinned), then event `home`

A plain decode step is one graph, because each boundary between graphs costs the device and the host some microseconds;
its only calls are the launch and the event. Other steps run prep, forward and sample as separate graphs, and those with
drafts as many passes of a drafter as they need. Every sampling graph ends by writing the tokens into the pinned buffer
that has the number of the step's record. Prep advances a counter on the device that selects the next record, and `turn`
mirrors it here. If the two may differ (at the start, and after a step that was planned but not launched), the record's
number is copied over the device's counter.

Only this file implements this rule: a record may be rewritten when the preps that read it have run (wait_until_read).
This is known without cost once a wait() for its step or a later step has returned; a step that was launched but never
waited for (it failed) costs an extra event. All ranks read the same record, and a step's tokens depend on every rank's
forward, so the event after the first rank's last kernel is enough. Each call launches on all ranks, in rank order,
before the next call: a launch that blocks until earlier work has run never waits for work that is not launched yet.

device_calls has the runtime's functions, graph_table the graphs by size, and gap_clock measures how long the device is
idle between steps. wait() has no time limit, because the driver's call has none and nothing polls. The watchdog of this
thread (engine/base/stall.py) detects a device that hangs.
"""

cimport cython
from libc.stdint cimport uintptr_t
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from _fast.device_calls cimport BLOCKING, NO_TIMING
from _fast.layout cimport GRAPH_DECODE, GRAPH_DRAFT, GRAPH_FURTHER, GRAPH_SAMPLE, GRAPH_STEP, HEADER_HOME

cdef enum:
    MEASURED = 64  # the gap of one step in MEASURED is measured, at almost no cost


cdef double now() noexcept nogil:
    """Return the time in seconds of time.perf_counter()."""
    cdef timespec at
    clock_gettime(CLOCK_MONOTONIC, &at)
    return <double>at.tv_sec + 1e-9 * <double>at.tv_nsec


cdef int _addresses(object values, void** into, str what) except -1:
    """Copy a list of addresses; return their number."""
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
@cython.no_gc_clear  # `calls` destroys the events
cdef class Launcher:
    """The stream, graphs and buffers of a device; all methods but pick() may raise RuntimeError with the call's name.

    `calls` are the addresses from engine.kernels.target.runtime_calls(). `device_turn` is the device's int32 counter of
    the next record. The caller keeps the memory of records, ring buffers and `device_turn` alive.
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
        _addresses([device_turn], self.turn.counted, "turns")
        _addresses(token_ring, ring, "ring buffers")
        self.waited_step = self.record = self.turn.next = -1
        for i in range(MAX_BUFFERS):
            self.record_step[i] = self.home[i].step = -1
        self.gaps = GapClock(self.calls, MEASURED)
        self.calls.create(&self.passed[0], NO_TIMING | BLOCKING)
        for i in range(self.num_records):
            self.home[i].tokens = ring[i]
            self.calls.create(&self.home[i].event, NO_TIMING | BLOCKING)

    def __dealloc__(self):
        cdef int32_t i
        if self.calls is None:
            return
        for i in range(MAX_RANKS):
            self.calls.destroy(self.passed[i])
        for i in range(MAX_BUFFERS):
            self.calls.destroy(self.home[i].event)

    # Graphs.

    def add_rank(self, uintptr_t compute, uintptr_t device_turn):
        """Add the next rank's stream and counter; its device is current, and no graph has been set."""
        cdef int32_t rank = self.calls.num_ranks
        if self.graphs.prep() != NULL:
            raise ValueError("ranks are added before graphs, which every rank has")
        self.calls.add_stream(compute)
        _addresses([device_turn], &self.turn.counted[rank], "turns")
        self.calls.create(&self.passed[rank], NO_TIMING | BLOCKING)

    def watch(self, uintptr_t error):
        """Watch an int32 in pinned memory that the ranks' kernels set when they have waited in vain for each other."""
        self.calls.waited_in_vain = <const int32_t*>error

    def set_graph(self, int32_t kind, int32_t variant, int32_t size, *graphs):
        """Add each rank's graph for up to `size` tokens or rows; kinds and variants as in graph_table."""
        cdef void* handles[MAX_RANKS]
        cdef int32_t rank
        self.graphs.check(kind, variant)
        if len(graphs) != self.calls.num_ranks:
            raise ValueError(f"{len(graphs)} graphs for {self.calls.num_ranks} ranks: each rank has its own")
        for rank in range(self.calls.num_ranks):
            handles[rank] = <void*><uintptr_t>graphs[rank]
        self.graphs.add(kind, variant, size, handles, self.calls.num_ranks)

    def pick(self, int32_t kind, int32_t count, int32_t variant=0):
        """Return the smallest size for `count` tokens or rows; 0: launch eagerly (none, or too much padding)."""
        self.graphs.check(kind, variant)
        return self.graphs.choose(kind, variant, count)

    cdef int32_t choose(self, int32_t kind, int32_t variant, int32_t count) noexcept nogil:
        """Like pick(), without the GIL and without checks."""
        return self.graphs.choose(kind, variant, count)

    # The parts of a step, in order. Only waits release the GIL: if another thread is busy, reacquiring it is slow.

    def wait_until_read(self, int32_t record_index):
        """Wait until the prep that read the record has run; called before schedule() rewrites the record."""
        cdef bint done
        self._check_index("record", record_index, self.num_records)
        if self.record_step[record_index] <= self.waited_step:
            return  # almost always
        with nogil:
            done = self.await_read(record_index)
        if not done:
            self._raise()

    def prep(self, StepPlan plan not None, int32_t record_index):
        """Begin the plan's step: launch the prep graph, which reads the plan's record, and passes of a drafter."""
        self._check_plan(plan, record_index)
        if not self.launch_prep(plan, record_index):
            self._raise()

    def replay(self, int32_t kind, int32_t size, int32_t variant=0):
        """Launch the graph of exactly this size: a forward, or the choice of tokens."""
        cdef void** graphs
        self.graphs.check(kind, variant)
        graphs = self.graphs.find(kind, variant, size)
        if graphs == NULL:
            raise ValueError(f"there is no graph of kind {kind} and size {size}; pick() gives the sizes there are")
        if not self.calls.launch(graphs):
            self._raise()

    def finish(self):
        """Record the event for wait(), after all parts of the newest step were launched by any means."""
        if self.record < 0:
            raise ValueError("no step was begun: there is none to finish")
        if not self.record_done():
            self._raise()

    def launch(self, StepPlan plan not None, int32_t record_index, int32_t kind, int32_t size, int32_t sample_size,
               int32_t variant=0):
        """Launch a whole plain step: prep, forward, sample (size 0: no row samples); as one graph if there is one."""
        self._check_plan(plan, record_index)
        self.graphs.check(kind, variant)
        if self.graphs.find(kind, variant, size) == NULL or (
            sample_size and self.graphs.find(GRAPH_SAMPLE, variant, sample_size) == NULL
        ):
            raise ValueError(f"no graphs for kind {kind}, size {size}, sample size {sample_size}; pick() knows them")
        if not self.launch_plain(plan, record_index, kind, variant, size, sample_size):
            self._raise()

    def wait(self, int32_t record_index, double timeout_s):
        """Wait until the tokens of the record's step are on the host. False: this took longer than timeout_s."""
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
        """Measure the gap after one step in `every`; initially 64, at almost no cost."""
        self.gaps.set_every(every)

    @property
    def gap_every(self):
        """The gap after one step in `gap_every` is measured."""
        return self.gaps.every

    def launched_at_of(self, int32_t record_index):
        """Return when the step in this record was begun, in seconds of time.perf_counter."""
        self._check_index("record", record_index, self.num_records)
        return self.launched_at[record_index]

    def done(self, int32_t record_index):
        """Whether wait() would return at once."""
        cdef int reached
        self._check_index("record", record_index, self.num_records)
        reached = self.calls.reached(self.home[record_index].event)
        if reached < 0:
            self._raise()
        return reached == 1

    # The same without the GIL. False: a call failed; _raise() names the call.

    cdef bint await_read(self, int32_t record) noexcept nogil:
        """Wait until the prep that read the record has run."""
        if self.record_step[record] <= self.waited_step:
            return True
        # The record's step was never waited for: its prep may not have read the record yet.
        return self.calls.await_all(self.passed)

    cdef bint launch_prep(self, StepPlan plan, int32_t record) noexcept nogil:
        """Launch prep, and the drafter's passes; the step's forward follows."""
        if not self.launch_reader(self.graphs.prep(), plan, record):
            return False
        return self.gaps.mark_begin(plan.step_id, self.waited_step) and self.launch_passes(plan)

    cdef bint launch_passes(self, StepPlan plan) noexcept nogil:
        """Launch the recorded passes of a drafter: as many as a row of the plan has drafts, at most."""
        cdef int32_t size = self.graphs.choose(GRAPH_DRAFT, 0, plan.num_drafted)
        cdef void** graphs
        cdef int32_t number
        for number in range(plan.depth if size else 0):
            graphs = self.graphs.find(GRAPH_FURTHER if number else GRAPH_DRAFT, 0, size)
            if graphs == NULL:  # all drafts of a row follow from the first pass
                break
            if not self.calls.launch(graphs):
                return False
        return True

    cdef bint launch_reader(self, void** graphs, StepPlan plan, int32_t record) noexcept nogil:
        """Launch a graph that begins with prep, for the plan in this record."""
        cdef int32_t* number = <int32_t*>self.records[record] + HEADER_HOME
        self.launched_at[record] = now()
        self.record = record
        self.record_step[record] = plan.step_id
        if record != self.turn.next and not self.calls.send(self.turn.counted, number, sizeof(int32_t)):
            return False
        self.turn.next = -1  # a failed launch may or may not have run
        if not self.calls.launch(graphs):
            return False
        self.turn.next = record + 1 if record + 1 < self.num_records else 0
        return True

    cdef bint record_done(self) noexcept nogil:
        """Record the events after all parts of the newest step."""
        cdef Home* home = &self.home[self.record]
        home.step = self.record_step[self.record]
        return self.gaps.mark_end(home.step, self.waited_step) and self.calls.mark(home.event)

    cdef bint launch_plain(self, StepPlan plan, int32_t record, int32_t kind, int32_t variant,
                           int32_t size, int32_t sample_size) noexcept nogil:
        """Launch a plain step; graphs of these sizes must exist; sample_size 0: no row samples."""
        cdef void** whole = NULL
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
        """Wait until the tokens of the record's step are on the host."""
        if not self.calls.await_event(self.home[record].event):
            return False
        self.ended_at = now()
        if not self.calls.ranks_agree():
            return False
        if not self.gaps.measure(self.home[record].step, &self.gap_s):
            return False
        self.waited_step = max(self.waited_step, self.home[record].step)
        return True

    cdef const int32_t* tokens_at(self, int32_t record) noexcept nogil:
        """Return the ring buffer of the record, which holds its step's tokens once they are on the host."""
        return <const int32_t*>self.home[record].tokens

    # Faults.

    cdef _raise(self):
        """Raise RuntimeError with the failed call."""
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
