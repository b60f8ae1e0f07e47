"""Settler: applies a step's tokens: lengths, stops, names of full blocks, rows that end, fail or start over.

Owner: the device thread, through Scheduler, except for changes by grammars (redo, extend). In: the oldest plan in
flight with its tokens, or the fact that its step failed. Out: the plan's out_* arrays, free slots, the rows' new
lengths. A row that ends while a later step includes it keeps its slot until that step is settled; its blocks are free
at once. When a traced row ends, its end is reported at once, and the row is closing: slot and blocks stay until all of
its tokens, including the last, have been computed.
"""

from array import array

cimport cython

from _fast.layout cimport ROW_FEED, ROW_SAMPLE, TOKEN_END
from _fast.plan cimport most_of
from _fast.seqs cimport Seq, append, fetch, may_end, settle_promise
from _fast.types cimport FINISH_ERROR, FINISH_NONE, FINISH_STOP, FINISHING, RUNNING, WAITING


@cython.final
cdef class Settler:
    """Changes the scheduler's tables; no other code changes them between two plans."""

    def __init__(self, SeqTable seqs not None, BlockTables tables not None, RunningRows running not None,
                 WaitQueue queue not None, EncoderTable encoder not None, Drafts drafts not None, int64_t settled_step):
        self.seqs, self.tables, self.running, self.queue, self.encoder = seqs, tables, running, queue, encoder
        self.drafts = drafts
        self.settled_step = settled_step
        self.stateful = tables.states.active
        self.freed_slots = array("i", bytes(4 * seqs.num_slots))
        self.freed_lens = array("i", bytes(4 * seqs.num_slots))

    cdef void commit(self, StepPlan plan, const int32_t* sampled, const int32_t* override) noexcept nogil:
        """Settle all rows of the oldest plan in flight.

        sampled: a run of plan.width tokens per row; override: finish reasons per row, or NULL.
        """
        cdef int32_t row
        self.num_freed = 0
        self.load(plan)
        plan.clear_runs()
        for row in range(plan.num_rows):
            self._commit_row(plan, row, sampled + row * plan.width, override[row] if override else FINISH_NONE)
            plan.num_odd += (plan.lines.out_count[row] != 1) | (plan.lines.out_finish[row] != FINISH_NONE)
        if self.stateful:
            self._pass_states(plan)
        self.settled_step = plan.step_id

    cdef void load(self, StepPlan plan) noexcept nogil:
        """Begin to load what settling the rows reads and writes; each call uses what the calls before have loaded."""
        cdef const slot_t* slots = plan.lines.slot
        cdef int32_t row
        self.seqs.fetch_rows(slots, plan.num_rows)
        if plan.width > 1:
            self.drafts.budget.estimates.fetch(slots, plan.num_rows)
        self.seqs.fetch_ends(slots, plan.num_rows)
        for row in range(plan.num_rows):
            if self.seqs.of[slots[row]].num_tokens + plan.width >= self.seqs.of[slots[row]].boundary:
                self._fetch_names(slots[row])

    cdef void _fetch_names(self, slot_t slot) noexcept nogil:
        """Begin to load what gives the slot's next block its name."""
        cdef int32_t j = self.seqs.of[slot].num_named
        cdef int32_t g
        if not self.tables.caching or j >= self.tables.size[slot] or not self.seqs.of[slot].hashes:
            return
        fetch(self.seqs.of[slot].hashes + 2 * j)
        for g in range(self.tables.num_groups):
            self.tables.names.index.fetch(self.tables.rows[slot * self.tables.num_groups + g][j])
            if j:
                self.tables.names.index.fetch(self.tables.rows[slot * self.tables.num_groups + g][j - 1])

    cdef void _pass_states(self, StepPlan plan) noexcept nogil:
        """Drop intermediate states that the step wrote for rows that it does not settle."""
        cdef int32_t row
        for row in range(plan.num_rows):
            self.tables.states.pass_over(plan, row)

    def redo(self, int32_t slot):
        """Drop the slot's sample from the only step in flight, so that the position is computed again.

        For a row whose newest, just committed token changes which tokens may follow. False: the row has ended, or no
        such step is in flight; the next step takes the newest token from here, without drafts.
        """
        self._check_slot(slot)
        self.seqs.of[slot].chained = 0
        if self.seqs.of[slot].state != RUNNING or not self._drop_choice(slot):
            return False
        self.seqs.of[slot].computed = self.seqs.of[slot].num_tokens - 1
        return True

    def room(self, int32_t slot):
        """Return how many tokens the slot's answer may still get; 0 if the answer has ended or starts over."""
        self._check_slot(slot)
        if self.seqs.of[slot].state == FINISHING or self.seqs.of[slot].closing or self.seqs.of[slot].restarting:
            return 0
        return self.seqs.of[slot].max_len - self.seqs.of[slot].num_tokens

    def extend(self, int32_t slot, const token_t[::1] tokens):
        """Append tokens that the host knows after the slot's newest, just committed token.

        There must be room for them and for one more. The next step computes them like tokens of a prompt. A step in
        flight continues and computes the newest token. True: it would have chosen the first of these tokens, and its
        choice is dropped.
        """
        cdef bint dropped
        cdef Py_ssize_t k
        self.seqs.of[slot].chained = 0
        if tokens.shape[0] >= self.room(slot):
            raise ValueError(f"slot {slot}: room for {self.room(slot)} tokens; got {tokens.shape[0]} and one more")
        dropped = self._drop_choice(slot)
        for k in range(tokens.shape[0]):
            if append(&self.seqs.of[slot], tokens[k]) < 0:
                raise MemoryError(f"slot {slot}: no memory for a longer answer")
        return dropped

    cdef bint _drop_choice(self, slot_t slot) noexcept nogil:
        """Drop the token that the only step in flight chooses for the slot. False: there is no such step."""
        if self.seqs.of[slot].choosing != 1 or self.seqs.of[slot].in_flight != 1:
            return False
        self.seqs.drop_promises(slot)
        self.seqs.of[slot].redoing = 1
        self.seqs.of[slot].chained = 0
        return True

    cdef _check_slot(self, int32_t slot):
        if not 0 <= slot < self.seqs.num_slots:
            raise ValueError(f"slot {slot}: this scheduler has slots 0 to {self.seqs.num_slots - 1}")

    cdef void _commit_row(self, StepPlan plan, int32_t row, const token_t* run, int32_t forced) noexcept nogil:
        cdef slot_t slot = plan.lines.slot[row]
        cdef Seq* own = &self.seqs.of[slot]
        cdef int32_t flags = plan.lines.flags[row]
        cdef int32_t why = forced
        cdef int32_t end = plan.lines.computed[row] + plan.lines.len[row]
        if flags & ROW_FEED:  # the results that arrived meanwhile determine where the row began
            end = own.num_tokens
        own.in_flight -= 1
        if own.state == FINISHING:
            if own.in_flight == 0:
                self.end(slot)
            return
        if own.closing:
            why = FINISH_NONE
        if own.restarting:
            self._settle_promise(plan, row)
            return
        if own.redoing:
            own.redoing = 0
            if self.stateful and plan.lines.epoch[row] == own.epoch:  # folds stay valid
                self.tables.states.settle(slot, plan, row, self.tables.primary_row(slot))
            return
        if own.fails_at_settle:
            why = FINISH_ERROR
        elif flags & ROW_SAMPLE and not own.closing:
            self._settle_promise(plan, row)
            if plan.width > 1:
                self.drafts.note(plan, row, run)
            why = self._sample(plan, row, run, forced)
        # After a preemption the step's KV is lost, but its sample is still the row's next token.
        if plan.lines.epoch[row] == own.epoch and why != FINISH_ERROR:
            if plan.lines.out_count[row] > 1:  # the step has computed all tokens of its run except the newest
                own.computed += plan.lines.out_count[row] - 1
                end += plan.lines.out_count[row] - 1
            own.committed = end
            if end >= own.boundary:
                self.tables.settle(slot)
            if self.stateful:
                self.tables.states.settle(slot, plan, row, self.tables.primary_row(slot))
            if own.span_done < own.num_spans:
                self.encoder.passed(self.seqs, slot)
        if why == FINISH_ERROR:  # none of its computed blocks may be found again
            self.tables.disown(slot)
        if why:
            plan.lines.out_finish[row] = why
            self._finish(plan, row, run, why)
        if own.closing:
            self._end_closed(slot)

    cdef void _finish(self, StepPlan plan, int32_t row, const token_t* run, int32_t why) noexcept nogil:
        """End a settled row, or close it if it is traced."""
        cdef slot_t slot = plan.lines.slot[row]
        cdef Seq* own = &self.seqs.of[slot]
        if not own.traced or why == FINISH_ERROR:
            self.end(slot)
            return
        self.close(slot)
        if own.in_flight and plan.is_cut(row, run):  # the next step began after a cut token
            own.redoing = 1
            own.computed = own.num_tokens - 1

    cdef void _settle_promise(self, StepPlan plan, int32_t row) noexcept nogil:
        if plan.lines.flags[row] & ROW_SAMPLE:
            settle_promise(&self.seqs.of[plan.lines.slot[row]], most_of(&plan.lines, row))

    cdef void close(self, slot_t slot) noexcept nogil:
        """Close a row: it gets no more tokens; steps in flight are computed, but their samples are dropped."""
        self.seqs.of[slot].closing = 1
        self.seqs.of[slot].chained = 0
        self.seqs.drop_promises(slot)

    cdef void _end_closed(self, slot_t slot) noexcept nogil:
        """End a closing row if all its tokens are computed."""
        if self.seqs.of[slot].closing == 1 and self.seqs.of[slot].committed >= self.seqs.of[slot].num_tokens:
            self.seqs.of[slot].closing = 2
            self.end(slot)

    cdef int32_t _sample(self, StepPlan plan, int32_t row, const token_t* run, int32_t override) noexcept nogil:
        """Append a row's tokens up to the first that ends its request; return the reason, or FINISH_NONE.

        override: the reason for which the run's last token ends the request. An empty run ends the request, too: such a
        row yields other results than tokens.
        """
        cdef slot_t slot = plan.lines.slot[row]
        cdef Seq* own = &self.seqs.of[slot]
        cdef token_t* out = plan.lines.out_token + row * plan.width
        cdef int32_t why = FINISH_NONE
        cdef int32_t k
        if run[0] <= TOKEN_END:
            return override if override else FINISH_STOP
        for k in range(plan.width):
            if run[k] <= TOKEN_END:
                break
            if run[k] < 0 or append(own, run[k]) < 0:
                return override if override and run[k] < 0 else FINISH_ERROR
            out[k] = run[k]
            plan.lines.out_count[row] = <uint8_t>(k + 1)
            why = self.seqs.verdict(slot, run[k]) if may_end(own, run[k]) else FINISH_NONE
            if override and (k + 1 == plan.width or run[k + 1] <= TOKEN_END):
                return override
            if why:
                break
        return why

    cdef void fail(self, StepPlan plan, const uint8_t* again) noexcept nogil:
        cdef int32_t row
        cdef slot_t slot
        cdef Seq* own
        self.num_freed = 0
        plan.num_odd = plan.num_rows
        plan.clear_runs()
        for row in range(plan.num_rows):
            slot = plan.row_slot[row]
            own = &self.seqs.of[slot]
            own.in_flight -= 1
            if own.state == FINISHING:
                if own.in_flight == 0:
                    self.end(slot)
            elif own.restarting or (again and again[slot]):
                if not own.redoing:
                    self._settle_promise(plan, row)
                own.redoing = 0
                self._restart(slot)
            else:
                plan.out_finish[row] = FINISH_ERROR
                self.end(slot)
        for slot in range(self.seqs.num_slots):
            if self.seqs.of[slot].in_flight and self._reads(slot, plan):
                if again and again[slot]:
                    self._restart(slot)
                else:
                    self.seqs.of[slot].fails_at_settle = 1
        self.encoder.fail(plan.step_id)
        if self.stateful:
            self._pass_states(plan)
            self.tables.states.cache.send_again(plan)
        self.settled_step = plan.step_id

    cdef bint _reads(self, slot_t slot, StepPlan plan) noexcept nogil:
        """Whether a row in flight reads data that the plan's failed step should have written or sent."""
        if self.stateful and self.tables.states.has_new_runs(slot, plan):
            return True
        return self.encoder.tainted(self.seqs, slot, plan.step_id)

    cdef void end(self, slot_t slot) noexcept nogil:
        """End a request: free blocks and entries at once, and the slot when no step in flight includes it.

        Blocks that must still be read are freed with the slot, because the next step may write to free blocks.
        """
        if self.seqs.of[slot].state == RUNNING:
            self.running.leave(slot)
        elif self.seqs.of[slot].state == WAITING:
            self.queue.remove(slot)
        if self.seqs.of[slot].state != FINISHING:
            self.queue.charge(slot, self.seqs.of[slot].num_tokens - self.seqs.of[slot].prompt_len)
            self.encoder.drop(self.seqs, slot)
            self.seqs.of[slot].state = FINISHING
        if self.seqs.of[slot].closing != 2 or self.seqs.of[slot].in_flight == 0:
            self.tables.release(slot)
        if self.seqs.of[slot].in_flight == 0:
            self.freed_lens[self.num_freed] = self.seqs.of[slot].num_tokens if self.seqs.of[slot].closing == 2 else 0
            self.seqs.give(slot)
            self.freed_slots[self.num_freed] = slot
            self.num_freed += 1

    cdef void preempt(self, slot_t slot) noexcept nogil:
        """Preempt a running row: it gives up its blocks and returns to the queue; samples in flight still reach it."""
        cdef Seq* own = &self.seqs.of[slot]
        self.running.leave(slot)
        self.tables.release(slot)
        self.encoder.unpin(self.seqs, slot)
        own.state = WAITING
        own.epoch += 1
        own.chained = 0
        own.computed = own.committed = own.num_named = 0
        self.queue.push(slot, own.priority, own.arrival, own.order, True)
        self.num_preemptions += 1

    cdef void _restart(self, slot_t slot) noexcept nogil:
        """Make a row whose step failed start over; its later steps in flight read data that was never written."""
        self.seqs.of[slot].restarting = 1
        self.seqs.of[slot].fails_at_settle = 0
        if self.seqs.of[slot].state == RUNNING:
            self.preempt(slot)
