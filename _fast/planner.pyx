"""Planner: writes the next step's plan: the rows that continue or start, their numbers of tokens, and their blocks.

Owner: the device thread, through Scheduler and SteadyLoop. In: the tables between two steps. Out: a StepPlan, and the
tables in their state after the launch of this step. A plan is made in this order:

    1. running rows, best (priority, arrival) first: shares of the step's tokens, then blocks for these tokens
    2. waiting requests, in their order, with the remaining tokens, blocks and block-table changes
    3. longer chunks for running prompts, only from idle blocks
    4. drafts for rows that decode, only from idle blocks

When blocks run out, the last running row starts over (its KV is recomputed), so the first row always progresses. No row
starts over for drafts: first rows give back the blocks of drafts that were refused, and a row waits while such drafts
are in flight. Before all that, idle rows give rows and blocks to waiting requests of clients.
"""

cimport cython

from _fast.layout cimport HEADER_RESTING, ROW_SAMPLE
from _fast.seqs cimport Seq, fetch, left_of, promise, reach_of
from _fast.types cimport RUNNING

cdef enum:
    MOST_LOADED = 64  # idle blocks
    SPARE_PART = 64  # one row in so many is for callers that have none: the others may be taken for long


@cython.final
cdef class Planner:
    """Plans for the tables of one scheduler."""

    def __init__(self, SeqTable seqs not None, BlockTables tables not None, WaitQueue queue not None,
                 EncoderTable encoder not None, RunningRows running not None, TokenShares shares not None,
                 Drafts drafts not None, Settler settler not None, int32_t max_rows, bint whole_prompts,
                 int64_t first_step):
        self.seqs = seqs
        self.tables = tables
        self.queue = queue
        self.encoder = encoder
        self.running = running
        self.shares = shares
        self.drafts = drafts
        self.settler = settler
        self.max_rows = max_rows
        self.whole_prompts = whole_prompts
        self.stateful = tables.states.active
        self.next_step = first_step

    cdef void plan(self, StepPlan plan) noexcept nogil:
        """Fill the plan with the next step. A plan without rows has no step number, and nothing is launched."""
        cdef bint crowded
        self._load(plan.width)
        plan.clear()
        while plan.num_rows == 0:
            crowded = self.encoder.num_large and self._is_decoding()
            self.encoder.begin(self.settler.settled_step, crowded, plan, self.next_step)
            self.updates_left = <int32_t>plan.updates.shape[0]
            self.preempted = False
            self._yield_idle()
            self._continue(plan)
            if not self.preempted:
                self._admit(plan)
                self.updates_left = self.shares.deal_leftovers(self.updates_left)
            if plan.width > 1:
                self.drafts.deal(self.updates_left, 0 if self.preempted else plan.width - 1)
            self._emit(plan)
            if plan.num_rows or self.running.size == 0 or self.next_step != self.settler.settled_step + 1:
                break
            # No row can proceed and nothing is in flight: rows block each other's encoder room. The last starts over.
            self._preempt(self.running.slots[self.running.size - 1])
        if plan.num_rows:
            self.encoder.start_wanted(plan, self.next_step)
            plan.seal(self.next_step)
            self.next_step += 1

    cdef void _load(self, int32_t width) noexcept nogil:
        """Begin to load what planning the rows reads and writes; each call uses what the calls before have loaded."""
        cdef const slot_t* slots = &self.running.slots[0]
        cdef int32_t groups = self.tables.num_groups
        cdef int32_t lacking = 0
        cdef int32_t i
        cdef int32_t g
        self.seqs.fetch_rows(slots, self.running.size)
        if width > 1:
            self.drafts.budget.estimates.fetch(slots, self.running.size)
        for i in range(self.running.size):
            if not self.tables.covers(slots[i], self.seqs.of[slots[i]].computed + width):
                for g in range(groups):
                    fetch(self.tables.rows[slots[i] * groups + g] + self.tables.size[slots[i]])
                lacking += groups
        self.tables.pool.fetch_idle(min(lacking, <int32_t>MOST_LOADED))

    cdef void _yield_idle(self) noexcept nogil:
        """Preempt idle rows for waiting requests that are not idle: for their rows, and for the blocks of the first."""
        cdef slot_t slot
        cdef int32_t over
        if self.running.last_idle() < 0:
            return
        slot = self.queue.first_client()
        if slot < 0:
            return
        over = self.running.size + self.queue.num_clients() - self.max_rows
        while self.running.last_idle() >= 0:
            if over <= 0 and self._has_blocks(slot, self.tables.match(slot)):
                break
            self.settler.preempt(self.running.last_idle())
            over -= 1

    cdef bint _is_decoding(self) noexcept nogil:
        """Whether a running row decodes, that is, has one token left to compute."""
        cdef int32_t i
        for i in range(self.running.size):
            if left_of(&self.seqs.of[self.running.slots[i]]) == 1:
                return True
        return False

    cdef void _continue(self, StepPlan plan) noexcept nogil:
        """Find blocks for the tokens of running rows. A row without blocks, or room in the plan, gets 0 tokens."""
        cdef int32_t i = 0
        cdef int32_t count
        cdef int32_t changed
        cdef int32_t granted
        cdef slot_t slot
        self.shares.deal(self.running.size < self.max_rows)
        while i < self.running.size:
            slot = self.running.slots[i]
            i += 1
            granted = count = self.shares.of[slot]
            if count == 0:
                continue
            if self.seqs.of[slot].span_at < self.seqs.of[slot].num_spans:
                count = self.encoder.limit(self.seqs, slot, self.seqs.of[slot].computed, count)
            if count and not self._provide(slot, count):
                count = 0
            if count:
                changed = self.tables.num_changed(slot)
                if changed <= self.updates_left:
                    self.updates_left -= changed
                else:
                    count = 0
            if count < granted and left_of(&self.seqs.of[slot]) > 1:
                self.shares.take(count - granted)
            self.shares.of[slot] = count
            if count and self.seqs.of[slot].span_at < self.seqs.of[slot].num_spans:
                self.encoder.claim(self.seqs, slot, self.seqs.of[slot].computed, count, plan, self.next_step)

    cdef bint _provide(self, slot_t slot, int32_t count) noexcept nogil:
        """Provide blocks for the row's next tokens, by preempting the last running rows if needed. False: none now."""
        cdef int32_t end = self.seqs.of[slot].computed + count
        cdef int32_t reach = reach_of(&self.seqs.of[slot], end, 1)
        cdef int32_t missing
        cdef slot_t victim
        if self.stateful:
            self.tables.states.turn(slot)
        elif self.tables.covers(slot, reach):
            return True
        missing = self.tables.missing(slot, end, reach)
        if missing > self.tables.pool.num_idle() and self.drafts.reclaim() and missing > self.tables.pool.num_idle():
            return False
        while missing > self.tables.pool.num_idle():
            victim = self.running.slots[self.running.size - 1]
            self._preempt(victim)
            if victim == slot:
                return False
        return self.tables.grow(slot, end, reach) == 0

    cdef void _preempt(self, slot_t slot) noexcept nogil:
        """Preempt a running row: it gives up its blocks and waits again."""
        self.settler.preempt(slot)
        self.preempted = True

    cdef void _admit(self, StepPlan plan) noexcept nogil:
        """Start waiting requests in order, until one neither fits nor can be set aside; this one blocks the rest."""
        cdef slot_t slot
        cdef int32_t withheld
        cdef bint started
        self.queue.drop_expired()
        while self.running.size < self.max_rows and self.shares.tokens_left > 0:
            slot = self._next()
            # A preempted row waits for its samples in flight, because it must compute these tokens, too.
            if slot < 0 or self.seqs.of[slot].in_flight:
                break
            withheld = self.shares.withheld(slot, False)
            self.shares.tokens_left -= withheld
            started = self._start(slot, plan)
            self.shares.tokens_left += withheld
            if not (started or self.queue.set_aside(slot)):
                break
        self.queue.take_back()

    cdef slot_t _next(self) noexcept nogil:
        """The request that comes next, or -1. While callers share the rows, the last ones are for those without any: a
        caller's crowd holds its rows for as long as its answers are, and who asks now and then does not wait for that.
        """
        if self.running.size < self.max_rows - self.max_rows // SPARE_PART or not self.queue.turns.is_shared():
            return self.queue.first()
        return self.queue.newcomer(self.running.slots, self.running.size)

    cdef bint _start(self, slot_t slot, StepPlan plan) noexcept nogil:
        """Start a waiting request if there are tokens, blocks and room in the plan; return whether it started."""
        cdef int32_t known = self.seqs.of[slot].num_tokens
        cdef int32_t hit = self.tables.match(slot)
        cdef int32_t start = hit * self.tables.block_size
        cdef int32_t count = self.shares.fitting(slot, start, known - start, 0)
        if not self._has_blocks(slot, hit):
            return False
        if self.seqs.of[slot].num_spans:
            count = self.encoder.limit(self.seqs, slot, start, count)
        cdef int32_t reach = reach_of(&self.seqs.of[slot], start + count, 1)
        cdef int32_t changed = self.tables.blocks_for(reach) * self.tables.num_groups
        if count <= 0 or changed > self.updates_left or (self.whole_prompts and start + count < known):
            return False
        self.seqs.of[slot].computed = self.seqs.of[slot].committed = start
        if self.tables.attach(slot, hit) < 0 or self.tables.grow(slot, start + count, reach) < 0:
            self.tables.release(slot)
            self.seqs.of[slot].computed = self.seqs.of[slot].committed = 0
            return False
        self.updates_left -= changed
        self._enter(slot, hit, count, plan)
        return True

    cdef bint _has_blocks(self, slot_t slot, int32_t hit) noexcept nogil:
        """Whether the blocks suffice for all known tokens of a waiting request that has just found `hit` blocks.

        There is a reserve for decoding rows: a row that starts too early would preempt others.
        """
        cdef int32_t idle = self.tables.pool.num_idle() - self.tables.num_revived
        cdef int32_t reserve = min(self.running.size, self.tables.pool.total >> 4) * self.tables.num_groups
        if self.stateful:  # a row that folds holds two states temporarily
            reserve += self.running.size * self.tables.pool.sizes[1]
        cdef const Seq* own = &self.seqs.of[slot]
        return self.tables.demand(hit, reach_of(own, own.num_tokens, 1)) + reserve <= idle

    cdef void _enter(self, slot_t slot, int32_t hit, int32_t count, StepPlan plan) noexcept nogil:
        """Start a request that has its blocks, with `count` tokens after the `hit` blocks that it found."""
        cdef int32_t known = self.seqs.of[slot].num_tokens
        cdef int32_t start = hit * self.tables.block_size
        self.queue.serve(slot)
        self.shares.take(count)
        self.seqs.of[slot].num_named = hit
        self.seqs.of[slot].unnamed = 0
        self.seqs.of[slot].restarting = 0
        self.seqs.of[slot].boundary = start + self.tables.block_size
        if self.seqs.of[slot].num_spans:
            self.encoder.passed(self.seqs, slot)
            self.encoder.claim(self.seqs, slot, start, count, plan, self.next_step)
        if self.seqs.of[slot].cached < 0:
            self.seqs.of[slot].cached = start
            if self.tables.caching and self.seqs.of[slot].read_cache:
                self.prefix_queries += known
                self.prefix_hits += start
                self.tables.states.reached += self.tables.states.reach * self.tables.block_size
        self.shares.of[slot] = count
        self.seqs.of[slot].chained = 0
        self.seqs.of[slot].state = RUNNING
        self.running.enter(slot)

    cdef void _emit(self, StepPlan plan) noexcept nogil:
        """Write the rows: those with one token first, then the chunks, then the rows with drafts.

        The device may compute fewer drafts than planned, so no row follows the rows with drafts.
        """
        cdef int32_t i
        cdef bint drafted = plan.width > 1 and self.drafts.total > 0
        cdef slot_t slot
        if plan.width > 1 and self.drafts.budget.variant:
            plan.set_form(self.drafts.budget.rest.active or self._is_open(), self.drafts.budget.variant)
        for i in range(self.running.size):
            slot = self.running.slots[i]
            if self.shares.of[slot] == 1 and not (drafted and self.drafts.of[slot]):
                self._row(slot, 1, 0, plan)
        plan.num_decode_rows = plan.num_rows
        for i in range(self.running.size):
            slot = self.running.slots[i]
            if self.shares.of[slot] > 1:
                self._row(slot, self.shares.of[slot], 0, plan)
        for i in range(self.running.size if drafted else 0):
            slot = self.running.slots[i]
            if self.drafts.of[slot]:
                self._row(slot, 1, self.drafts.of[slot], plan)
        if drafted:
            plan.add_drafts(self.drafts.total)
        if self.stateful and plan.num_rows:
            self.tables.states.cache.send(plan, self.next_step)

    cdef bint _is_open(self) noexcept nogil:
        """Whether the place of a running row is known only to the device, because steps in flight verify drafts."""
        cdef int32_t i
        cdef slot_t slot
        for i in range(self.running.size):
            slot = self.running.slots[i]
            if self.seqs.of[slot].pending != self.seqs.of[slot].choosing:
                return True
        return False

    cdef void _row(self, slot_t slot, int32_t count, int32_t drafts, StepPlan plan) noexcept nogil:
        """Write a row, and record its tokens as computed and its samples as pending, as they are after the launch."""
        cdef Seq* own = &self.seqs.of[slot]
        if self.stateful:
            self.tables.states.plan_row(slot, plan.num_rows, count, self._idle_after(), plan)
        if plan.row(self.seqs, slot, count, drafts) & ROW_SAMPLE:
            promise(own, 1 + drafts)
            own.chained = not plan.lines.record[HEADER_RESTING]
        own.computed += count
        own.in_flight += 1
        if self.tables.dirty[slot] < self.tables.size[slot]:
            self.tables.send(slot, plan)

    cdef int32_t _idle_after(self) noexcept nogil:
        """Return the blocks that checkpoints must leave idle: a fold of each running row, and one next chunk."""
        return (
            self.running.size * self.tables.pool.sizes[1]
            + (self.tables.blocks_for(self.shares.max_chunk) + 1) * self.tables.num_groups
        )
