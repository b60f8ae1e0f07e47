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

One step in `gap_every` has the time between its last kernel and the forward of the step behind it measured by two timed
events, read when that step has been waited for: what the device stood idle, and prep, which takes some microseconds of
it. For an event to lie there, the step behind is launched in its parts: the others' gap is smaller by a boundary.

wait() has no time limit, because the driver's call has none and nobody polls: a device that hangs is seen by whoever
watches this thread's beat. CUDA and HIP share the numbers used here: copy kind 1, event flags 1 (block, do not spin)
and 2 (no timing), error 600 (not ready).
"""

cimport cython
from libc.stdint cimport uintptr_t
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from _fast.layout cimport GRAPH_DECODE, GRAPH_MIXED, GRAPH_PREP, GRAPH_SAMPLE, GRAPH_STEP, HEADER_HOME, NUM_GRAPH_KINDS

cdef enum:
    TO_DEVICE = 1
    BLOCKING = 1
    NO_TIMING = 2
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
cdef class Launcher:
    """The stream, graphs and buffers of a device; every method but pick() may raise RuntimeError with the call's name.

    `calls` are the addresses that engine.kernels.target.runtime_calls() found; records, ring buffers and `device_turn`,
    the int32 on the device that says which record is next, are addresses whose memory the caller keeps alive.
    """

    def __init__(self, dict calls not None, uintptr_t compute, records, uintptr_t device_turn, token_ring,
                 int32_t max_rows):
        cdef int32_t i
        missing = [name for name in CALLS if not calls.get(name)]
        if missing:
            raise ValueError(f"the device runtime lacks {', '.join(missing)}")
        if max_rows < 1:
            raise ValueError(f"max_rows={max_rows}: a step has at least one row")
        if len(token_ring) != len(records):
            raise ValueError(f"{len(token_ring)} ring buffers for {len(records)} records: each record has its own")
        self.graph_launch = <GraphLaunch><uintptr_t>calls["GraphLaunch"]
        self.memcpy_async = <MemcpyAsync><uintptr_t>calls["MemcpyAsync"]
        self.event_create = <EventCreateWithFlags><uintptr_t>calls["EventCreateWithFlags"]
        self.event_destroy = <EventDestroy><uintptr_t>calls["EventDestroy"]
        self.event_record = <EventRecord><uintptr_t>calls["EventRecord"]
        self.event_query = <EventQuery><uintptr_t>calls["EventQuery"]
        self.event_synchronize = <EventSynchronize><uintptr_t>calls["EventSynchronize"]
        self.event_elapsed_time = <EventElapsedTime><uintptr_t>calls["EventElapsedTime"]
        self.get_error_string = <GetErrorString><uintptr_t>calls["GetErrorString"]
        self.compute = <void*>compute
        self.max_rows = max_rows
        self.num_records = _addresses(records, self.records, "records")
        _addresses([device_turn], &self.device_turn, "turns")
        _addresses(token_ring, self.ring, "ring buffers")
        self.waited_step = self.step = self.record = self.turn = self.gap_after = self.gap_before = -1
        self.gap_every = 64
        for i in range(MAX_BUFFERS):
            self.record_step[i] = self.home_step[i] = -1
        self._event(&self.passed, NO_TIMING | BLOCKING)
        self._event(&self.gap_begin, 0)
        self._event(&self.gap_end, 0)
        for i in range(self.num_records):
            self._event(&self.home[i], NO_TIMING | BLOCKING)

    def __dealloc__(self):
        cdef int32_t i
        for event in (<uintptr_t>self.passed, <uintptr_t>self.gap_begin, <uintptr_t>self.gap_end):
            if event:
                self.event_destroy(<void*><uintptr_t>event)
        for i in range(MAX_BUFFERS):
            if self.home[i]:
                self.event_destroy(self.home[i])

    # Graphs.

    def set_graph(self, int32_t kind, int32_t variant, int32_t size, uintptr_t graph):
        """A graph for up to `size` tokens or rows; `kind` and what its size counts: layout.GraphKind.

        `variant` is a field of bits. A step asks for the bits that its rows need; a part of a step that was never given
        a graph with one of them runs the same graph with and without that bit.
        """
        self._check_kind(kind, variant)
        cdef Graphs* own = &self.graphs[kind][variant]
        cdef int32_t at = own.count
        if size < 1 or graph == 0:
            raise ValueError(f"a graph of size {size} at {graph:#x}: sizes are at least 1, handles not null")
        if own.count == MAX_GRAPHS:
            raise ValueError(f"{MAX_GRAPHS} graphs of one kind and variant are the most")
        while at > 0 and own.size[at - 1] > size:
            own.size[at] = own.size[at - 1]
            own.graph[at] = own.graph[at - 1]
            at -= 1
        own.size[at] = size
        own.graph[at] = <void*>graph
        own.count += 1
        self.variant_bits[kind] |= variant
        self.variant_bits[GRAPH_STEP] |= variant  # a whole step without the bit would leave out that part's work

    def pick(self, int32_t kind, int32_t count, int32_t variant=0):
        """The smallest size that holds `count` tokens or rows; 0: launch eagerly (none does, or most is padding)."""
        self._check_kind(kind, variant)
        return self.choose(kind, variant, count)

    cdef int32_t place(self, int32_t kind, int32_t variant, int32_t count) noexcept nogil:
        """Which of the kind's graphs is the smallest that holds `count`; their count: none does."""
        cdef Graphs* own = &self.graphs[kind][variant]
        cdef int32_t low = 0
        cdef int32_t high = own.count
        cdef int32_t mid
        while low < high:
            mid = (low + high) >> 1
            if own.size[mid] < count:
                low = mid + 1
            else:
                high = mid
        return low

    cdef int32_t choose(self, int32_t kind, int32_t variant, int32_t count) noexcept nogil:
        variant &= self.variant_bits[kind]
        cdef Graphs* own = &self.graphs[kind][variant]
        cdef int32_t at = self.place(kind, variant, count)
        if at == own.count or (kind == GRAPH_MIXED and count > 64 and 4 * own.size[at] > 5 * count):
            return 0
        return own.size[at]

    cdef void* find(self, int32_t kind, int32_t variant, int32_t size) noexcept nogil:
        """The graph of exactly this size, or NULL."""
        variant &= self.variant_bits[kind]
        cdef Graphs* own = &self.graphs[kind][variant]
        cdef int32_t at = self.place(kind, variant, size)
        return own.graph[at] if at < own.count and own.size[at] == size else NULL

    # The parts of a step, in their order. Only what waits gives the GIL away: beside a busy thread it comes back late.

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
        self._check_kind(kind, variant)
        graph = self.find(kind, variant, size)
        if graph == NULL:
            raise ValueError(f"there is no graph of kind {kind} and size {size}; pick() gives the sizes there are")
        if not self.launch_graph(graph):
            self._raise()

    def finish(self):
        """All of the newest step has been launched, by whatever means: wait() says when its tokens are there."""
        if self.step < 0:
            raise ValueError("no step was begun: there is none to finish")
        if not self.record_done():
            self._raise()

    def launch(self, StepPlan plan not None, int32_t record_index, int32_t kind, int32_t size, int32_t sample_size,
               int32_t variant=0):
        """A whole plain step: prep, forward, sample (0: no row does); one graph for all where there is one."""
        self._check_plan(plan, record_index)
        self._check_kind(kind, variant)
        if self.find(kind, variant, size) == NULL or (
            sample_size and self.find(GRAPH_SAMPLE, variant, sample_size) == NULL
        ):
            raise ValueError(f"no graphs for kind {kind}, size {size}, sample size {sample_size}; pick() knows them")
        if not self.launch_plain(plan, record_index, kind, variant, size, sample_size):
            self._raise()

    def wait(self, int32_t record_index, double timeout_s):
        """Blocks until the tokens of the record's step are home. False: they are there, but later than timeout_s."""
        cdef bint done
        cdef double begun = now()
        self._check_index("record", record_index, self.num_records)
        if self.home_step[record_index] < 0:
            raise ValueError(f"no step of record {record_index} was launched: finish() comes before wait()")
        with nogil:
            done = self.await_tokens(record_index)
        if not done:
            self._raise()
        return self.ended_at - begun <= timeout_s

    def measure_gaps(self, int32_t every):
        """Has the gap behind one step in `every` measured; 64 at first, which costs next to nothing."""
        if every < 1:
            raise ValueError(f"every={every}: one step in at least 1 is measured")
        self.gap_every = every

    def launched_at_of(self, int32_t record_index):
        """When the step in this record was begun, in seconds of time.perf_counter."""
        self._check_index("record", record_index, self.num_records)
        return self.launched_at[record_index]

    def done(self, int32_t record_index):
        """True when wait() would return at once."""
        cdef int code
        self._check_index("record", record_index, self.num_records)
        code = self.event_query(self.home[record_index])
        if code != 0 and code != NOT_READY:
            self.ok(EVENT_QUERY, code)
            self._raise()
        return code == 0

    # The same without the GIL. False: a call failed, and _raise() says which.

    cdef bint await_read(self, int32_t record) noexcept nogil:
        if self.record_step[record] <= self.waited_step:
            return True
        # Nobody has waited for the step that it held: its prep may still be about to read it.
        return (
            self.ok(EVENT_RECORD, self.event_record(self.passed, self.compute))
            and self.ok(EVENT_SYNCHRONIZE, self.event_synchronize(self.passed))
        )

    cdef bint launch_prep(self, StepPlan plan, int32_t record) noexcept nogil:
        return self.launch_reader(self.graphs[GRAPH_PREP][0].graph[0], plan, record) and self.mark_begin()

    cdef bint launch_reader(self, void* graph, StepPlan plan, int32_t record) noexcept nogil:
        """A graph that begins with prep, for the plan in this record."""
        cdef int32_t* number = <int32_t*>self.records[record] + HEADER_HOME
        self.launched_at[record] = now()
        self.record = record
        self.step = self.record_step[record] = plan.step_id
        if record != self.turn and not self.ok(
            MEMCPY_ASYNC,
            self.memcpy_async(self.device_turn, number, sizeof(int32_t), TO_DEVICE, self.compute),
        ):
            return False
        self.turn = -1  # a launch that fails may have run or not
        if not self.launch_graph(graph):
            return False
        self.turn = record + 1 if record + 1 < self.num_records else 0
        return True

    cdef bint ends_gap(self, int64_t step) noexcept nogil:
        """The end of the step before was marked, and it is still in flight."""
        return self.gap_after >= 0 and self.gap_after == step - 1 and self.gap_after > self.waited_step

    cdef bint mark_begin(self) noexcept nogil:
        """The forward begins: the end of a gap, maybe."""
        if not self.ends_gap(self.step):
            return True
        self.gap_before = self.step
        return self.ok(EVENT_RECORD, self.event_record(self.gap_end, self.compute))

    cdef bint mark_end(self) noexcept nogil:
        """The step's tokens are chosen: the beginning of a gap, for some steps."""
        # Not while the gap before is unread: an event that is recorded again has not been reached.
        if (self.step + 1) % self.gap_every or self.gap_before > self.waited_step:
            return True
        self.gap_after = self.step
        return self.ok(EVENT_RECORD, self.event_record(self.gap_begin, self.compute))

    cdef bint measure_gap(self) noexcept nogil:
        """Of a step that has been waited for: both events have been reached."""
        cdef float milliseconds = 0.0
        if not self.ok(EVENT_ELAPSED_TIME, self.event_elapsed_time(&milliseconds, self.gap_begin, self.gap_end)):
            return False
        self.gap_s = 1e-3 * <double>milliseconds
        return True

    cdef bint launch_graph(self, void* graph) noexcept nogil:
        return self.ok(GRAPH_LAUNCH, self.graph_launch(graph, self.compute))

    cdef bint record_done(self) noexcept nogil:
        """Behind everything of the newest step."""
        self.home_step[self.record] = self.step
        return self.mark_end() and self.ok(EVENT_RECORD, self.event_record(self.home[self.record], self.compute))

    cdef bint launch_plain(self, StepPlan plan, int32_t record, int32_t kind, int32_t variant,
                           int32_t size, int32_t sample_size) noexcept nogil:
        """Sizes of graphs there are; sample_size 0: no row samples."""
        cdef void* whole = NULL
        if kind == GRAPH_DECODE and plan.num_sampled == plan.num_rows and not self.ends_gap(plan.step_id):
            whole = self.find(GRAPH_STEP, variant, size)
        if whole:
            return self.launch_reader(whole, plan, record) and self.record_done()
        if not (self.launch_prep(plan, record) and self.launch_graph(self.find(kind, variant, size))):
            return False
        if sample_size and not self.launch_graph(self.find(GRAPH_SAMPLE, variant, sample_size)):
            return False
        return self.record_done()

    cdef bint await_tokens(self, int32_t record) noexcept nogil:
        if not self.ok(EVENT_SYNCHRONIZE, self.event_synchronize(self.home[record])):
            return False
        self.ended_at = now()
        self.gap_s = 0.0
        if self.home_step[record] == self.gap_before and not self.measure_gap():
            return False
        self.waited_step = max(self.waited_step, self.home_step[record])
        return True

    cdef const int32_t* tokens_at(self, int32_t record) noexcept nogil:
        return <const int32_t*>self.ring[record]

    # Faults.

    cdef bint ok(self, int call, int code) noexcept nogil:
        """Notes what a call (its place in CALLS) returned; True when that was success."""
        if code:
            self.failed_call = call
            self.failed_code = code
        return code == 0

    cdef _raise(self):
        cdef const char* text = self.get_error_string(self.failed_code)
        words = f" ({text.decode('utf-8', 'replace')})" if text else ""
        raise RuntimeError(f"{CALLS[self.failed_call]} returned {self.failed_code}{words}")

    cdef _event(self, void** event, unsigned int flags):
        if not self.ok(EVENT_CREATE, self.event_create(event, flags)):
            event[0] = NULL
            self._raise()

    cdef _check_index(self, str what, int32_t index, int32_t count):
        if not 0 <= index < count:
            raise ValueError(f"{what} {index}: there are 0 to {count - 1}")

    cdef _check_kind(self, int32_t kind, int32_t variant):
        self._check_index("kind", kind, NUM_GRAPH_KINDS)
        self._check_index("variant", variant, NUM_VARIANTS)

    def _check_plan(self, StepPlan plan, int32_t record_index):
        self._check_index("record", record_index, self.num_records)
        if <void*>&plan.record[0] != self.records[record_index]:
            raise ValueError(f"the plan does not lie in record {record_index}")
        if plan.number != record_index:
            raise ValueError(f"the plan's number is {plan.number}: its tokens would not go home to {record_index}")
        if plan.num_rows < 1 or plan.num_rows > self.max_rows:
            raise ValueError(f"the plan has {plan.num_rows} rows: a step has 1 to {self.max_rows}")
        if self.graphs[GRAPH_PREP][0].count == 0:
            raise ValueError("there is no prep graph; set_graph() comes before steps")
