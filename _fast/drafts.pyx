"""Drafts: how many drafts each row of a step verifies, and the blocks for them.

Owner: the device thread, only through Scheduler. In: the shares of a step that is planned; the runs of settled steps.
Out: most drafts per running slot, their number over all rows, and counts of accepted drafts. The device finds the
drafts of a row's next step and reports their number with the row's run, so a row without drafts costs no room. Budget
decides on the number of drafts of a step, and of a row at most; the device deals them out. Drafts get what other rows
leave of a step: its tokens, its places for chosen tokens, idle blocks. A row holds blocks for all of its drafts until
it needs them, or until another row lacks a block.
"""

from array import array

cimport cython

from libc.string cimport memset

from _fast.layout cimport RUN_INVALID, RUN_VERIFIED, TOKEN_END
from _fast.plan cimport most_of
from _fast.seqs cimport Seq, last_of, left_of, reach_of


@cython.final
cdef class Drafts:
    """Counts of the step that is being planned."""

    def __init__(self, SeqTable seqs not None, RunningRows running not None, BlockTables tables not None,
                 TokenShares shares not None, int32_t max_lines, int32_t max_rows):
        self.seqs, self.running, self.tables, self.shares = seqs, running, tables, shares
        self.max_lines = max_lines
        self.budget = Budget(seqs.num_slots, max_rows)
        self.of = array("i", bytes(4 * seqs.num_slots))
        memset(&self.totals, 0, sizeof(DraftTotals))

    cdef void deal(self, int32_t updates_left, int32_t most) noexcept nogil:
        """Give rows that decode up to `most` drafts each, and decide on their total, after all rows have their tokens.

        updates_left: block-table changes for which the plan still has room.
        """
        cdef const slot_t* slots = &self.running.slots[0]
        cdef int32_t size = self.running.size
        cdef int32_t i
        cdef int32_t count
        cdef int32_t tokens = 0
        cdef int32_t sampled = 0
        cdef int32_t deciding = 0
        cdef slot_t slot
        self.budget.begin()
        most = min(most, self.budget.cap(size))
        for i in range(size):
            slot = slots[i]
            count = self.shares.of[slot]
            tokens += count
            sampled += count > 0 and count == left_of(&self.seqs.of[slot])
            deciding += count == 1
            if count:
                self.budget.contexts += self.seqs.of[slot].computed + count
            count = self._offered(slot, most) if count == 1 else 0
            self.of[slot] = count
            if count:
                self.budget.offer(slot, count, self.seqs.of[slot].computed + 1)
        count = min(self.shares.room, self.max_lines - size)
        self.total = self.budget.decide(sampled, tokens, count, deciding == tokens)
        if self.total:
            self._provide(updates_left)

    cdef int32_t _offered(self, slot_t slot, int32_t most) noexcept nogil:
        """Return how many drafts the next step of a row with one token may verify, if it has the blocks."""
        cdef const Seq* own = &self.seqs.of[slot]
        if not own.drafts or own.span_at < own.num_spans or self.shares.is_limited(slot):
            return 0
        self.budget.eligible += 1
        if not own.chained or not own.found:
            return 0
        return max(min(most, min(<int32_t>own.drafts, last_of(own) - own.computed - 1)), 0)

    cdef void _provide(self, int32_t updates_left) noexcept nogil:
        """Find blocks for the drafts of all rows; rows without blocks lose their drafts, and the total follows."""
        cdef int32_t i
        cdef int32_t reach
        cdef int32_t changed
        cdef int32_t possible = 0
        cdef slot_t slot
        for i in range(self.running.size):
            slot = self.running.slots[i]
            if not self.of[slot]:
                continue
            self.of[slot] = min(self.of[slot], self.budget.depth)
            reach = reach_of(&self.seqs.of[slot], self.seqs.of[slot].computed + 1, 1 + self.of[slot])
            if not self.tables.covers(slot, reach):
                changed = (self.tables.blocks_for(reach) - self.tables.size[slot]) * self.tables.num_groups
                if changed > updates_left or not self._reserve(slot, reach):
                    self.of[slot] = 0
                    continue
                updates_left -= changed
            possible += self.of[slot]
        self.total = min(self.total, possible)

    cdef bint reclaim(self) noexcept nogil:
        """Free the blocks that rows hold for refused drafts; return whether drafts in flight may free more of them."""
        cdef int32_t i
        cdef slot_t slot
        cdef bint more = False
        for i in range(self.running.size):
            slot = self.running.slots[i]
            if self.seqs.of[slot].drafts:
                self._shrink(slot, reach_of(&self.seqs.of[slot], self.seqs.of[slot].computed + self.shares.of[slot], 1))
                more |= self.seqs.of[slot].pending > self.seqs.of[slot].choosing
        return more

    cdef void note(self, StepPlan plan, int32_t row, const token_t* run) noexcept nogil:
        """Count the row's verified and right drafts, also in the plan, and note those of its next step.

        Must be called before the run is appended.
        """
        cdef slot_t slot = plan.lines.slot[row]
        cdef int32_t code
        cdef int32_t verified
        cdef int32_t count = 0
        cdef int32_t k
        self.seqs.of[slot].found = 0
        while count < plan.width and run[count] >= 0:
            count += 1
        if not 0 < count < plan.width or run[count] > TOKEN_END:
            return
        code = TOKEN_END - run[count]
        self.seqs.of[slot].found = <uint8_t>(code % RUN_VERIFIED)
        verified = min(code % RUN_INVALID // RUN_VERIFIED, most_of(&plan.lines, row) - 1)
        if verified <= 0:
            return
        self.budget.learn(slot, verified, min(count - 1, verified))
        self.totals.invalid_tokens += code // RUN_INVALID
        verified -= code // RUN_INVALID
        if verified > 0:
            self.totals.drafts += 1
            self.totals.draft_tokens += verified
            self.totals.accepted_tokens += count - 1
            for k in range(count - 1):
                self.totals.accepted_at[k] += 1
            plan.lines.drafted[row] = <uint8_t>verified
            plan.lines.accepted[row] = <uint8_t>(count - 1)

    @property
    def num_drafts(self):
        """Rows that verified drafts, since start; in settled steps, as the next counts."""
        return self.totals.drafts

    @property
    def num_draft_tokens(self):
        """Drafts that were verified."""
        return self.totals.draft_tokens

    @property
    def num_accepted_tokens(self):
        """Drafts that were right."""
        return self.totals.accepted_tokens

    @property
    def accepted_per_place(self):
        """Accepted drafts by place, without zeros at the end."""
        return list(as_counts(&self.totals)[4])

    @property
    def counts(self):
        """(rows that verified drafts, drafts, accepted drafts, invalid drafts, accepted drafts per place)."""
        return as_counts(&self.totals)

    cdef bint _reserve(self, slot_t slot, int32_t reach) noexcept nogil:
        """Take missing entries, of which there are some, from idle blocks; False: there are too few."""
        cdef int32_t target = self.tables.blocks_for(reach)
        if (target - self.tables.size[slot]) * self.tables.num_groups > self.tables.pool.num_idle():
            return False
        return self.tables._append(slot, target, target) == 0

    cdef void _shrink(self, slot_t slot, int32_t reach) noexcept nogil:
        """Free the entries behind position `reach`, which no step in flight and no planned step writes."""
        cdef int32_t target = self.tables.blocks_for(reach)
        cdef int32_t groups = self.tables.num_groups
        cdef int32_t g
        cdef int32_t j
        for j in range(self.tables.size[slot] - 1, target - 1, -1):
            for g in range(groups):
                if self.tables.rows[slot * groups + g][j]:
                    self.tables.pool.release(self.tables.rows[slot * groups + g][j])
        self.tables.size[slot] = min(self.tables.size[slot], target)
        self.tables.dirty[slot] = min(self.tables.dirty[slot], self.tables.size[slot])


cdef tuple as_counts(const DraftTotals* of):
    """Build the tuple of Drafts.counts, without zeros at the end of the places."""
    cdef int32_t end = MAX_WIDTH
    cdef int32_t k
    while end > 0 and not of.accepted_at[end - 1]:
        end -= 1
    places = tuple([of.accepted_at[k] for k in range(end)])
    return of.drafts, of.draft_tokens, of.accepted_tokens, of.invalid_tokens, places
