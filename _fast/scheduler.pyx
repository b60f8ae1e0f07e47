"""Scheduler: what runs next, in integers. schedule() plans a step, commit() settles it; two steps may be in flight.

Owner: the device thread. In: requests (tokens, keys, limits, media spans), aborts, sampled tokens. Out: a StepPlan
per step, tokens and finish reasons per row, slots freed, media entries evicted.
There is no prefill or decode phase: a row has tokens known and tokens computed, and a step closes some of the gap:

    schedule(N+1)      launched behind N     commit(N)                     schedule(N+2) ...
    plans with N's     (device runs steps    N's tokens known: lengths,    sees what commit(N) freed
    samples pending    in order)             stops, names, freed blocks

A row whose newest token is still on the device is planned with FEED. A row that ends in commit(N) while N+1 names
it keeps its slot until commit(N+1); its blocks are free at once, because no plan made before can write to them later.
Order: running rows, best (priority, arrival) first, one token each promised to rows that decode; then waiting ones.
When blocks run out, the last running row starts over (its KV is recomputed), so the first one always progresses.
"""

cimport cython

from _fast.layout cimport ROW_SAMPLE
from _fast.types cimport (
    FINISHING, MAX_IN_FLIGHT, MEDIA_TOO_LARGE, NEVER_FITS, NO_SLOT, RUNNING, WAITING, uint8_t,
)


@cython.final
cdef class Scheduler:
    """Slots, queue, blocks and media entries of one engine; see the module for the order of calls."""

    def __init__(self, *, int32_t max_slots, int32_t max_rows, int32_t max_tokens, int32_t max_model_len,
                 int32_t num_blocks, int32_t block_size, groups=((0, 0),), bint prefix_caching=True,
                 bytes hash_key=bytes(16), int32_t policy=0, int32_t max_chunk=0, int32_t encoder_budget=0,
                 int32_t encoder_capacity=0, int hash_bits=128, int64_t first_step=0, bint whole_prompts=False):
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
        self.max_slots = max_slots
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.max_chunk = min(max_chunk, max_tokens) if max_chunk else max_tokens
        self.by_priority = policy == 1
        self.whole_prompts = whole_prompts
        if whole_prompts and self.max_chunk < max_model_len:
            raise ValueError(f"a step takes {self.max_chunk} tokens of a prompt: whole ones have up to {max_model_len}")
        self.next_step = first_step
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(num_blocks if prefix_caching else 2, block_size, hash_key, hash_bits)
        self.seqs = SeqTable(max_slots)
        self.tables = BlockTables(self.pool, self.index, self.seqs, list(groups), block_size, max_model_len,
                                  self.max_chunk, prefix_caching)
        self.num_groups = self.tables.num_groups
        self.queue = WaitQueue(max_slots, self.by_priority, whole_prompts)
        self.encoder = EncoderTable(encoder_budget, encoder_capacity)
        self.running = RunningRows(self.seqs, self.by_priority)
        self.shares = TokenShares(self.seqs, self.running, self.queue, self.tables, max_tokens, self.max_chunk)
        self.settler = Settler(self.seqs, self.tables, self.running, self.queue, self.encoder, first_step - 1)

    # Requests come and go.

    def add(self, int64_t request_id, const token_t[::1] tokens, *, int32_t max_tokens, int32_t min_tokens=0,
            bint ignore_eos=False, eos_ids=(), stop_ids=(), int32_t priority=0, double arrival=0.0,
            bytes root=bytes(16), const int64_t[:, ::1] keys=None, const int32_t[:, ::1] media=None,
            const int32_t[:, ::1] joints=None, bint read_cache=True, bint traced=False,
            int32_t flow=0, int32_t weight=1, double deadline=float("inf")):
        """A request enters the queue: its slot, or -1 (no slot free), -2 (too few blocks), -3 (media too large).

        `joints`: [m, 2], start and end of positions for one step. `traced`: `freed_lens` counts tokens, all computed.
        `flow`: of equal numbers is what waits in one line, with a share of `weight`; `deadline`: of the first step.
        """
        cdef int64_t n = tokens.shape[0]
        # The last token of an answer is never computed, so one may follow a prompt that fills the context.
        cdef int64_t longest = max(n + (not traced), <int64_t>self.max_model_len)
        if n < 1 or n > self.max_model_len or max_tokens < 1 or min_tokens < 0 or (
            n == self.max_model_len and (traced or max_tokens > 1)
        ):
            raise ValueError(
                f"prompt of {n} tokens, max_tokens={max_tokens}, min_tokens={min_tokens}: the prompt takes 1 to "
                f"{self.max_model_len} tokens, and at least one is generated; a prompt that long leaves room for one"
            )
        self.queue.check_flow(flow, weight)
        if request_id < 0 or len(root) != 16 or (keys is not None and (keys.shape[0] != 2 or keys.shape[1] != n)):
            raise ValueError(f"request {request_id}: ids are >= 0, root has 16 bytes, keys have the shape [2, {n}]")
        cdef int64_t media_end
        if media is not None and media.shape[0]:
            if media.shape[1] != 4 or media[media.shape[0] - 1, 0] >= n:
                raise ValueError("media rows are (start, length, entry, entry_row_start) that begin in the prompt")
            media_end = <int64_t>media[media.shape[0] - 1, 0] + media[media.shape[0] - 1, 1]
            if media_end > n:  # tokens of the answer take rows as well: there are no more of them than rows
                longest = min(longest, media_end)
            need = self.encoder.largest_need(media)
            if self.encoder.capacity and need > self.encoder.capacity:
                return MEDIA_TOO_LARGE
        if joints is not None:
            self.shares.check_joints(joints, n, self.max_rows)
        cdef int32_t max_len = <int32_t>min(n + max_tokens, longest)
        if self.tables.demand(0, max_len - (not traced)) > self.pool.total:
            return NEVER_FITS
        cdef slot_t slot = self.seqs.take()
        if slot < 0:
            return NO_SLOT
        try:
            self.seqs.fill(slot, tokens, keys, () if ignore_eos else eos_ids, stop_ids, media, joints)
        except BaseException:
            self.seqs.give(slot)
            raise
        self.seqs.state[slot] = WAITING
        self.seqs.request[slot] = request_id
        self.seqs.max_len[slot] = max_len
        self.seqs.min_len[slot] = <int32_t>min(n + min_tokens, <int64_t>0x7FFFFFFF)
        self.seqs.priority[slot] = priority
        self.seqs.arrival[slot] = arrival
        self.seqs.order[slot] = self.next_order
        self.seqs.root_lo[slot] = int.from_bytes(root[:8], "little")
        self.seqs.root_hi[slot] = int.from_bytes(root[8:], "little")
        self.seqs.read_cache[slot] = read_cache
        self.seqs.traced[slot] = traced
        self.encoder.hold(self.seqs, slot)
        self.queue.enlist(slot, flow, weight, n, deadline, priority, arrival, self.next_order)
        self.next_order += 1
        return slot

    def abort(self, int64_t request_id, bint when_computed=False):
        """End a request, now or when its tokens are computed; False: it is not live. See `freed_slots` for its slot."""
        cdef slot_t slot = self.seqs.find(request_id)
        self.settler.num_freed = 0
        if slot < 0 or self.seqs.state[slot] == FINISHING:
            return False
        if when_computed:
            self.settler.close(slot)
        else:
            self.settler.end(slot)
        return True

    def add_entry(self, int32_t num_rows, int32_t work=0):
        """A new media entry: its id (>= 1), or -3 when it can never fit. `work`: of its tower, as the budget counts."""
        return self.encoder.add_entry(num_rows, work)

    def discard_entry(self, int32_t entry):
        """Take back a new entry that no request named after all; says whether it was one."""
        return self.encoder.discard_entry(entry)

    def take_evicted(self):
        """[(entry, dead)] of embeddings to drop now; dead entries' ids are free again. Call it after each commit."""
        return self.encoder.take_evicted() if self.encoder.num_evicted else []

    # A step. Tens of microseconds with the GIL: who gives it away beside a busy thread waits for it much longer.

    def schedule(self, StepPlan plan not None):
        """Plan the next step: the number of its rows. 0: nothing to launch, and nothing to commit."""
        if self.next_step - self.settler.settled_step - 1 >= MAX_IN_FLIGHT:
            raise RuntimeError(f"{MAX_IN_FLIGHT} steps are in flight already: commit the older one first")
        plan.check_room(self.max_rows, self.max_tokens, self.num_groups * self.tables.max_blocks)
        if self.settler.settled_step < plan.step_id < self.next_step:
            raise ValueError(f"the plan still holds step {plan.step_id}, which is in flight: give another one")
        self._plan(plan)
        return plan.num_rows

    def commit(self, StepPlan plan not None, const int32_t[::1] sampled, const int32_t[::1] finish_override=None):
        """Settle the oldest step in flight.

        `sampled`: plan.width values per row, row after row: the row's tokens, then TokenCode.END. They are ignored
        where nothing was to be sampled; END at the first place ends the row without a token.

        `finish_override` ends rows with a reason of its own where it is not 0; a token of -1 then counts as none.
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
        """The oldest step in flight raised: its rows end with ERROR, and what read its results ends later.

        Slots marked in `again` (a byte for each) start over instead; what they have in flight counts for nothing.
        """
        self._check_oldest(plan)
        if again is not None and again.shape[0] < self.max_slots:
            raise ValueError(f"again has {again.shape[0]} bytes: each of {self.max_slots} slots needs one")
        self.settler.fail(plan, &again[0] if again is not None else NULL)

    cdef _check_oldest(self, StepPlan plan):
        if plan.step_id != self.settler.settled_step + 1 or plan.step_id >= self.next_step:
            raise ValueError(f"step {plan.step_id} is not the oldest in flight ({self.settler.settled_step + 1})")

    def reset_prefix_cache(self):
        """Forget every cached prefix; rows in flight go on with their own blocks."""
        with nogil:
            self.tables.forget_names()

    cdef bint _is_decoding(self) noexcept nogil:
        """Whether a running row lacks one token: it decodes."""
        cdef int32_t i
        for i in range(self.running.size):
            if self.seqs.left(self.running.slots[i]) == 1:
                return True
        return False

    cdef void _plan(self, StepPlan plan) noexcept nogil:
        cdef bint crowded
        plan.clear()
        while plan.num_rows == 0:
            crowded = self.encoder.num_large and self._is_decoding()
            self.encoder.begin(self.settler.settled_step, crowded, plan, self.next_step)
            self.updates_left = plan.max_updates
            self.preempted = False
            self._continue(plan)
            if not self.preempted:
                self._admit(plan)
                self.updates_left = self.shares.deal_leftovers(self.updates_left, plan.width)
            self._emit(plan)
            if plan.num_rows or self.running.size == 0 or self.next_step != self.settler.settled_step + 1:
                break
            # Nothing can move and nothing is in flight: rows hold each other's encoder room. The last starts over.
            self._preempt(self.running.slots[self.running.size - 1])
        if plan.num_rows:
            self.encoder.start_wanted(plan, self.next_step)
            plan.seal(self.next_step)
            self.next_step += 1

    cdef void _continue(self, StepPlan plan) noexcept nogil:
        """Find blocks for the tokens that running rows get."""
        cdef int32_t i = 0, count, changed, granted
        cdef slot_t slot
        self.shares.deal(self.running.size < self.max_rows)
        while i < self.running.size:
            slot = self.running.slots[i]
            i += 1
            granted = count = self.shares.of[slot]
            if count == 0:
                continue
            if self.seqs.span_at[slot] < self.seqs.num_spans[slot]:
                count = self.encoder.limit(self.seqs, slot, self.seqs.computed[slot], count)
            if count and not self._provide(slot, count, plan.width):
                count = 0
            if count:
                changed = self.tables.num_changed(slot)
                if changed <= self.updates_left:
                    self.updates_left -= changed
                else:
                    count = 0
            if count < granted and self.seqs.left(slot) > 1:
                self.shares.take(count - granted)
            self.shares.of[slot] = count
            if count and self.seqs.span_at[slot] < self.seqs.num_spans[slot]:
                self.encoder.claim(self.seqs, slot, self.seqs.computed[slot], count, plan, self.next_step)

    cdef bint _provide(self, slot_t slot, int32_t count, int32_t width) noexcept nogil:
        """Blocks for the row's next tokens, from the last running rows if need be. False: the row gets none now."""
        cdef int32_t end = self.seqs.reach(slot, self.seqs.computed[slot] + count, width)
        cdef int32_t missing = self.tables.missing(slot, end)
        cdef slot_t victim
        if missing <= 0:
            return True
        while missing > self.pool.num_free + self.pool.num_cached:
            victim = self.running.slots[self.running.size - 1]
            self._preempt(victim)
            if victim == slot:
                return False
        return self.tables.grow(slot, end) == 0

    cdef void _preempt(self, slot_t slot) noexcept nogil:
        self.settler.preempt(slot)
        self.preempted = True

    cdef void _admit(self, StepPlan plan) noexcept nogil:
        """Start waiting requests in their order; the first that neither fits nor stands aside holds up the others."""
        cdef slot_t slot
        self.queue.drop_expired()
        while self.running.size < self.max_rows and self.shares.tokens_left > 0:
            slot = self.queue.first()
            # A preempted row waits for its samples in flight: they are part of what it must compute.
            if slot < 0 or self.seqs.in_flight[slot] or not (self._start(slot, plan) or self.queue.set_aside(slot)):
                break
        self.queue.take_back()

    cdef bint _start(self, slot_t slot, StepPlan plan) noexcept nogil:
        cdef int32_t known = self.seqs.num_tokens[slot]
        cdef int32_t hit = self.tables.match(slot), start = hit * self.block_size
        cdef int32_t count = self.shares.fitting(slot, start, known - start)
        cdef int32_t idle = self.pool.num_free + self.pool.num_cached - self.tables.num_revived
        # All that is known must fit, with a reserve for rows that decode: a row let in too early preempts others.
        cdef int32_t reserve = min(self.running.size, self.pool.total >> 4) * self.num_groups
        if self.tables.demand(hit, self.seqs.reach(slot, known, plan.width)) + reserve > idle:
            return False
        if self.seqs.num_spans[slot]:
            count = self.encoder.limit(self.seqs, slot, start, count)
        cdef int32_t end = self.seqs.reach(slot, start + count, plan.width)
        cdef int32_t changed = self.tables.blocks_for(end) * self.num_groups
        if count <= 0 or changed > self.updates_left or (self.whole_prompts and start + count < known):
            return False
        if self.tables.attach(slot, hit) < 0 or self.tables.grow(slot, end) < 0:
            self.tables.release(slot)
            return False
        self.queue.serve(slot)
        self.updates_left -= changed
        self.shares.take(count)
        self.seqs.computed[slot] = start
        self.seqs.committed[slot] = start
        self.seqs.num_named[slot] = hit
        self.seqs.unnamed[slot] = self.seqs.restarting[slot] = 0
        self.seqs.boundary[slot] = start + self.block_size
        if self.seqs.num_spans[slot]:
            self.encoder.passed(self.seqs, slot)
            self.encoder.claim(self.seqs, slot, start, count, plan, self.next_step)
        if self.seqs.cached[slot] < 0:
            self.seqs.cached[slot] = start
            if self.tables.caching and self.seqs.read_cache[slot]:
                self.prefix_queries += known
                self.prefix_hits += start
        self.shares.of[slot] = count
        self.seqs.state[slot] = RUNNING
        self.running.enter(slot)
        return True

    cdef void _emit(self, StepPlan plan) noexcept nogil:
        """Write the rows: those with one token first, then the chunks."""
        cdef int32_t i
        for i in range(self.running.size):
            if self.shares.of[self.running.slots[i]] == 1:
                self._row(self.running.slots[i], 1, plan)
        plan.num_decode_rows = plan.num_rows
        for i in range(self.running.size):
            if self.shares.of[self.running.slots[i]] > 1:
                self._row(self.running.slots[i], self.shares.of[self.running.slots[i]], plan)

    cdef void _row(self, slot_t slot, int32_t count, StepPlan plan) noexcept nogil:
        """Write a row, and note that its tokens are computed and its sample is on its way once this is launched."""
        if plan.row(self.seqs, slot, count) & ROW_SAMPLE:
            self.seqs.promise(slot, plan.width)
        self.seqs.computed[slot] += count
        self.seqs.in_flight[slot] += 1
        if self.tables.dirty[slot] < self.tables.size[slot]:
            self.tables.send(slot, plan)

    # What the engine reports, and what tests count.

    def cached_tokens(self, int32_t slot):
        """Prompt tokens found in the prefix cache when the slot's request first started; 0 before."""
        if not 0 <= slot < self.max_slots:
            raise ValueError(f"slot {slot}: this scheduler has slots 0 to {self.max_slots - 1}")
        return max(0, self.seqs.cached[slot])

    @property
    def num_freed(self):
        """How many of `freed_slots` the last commit, fail or abort gave back."""
        return self.settler.num_freed

    @property
    def freed_slots(self):
        return self.settler.freed_slots

    @property
    def freed_lens(self):
        return self.settler.freed_lens

    @property
    def num_preemptions(self):
        return self.settler.num_preemptions

    @property
    def num_running(self):
        return self.running.size

    @property
    def num_waiting(self):
        return self.queue.size

    @property
    def num_in_flight(self):
        return self.next_step - self.settler.settled_step - 1

    def ledger(self):
        """Counts that must be zero, or add up, when no request is open (RELIABILITY.md)."""
        return {
            "free": self.pool.num_free, "cached": self.pool.num_cached,
            "used": self.pool.num_used, "total": self.pool.total,
            "refs": self.pool.sum_refs(), "table_rows": sum([self.tables.size[i] > 0 for i in range(self.max_slots)]),
            "slots": self.seqs.num_used, "running": self.running.size, "waiting": self.queue.size,
            "index_entries": self.index.num_entries,
            "encoder_entries": self.encoder.num_entries, "encoder_in_use": self.encoder.num_in_use,
            "encoder_rows": self.encoder.rows_held, "in_flight": self.next_step - self.settler.settled_step - 1,
        }
