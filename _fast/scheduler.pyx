"""Scheduler, on integers: schedule() plans a step, commit() settles it; two steps may be in flight.

Owner: the device thread. In: requests (tokens, keys, limits, media spans), aborts, sampled tokens. Out: a StepPlan
per step, tokens and finish reasons per row, slots freed, media entries evicted.
There is no prefill or decode phase: a row has known tokens and computed tokens, and a step reduces the difference:

    schedule(N+1)      launched behind N     commit(N)                     schedule(N+2) ...
    plans with N's     (device runs steps    N's tokens known: lengths,    sees what commit(N) freed
    samples pending    in order)             stops, names, freed blocks

A row whose newest token is still on the device is planned with FEED. A row that ends in commit(N) while N+1 includes it
keeps its slot until commit(N+1); its blocks are free at once, because no earlier plan can write to them later.
planner.pyx makes plans, settle.pyx applies the changes of settled steps.
"""

cimport cython

from _fast.layout import new_runs

from _fast.states cimport STATES_ALIGN, STATES_NONE
from _fast.types cimport FINISHING, IDLE_PRIORITY, MAX_IN_FLIGHT, MEDIA_TOO_LARGE, NEVER_FITS, NO_SLOT, WAITING, uint8_t

IDLE = IDLE_PRIORITY  # the priority of a request that runs only while no other request needs its place


@cython.final
cdef class Scheduler:
    """Slots, queue, blocks and media entries of one engine; the module's docstring has the order of calls."""

    def __init__(self, *, int32_t max_slots, int32_t max_rows, int32_t max_tokens, int32_t max_model_len,
                 int32_t num_blocks, int32_t block_size, groups=((0, 0),), bint prefix_caching=True,
                 bytes hash_key=bytes(16), int32_t policy=0, int32_t max_chunk=0, int32_t encoder_budget=0,
                 int32_t encoder_capacity=0, int hash_bits=128, int64_t first_step=0, bint whole_prompts=False,
                 int32_t state_blocks=0, int32_t tail_blocks=0, int32_t state_mode=STATES_ALIGN,
                 int32_t state_every=1024, double state_share=0.25, int32_t max_lines=0x7FFFFFFF):
        """state_blocks, tail_blocks: blocks per run, for a model with groups of states; all groups share the runs.

        state_mode: which states are named (states.NONE, ALIGN, ALL: every `state_every` tokens); state_share: largest
        share of the blocks for idle states. max_lines: most places of a step for which a token is chosen.
        """
        if max_rows < 1 or max_slots < max_rows or max_tokens < max_rows:
            raise ValueError(
                f"max_slots={max_slots}, max_rows={max_rows}, max_tokens={max_tokens}: rows are at least 1, and "
                "there are at least as many slots, and tokens in a step, as rows"
            )
        if max_model_len < 2 or block_size < 1 or max_chunk < 0:
            raise ValueError(
                f"max_model_len={max_model_len}, block_size={block_size}, max_chunk={max_chunk}: need at least 2, 1, 0"
            )
        if policy not in (0, 1):
            raise ValueError(f"policy={policy}: 0 is first come, first served; 1 is by priority")
        max_chunk = min(max_chunk, max_tokens) if max_chunk else max_tokens
        if whole_prompts and max_chunk < max_model_len:
            raise ValueError(f"a step takes {max_chunk} tokens of a prompt: whole ones have up to {max_model_len}")
        self.max_slots = max_slots
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        self.max_model_len = max_model_len
        if not 0.0 <= state_share <= 1.0:
            raise ValueError(f"state_share={state_share}: a part of the blocks, from 0 to 1")
        if state_mode == STATES_NONE and state_blocks:  # without named states no prefix can be found
            prefix_caching = False
        self.pool = BlockPool(num_blocks, state_blocks, tail_blocks, max_slots if state_blocks else 0)
        self.index = PrefixIndex(num_blocks if prefix_caching else 2, block_size, hash_key, hash_bits)
        self.seqs = SeqTable(max_slots)
        self.tables = BlockTables(self.pool, self.index, self.seqs, list(groups), block_size, max_model_len,
                                  max_chunk, prefix_caching, new_runs(max_rows), state_mode, state_every, state_share)
        by_priority = policy == 1
        self.queue = WaitQueue(max_slots, by_priority, whole_prompts)
        self.encoder = EncoderTable(encoder_budget, encoder_capacity)
        self.running = RunningRows(self.seqs, by_priority)
        self.shares = TokenShares(self.seqs, self.running, self.queue, self.tables, max_tokens, max_chunk)
        self.drafts = Drafts(self.seqs, self.running, self.tables, self.shares, max_lines, max_rows)
        self.settler = Settler(self.seqs, self.tables, self.running, self.queue, self.encoder,
                               self.drafts, first_step - 1)
        self.planner = Planner(self.seqs, self.tables, self.queue, self.encoder, self.running, self.shares,
                               self.drafts, self.settler, max_rows, whole_prompts, first_step)

    # Requests.

    def add(self, int64_t request_id, const token_t[::1] tokens, *, int32_t max_tokens, int32_t min_tokens=0,
            bint ignore_eos=False, eos_ids=(), stop_ids=(), int32_t priority=0, double arrival=0.0,
            bytes root=bytes(16), const int64_t[:, ::1] keys=None, const int32_t[:, ::1] media=None,
            const int32_t[:, ::1] bi_spans=None, bint read_cache=True, bint traced=False,
            int32_t flow=0, int32_t weight=1, double deadline=float("inf"), boundaries=(), uint8_t drafts=0):
        """Add a request to the queue: return its slot, or -1 (no slot free), -2 (too few blocks), -3 (media too large).

        bi_spans: [m, 2], start and end of positions that one step computes. traced: all tokens are computed, and
        `freed_lens` has their number. flow: requests with equal flow wait in one line, with a share of `weight`.
        deadline: of the first step. boundaries: at most 8 prompt lengths after which other requests may differ.
        drafts: most drafts that a step verifies for the request.
        """
        cdef int64_t n = tokens.shape[0]
        cdef int64_t longest = self._longest(n, max_tokens, min_tokens, traced)
        self.queue.check_flow(flow, weight)
        if request_id < 0 or len(root) != 16 or (keys is not None and (keys.shape[0] != 2 or keys.shape[1] != n)):
            raise ValueError(f"request {request_id}: ids are >= 0, root has 16 bytes, keys have the shape [2, {n}]")
        if media is not None and media.shape[0]:
            media_end = self._media_end(media, n)
            if media_end > n:  # tokens of the answer take rows, too, so their number is limited
                longest = min(longest, media_end)
            need = self.encoder.largest_need(media)
            if self.encoder.capacity and need > self.encoder.capacity:
                return MEDIA_TOO_LARGE
        if bi_spans is not None:
            self.shares.check_bi_spans(bi_spans, n, self.max_rows)
        cdef int32_t max_len = <int32_t>min(n + max_tokens, longest)
        if self.tables.demand(0, max_len - (not traced)) > self.pool.total:
            return NEVER_FITS
        cdef slot_t slot = self.seqs.take()
        if slot < 0:
            return NO_SLOT
        try:
            self.seqs.fill(slot, tokens, keys, () if ignore_eos else eos_ids, stop_ids, media, bi_spans)
            self.tables.states.enter(slot, boundaries)
        except BaseException:
            self.seqs.give(slot)
            raise
        self.seqs.of[slot].state = WAITING
        self.seqs.of[slot].request = request_id
        self.seqs.of[slot].max_len = max_len
        self.seqs.of[slot].min_len = <int32_t>min(n + min_tokens, <int64_t>0x7FFFFFFF)
        self.seqs.of[slot].priority = priority
        self.seqs.of[slot].arrival = arrival
        self.seqs.of[slot].order = self.next_order
        self.seqs.of[slot].root_lo = int.from_bytes(root[:8], "little")
        self.seqs.of[slot].root_hi = int.from_bytes(root[8:], "little")
        self.seqs.of[slot].read_cache = read_cache
        self.seqs.of[slot].traced = traced
        self.seqs.of[slot].drafts = drafts
        if drafts:
            self.drafts.budget.estimates.enter(slot)
        self.encoder.hold(self.seqs, slot)
        self.queue.enlist(slot, flow, weight, n, deadline, priority, arrival, self.next_order)
        self.next_order += 1
        return slot

    cdef int64_t _longest(self, int64_t n, int32_t max_tokens, int32_t min_tokens, bint traced) except -1:
        """Return the most tokens of a request with a prompt of n; raise ValueError for a wrong prompt or limits.

        The last token of an answer is never computed, so one token may follow a prompt that fills the context. A traced
        request computes it, too.
        """
        if n < 1 or n > self.max_model_len or max_tokens < 1 or min_tokens < 0 or (
            n == self.max_model_len and (traced or max_tokens > 1)
        ):
            raise ValueError(
                f"prompt of {n} tokens, max_tokens={max_tokens}, min_tokens={min_tokens}: the prompt takes 1 to "
                f"{self.max_model_len} tokens, and at least one is generated; a prompt that long leaves room for one"
            )
        return max(n + (not traced), <int64_t>self.max_model_len)

    cdef int64_t _media_end(self, const int32_t[:, ::1] media, int64_t n) except -1:
        """Return the end of the last run of media; raise ValueError if it begins after the prompt."""
        cdef Py_ssize_t last = media.shape[0] - 1
        if media.shape[1] != 4 or media[last, 0] >= n:
            raise ValueError("media rows are (start, length, entry, entry_row_start) that begin in the prompt")
        return <int64_t>media[last, 0] + media[last, 1]

    def abort(self, int64_t request_id, bint when_computed=False):
        """End a request, now or when its tokens are computed; False: it is not live. Then see `freed_slots`."""
        cdef slot_t slot = self.seqs.find(request_id)
        self.settler.num_freed = 0
        if slot < 0 or self.seqs.of[slot].state == FINISHING:
            return False
        if when_computed:
            self.settler.close(slot)
        else:
            self.settler.end(slot)
        return True

    def add_entry(self, int32_t num_rows, int32_t work=0):
        """Add a media entry: return its id (>= 1), or -3 if it can never fit. work: in units of the budget."""
        return self.encoder.add_entry(num_rows, work)

    def discard_entry(self, int32_t entry):
        """Remove a new entry that no request named; return whether this was the case."""
        return self.encoder.discard_entry(entry)

    def take_evicted(self):
        """Return [(entry, dead)] of embeddings to drop now; ids of dead entries are free. Call after each commit."""
        return self.encoder.take_evicted() if self.encoder.num_evicted else []

    # A step takes tens of microseconds and holds the GIL, because reacquiring it from a busy thread would take longer.

    def schedule(self, StepPlan plan not None):
        """Plan the next step; return its number of rows. 0: nothing to launch or commit."""
        if self._in_flight() >= MAX_IN_FLIGHT:
            raise RuntimeError(f"{MAX_IN_FLIGHT} steps are in flight already: commit the older one first")
        plan.check_room(self.max_rows, self.max_tokens, self.tables.num_groups * self.tables.max_blocks)
        if plan.lines.run_width < self.run_width:
            raise ValueError(f"the plan has runs of {plan.lines.run_width} blocks: this scheduler has {self.run_width}")
        if self.settler.settled_step < plan.step_id < self.planner.next_step:
            raise ValueError(f"the plan still holds step {plan.step_id}, which is in flight: give another one")
        self.planner.plan(plan)
        return plan.num_rows

    def commit(self, StepPlan plan not None, const int32_t[::1] sampled, const int32_t[::1] finish_override=None):
        """Settle the oldest step in flight.

        sampled: plan.width values per row: the row's tokens, then TokenCode.END. They are ignored for rows that do not
        sample; END at the first place ends the row without a token.

        finish_override: if not 0, ends the row with this reason, after the last token of its run; a token of -1 then
        means no token.
        """
        cdef int32_t n = plan.num_rows
        if plan.step_id < 0 and n == 0:
            self.settler.num_freed = 0
            return
        self._check_oldest(plan)
        if sampled.shape[0] < n * plan.width or (finish_override is not None and finish_override.shape[0] < n):
            raise ValueError(
                f"the step has {n} rows: sampled needs {plan.width} values for each, and finish_override one"
            )
        cdef const int32_t* override = NULL
        if finish_override is not None:
            override = &finish_override[0]
        self.settler.commit(plan, &sampled[0], override)

    def fail(self, StepPlan plan not None, const uint8_t[::1] again=None):
        """Settle the oldest step in flight, which failed: its rows end with ERROR, and later its readers.

        Slots marked in `again` (a byte per slot) start over instead; the results of their steps in flight are dropped.
        """
        self._check_oldest(plan)
        if again is not None and again.shape[0] < self.max_slots:
            raise ValueError(f"again has {again.shape[0]} bytes: each of {self.max_slots} slots needs one")
        self.settler.fail(plan, &again[0] if again is not None else NULL)

    cdef int64_t _in_flight(self) noexcept nogil:
        """Steps that are planned and not settled."""
        return self.planner.next_step - self.settler.settled_step - 1

    cdef _check_oldest(self, StepPlan plan):
        """Raise ValueError unless the plan is the oldest step in flight."""
        if plan.step_id != self.settler.settled_step + 1 or plan.step_id >= self.planner.next_step:
            raise ValueError(f"step {plan.step_id} is not the oldest in flight ({self.settler.settled_step + 1})")

    def reset_prefix_cache(self):
        """Drop all cached prefixes; rows in flight keep using their blocks."""
        with nogil:
            self.tables.forget_names()

    # For the engine's reports and for tests.

    def cached_tokens(self, int32_t slot):
        """Return the prompt tokens found in the prefix cache at the first start of the slot's request; 0 before."""
        if not 0 <= slot < self.max_slots:
            raise ValueError(f"slot {slot}: this scheduler has slots 0 to {self.max_slots - 1}")
        return max(0, self.seqs.of[slot].cached)

    def last_place(self, int32_t slot):
        """Return the most tokens of a live slot that steps compute: the last token of an answer is only for a trace."""
        if not 0 <= slot < self.max_slots:
            raise ValueError(f"slot {slot}: this scheduler has slots 0 to {self.max_slots - 1}")
        return self.seqs.of[slot].max_len - (not self.seqs.of[slot].traced)

    @property
    def next_step(self):
        """The step_id of the next schedule()."""
        return self.planner.next_step

    @property
    def num_in_flight(self):
        """Steps that are planned and not settled."""
        return self._in_flight()

    @property
    def prefix_queries(self):
        """Tokens looked up in the prefix cache since start."""
        return self.planner.prefix_queries

    @property
    def prefix_hits(self):
        """Tokens found in the prefix cache since start."""
        return self.planner.prefix_hits

    @property
    def run_width(self):
        """Blocks of the longest run of a state or tail; 0: the model has no states."""
        return max(self.pool.sizes[1], self.pool.sizes[2])

    @property
    def states(self):
        """Runs and bases of the rows of a model with states."""
        return self.tables.states

    @property
    def state_counts(self):
        """Counts of states named, stored, hit, dropped, runs in use, and tokens found only by attention; or None."""
        return self.tables.states.counts if self.tables.states.active else None

    @property
    def num_freed(self):
        """Number of valid entries in `freed_slots`, from the last commit, fail or abort."""
        return self.settler.num_freed

    @property
    def freed_slots(self):
        """Freed slots; the first `num_freed` are valid."""
        return self.settler.freed_slots

    @property
    def freed_lens(self):
        """For each freed slot: its number of tokens if it was traced and fully computed; else 0."""
        return self.settler.freed_lens

    @property
    def num_preemptions(self):
        """Number of preemptions since start."""
        return self.settler.num_preemptions

    @property
    def num_running(self):
        """Rows that hold blocks and are planned."""
        return self.running.size

    @property
    def num_waiting(self):
        """Requests in the queue, new or preempted."""
        return self.queue.size

    def ledger(self):
        """Return counts that must be zero, or add up, if no request is open (RELIABILITY.md)."""
        states = {"runs_used": self.state_counts["runs_used"]} if self.tables.states.active else {}
        return states | {
            "free": self.pool.num_free,
            "cached": self.pool.num_cached,
            "used": self.pool.num_used,
            "total": self.pool.total,
            "refs": self.pool.sum_refs(),
            "table_rows": sum([self.tables.size[i] > 0 for i in range(self.max_slots)]),
            "slots": self.seqs.num_used,
            "running": self.running.size,
            "waiting": self.queue.size,
            "index_entries": self.index.num_entries,
            "encoder_entries": self.encoder.num_entries,
            "encoder_in_use": self.encoder.num_in_use,
            "encoder_rows": self.encoder.rows_held,
            "in_flight": self._in_flight(),
        }
