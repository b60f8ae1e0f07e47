"""PlainRows: rows that decode one token after the other, planned and settled in straight lines.

Owner: the device thread, through Scheduler alone. In: the running rows; a plan and its tokens. Out: the plan of a step
in which every row decodes; the settled facts of rows that go on. Whatever else may come up is the scheduler's own:
fit() refuses a step, settle() stops at a row, and neither has changed anything of what it refuses.

Between two steps a core sleeps and forgets: what counts is how many lines of memory are waited for, one behind the
other. So a row is looked at once in many steps: `open_to` and `goes_to` say up to which length nothing can come up but
a stop token, and forget() takes that back when something else than the next token happens to the row. A plan that has
the same rows as when it was used last keeps all but their lengths. The loops read arrays by slot, which lie dense, ask
for what lies scattered some rows ahead, and let blocks that became full be named together, at the end.
"""

cimport cython

from _fast.layout cimport ROW_FEED, ROW_SAMPLE
from _fast.types cimport RUNNING

cdef extern from *:
    """
    #define omniloop_fetch(at) __builtin_prefetch(at, 1)
    """
    void fetch "omniloop_fetch"(const void* at) noexcept nogil

cdef int32_t AHEAD = 24  # rows; a core waits for some sixteen lines at a time, and finds their pages first


@cython.final
cdef class PlainRows:
    """What it keeps of a row says how far that simply goes on, which is looked at anew where it ends."""

    def __init__(self, SeqTable seqs not None, BlockTables tables not None, RunningRows running not None):
        self.seqs, self.tables, self.running = seqs, tables, running
        self.slots = &running.slots[0]
        self.computed = &seqs.computed[0]
        self.pending = &seqs.pending[0]
        self.in_flight = &seqs.in_flight[0]
        self.epoch = &seqs.epoch[0]
        self.num_tokens = &seqs.num_tokens[0]
        self.committed = &seqs.committed[0]
        self.near = seqs.near
        self.tokens = seqs.tokens
        self.open_to = <int32_t*>seqs.columns.room(<size_t>seqs.num_slots * sizeof(int32_t))
        self.goes_to = <int32_t*>seqs.columns.room(<size_t>seqs.num_slots * sizeof(int32_t))
        self.crossed = <slot_t*>seqs.columns.room(<size_t>seqs.num_slots * sizeof(slot_t))

    cdef void forget(self, slot_t slot) noexcept nogil:
        """Something else than its next token has happened to a row."""
        self.open_to[slot] = self.goes_to[slot] = 0

    cdef bint fit(self, StepPlan plan) noexcept nogil:
        """Whether every running row decodes and can have its token, without a block or an update too many."""
        cdef int32_t odd = 0
        cdef int32_t grown = 0
        cdef int32_t changed = 0
        cdef int32_t i
        cdef int32_t known
        cdef int32_t goes_on
        cdef slot_t slot
        for i in range(self.running.size):
            slot = self.slots[i]
            if self.computed[slot] < self.open_to[slot]:
                continue
            known = self.seqs.num_tokens[slot] + self.seqs.pending[slot]
            goes_on = known < self.seqs.max_len[slot]
            odd |= goes_on & (known - self.computed[slot] != 1)
            odd |= goes_on & (self.seqs.span_at[slot] < self.seqs.num_spans[slot])
            if self.seqs.computed[slot] >= self.tables.size[slot] * self.tables.block_size:
                fetch(&self.tables.rows[slot * self.tables.num_groups][self.tables.size[slot]])
                grown += goes_on
            changed += self.tables.size[slot] - self.tables.dirty[slot]
        grown *= self.tables.num_groups
        changed = changed * self.tables.num_groups + grown
        if odd or changed > plan.max_updates:
            return False
        return grown == 0 or grown <= self.tables.pool.num_free + self.tables.pool.num_cached

    cdef void emit(self, StepPlan plan) noexcept nogil:
        """Write the rows of a step that fits into a clear plan: each has a token, and each samples."""
        cdef bint same = plan.rows_of == self.running.version
        cdef int32_t row = 0
        cdef int32_t fed = 0
        cdef int32_t i
        cdef int32_t start
        cdef slot_t slot
        for i in range(self.running.size):
            slot = self.slots[i]
            start = self.computed[slot]
            if start >= self.open_to[slot] and not self._opened(slot, plan):
                same = False
                continue
            plan.lines.computed[row] = start
            fed += self.pending[slot] != 0
            if not (same and self.pending[slot]):
                same = False
                self._write(plan, row, slot, start)
            self.pending[slot] += 1
            self.computed[slot] = start + 1
            self.in_flight[slot] += 1
            row += 1
        plan.num_rows = plan.num_tokens = plan.num_decode_rows = plan.num_sampled = row
        plan.rows_of = self.running.version if fed == self.running.size else -1

    cdef bint _opened(self, slot_t slot, StepPlan plan) noexcept nogil:
        """Blocks for a row's next token, and how far it goes with them. False: it gets none, its last is on its way."""
        cdef int32_t start = self.seqs.computed[slot]
        if self.seqs.num_tokens[slot] + self.seqs.pending[slot] >= self.seqs.max_len[slot]:
            return False
        if start >= self.tables.size[slot] * self.tables.block_size and self.tables.grow(slot, start + 1) < 0:
            return False
        plan.num_prompt_rows += start < self.seqs.prompt_len[slot]
        if self.tables.dirty[slot] < self.tables.size[slot]:
            self.tables.send(slot, plan)
        # No row that decodes is further than one token behind, or computes any of its prompt, until it is forgotten.
        self.open_to[slot] = min(self.tables.size[slot] * self.tables.block_size, self.seqs.max_len[slot] - 1)
        return True

    cdef void _write(self, StepPlan plan, int32_t row, slot_t slot, int32_t start) noexcept nogil:
        """All of a row but the token's place: what stays in a plan while the same rows run."""
        cdef bint fed = self.pending[slot] != 0
        plan.lines.slot[row] = slot
        plan.lines.len[row] = 1
        plan.lines.epoch[row] = self.epoch[slot]
        plan.lines.out_request[row] = self.seqs.request[slot]
        plan.lines.flags[row] = ROW_SAMPLE | (ROW_FEED if fed else 0)
        plan.lines.token[row] = -1 if fed else self.tokens[slot][start]
        plan.lines.start[row + 1] = row + 1

    cdef int32_t settle(self, StepPlan plan, int32_t row, const token_t* sampled) noexcept nogil:
        """Settle rows from this one on, up to the first that does not simply go on; its number."""
        cdef const int32_t* slots = plan.lines.slot
        cdef const int32_t* flags = plan.lines.flags
        cdef const uint8_t* planned_epoch = plan.lines.epoch
        cdef int32_t* out_token = plan.lines.out_token
        cdef const Near* near
        cdef bint all_sample = plan.num_sampled == plan.num_rows
        cdef int32_t last = plan.num_rows - 1
        cdef int32_t length
        cdef token_t token
        cdef slot_t slot
        while row <= last:
            slot = slots[min(row + AHEAD, last)]
            fetch(self.tokens[slot] + self.num_tokens[slot])
            slot = slots[row]
            token = sampled[row]
            length = self.num_tokens[slot] + 1
            near = &self.near[slot]
            if not (
                (planned_epoch[row] == self.epoch[slot]) & (token >= 0)
                & (token != near.id[0]) & (token != near.id[1]) & (token != near.id[2]) & (token != near.id[3])
            ) or not (all_sample or flags[row] & ROW_SAMPLE):
                return row
            if length >= self.goes_to[slot] and not self._goes_on(slot, length):
                return row
            self.tokens[slot][length - 1] = token
            self.num_tokens[slot] = length
            self.pending[slot] -= 1
            self.in_flight[slot] -= 1
            self.committed[slot] = length - 1  # all that it read
            out_token[row] = token
            row += 1
        return row

    cdef bint _goes_on(self, slot_t slot, int32_t length) noexcept nogil:
        """Whether a row goes on with so many tokens, and how far from there on; its full blocks are to be named."""
        if (
            self.seqs.state[slot] != RUNNING or self.seqs.void[slot] or self.seqs.doomed[slot]
            or length > self.seqs.token_room[slot] or length >= self.seqs.max_len[slot]
            or self.seqs.num_eos[slot] + self.seqs.num_stop[slot] > 4
            or self.seqs.span_done[slot] < self.seqs.num_spans[slot]
        ):
            return False
        if length - 1 >= self.seqs.boundary[slot]:
            self.crossed[self.num_crossed] = slot
            self.num_crossed += 1
            self.goes_to[slot] = 0
        else:
            self.goes_to[slot] = min(self.seqs.token_room[slot], self.seqs.boundary[slot]) + 1
            self.goes_to[slot] = min(self.goes_to[slot], self.seqs.max_len[slot])
        return True

    cdef void name_blocks(self) noexcept nogil:
        """After all rows: name and drop what those that settle() went past have filled and left behind."""
        cdef int32_t i
        if self.num_crossed == 0:
            return
        self.tables.settle_all(self.crossed, self.num_crossed)
        for i in range(self.num_crossed):
            self.forget(self.crossed[i])  # a block of its table may be another now
        self.num_crossed = 0
