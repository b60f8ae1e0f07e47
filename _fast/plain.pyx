"""PlainRows: rows that decode one token after the other, planned and settled in straight lines.

Owner: the device thread, through Scheduler alone. In: the running rows; a plan and its tokens. Out: the plan of a step
in which every row decodes; the settled facts of rows that go on. Whatever else may come up is the scheduler's own:
fit() refuses a step, settle() stops at a row, and neither has changed anything of what it refuses.

Between two steps a core sleeps and forgets: what counts is how many lines of memory are waited for, one behind the
other. So the loops read arrays by slot, which lie dense, ask for what lies scattered some rows ahead, and let blocks
that became full be named together, at the end.
"""

from array import array

cimport cython

from _fast.seqs cimport Near
from _fast.types cimport FINISH_NONE, ROW_FEED, ROW_SAMPLE, RUNNING, int64_t, uint8_t

cdef extern from *:
    """
    #define omniloop_fetch(at) __builtin_prefetch(at, 1)
    """
    void fetch "omniloop_fetch"(const void* at) noexcept nogil

cdef int32_t AHEAD = 24  # rows; a core waits for some sixteen lines at a time, and finds their pages first


@cython.final
cdef class PlainRows:
    """No state of its own but the slots whose blocks are to be named."""

    def __init__(self, SeqTable seqs not None, BlockTables tables not None, RunningRows running not None):
        self.seqs, self.tables, self.running = seqs, tables, running
        self.crossed = array("i", bytes(4 * seqs.num_slots))

    cdef bint fit(self, StepPlan plan) noexcept nogil:
        """Whether every running row decodes and can have its token, without a block or an update too many."""
        cdef const int32_t* slots = &self.running.slots[0]
        cdef const int32_t* num_tokens = &self.seqs.num_tokens[0]
        cdef const int32_t* pending = &self.seqs.pending[0]
        cdef const int32_t* max_len = &self.seqs.max_len[0]
        cdef const int32_t* computed = &self.seqs.computed[0]
        cdef const int32_t* span_at = &self.seqs.span_at[0]
        cdef const int32_t* num_spans = &self.seqs.num_spans[0]
        cdef const int32_t* size = &self.tables.size[0]
        cdef const int32_t* dirty = &self.tables.dirty[0]
        cdef int32_t block_size = self.tables.block_size
        cdef int32_t odd = 0
        cdef int32_t grown = 0
        cdef int32_t changed = 0
        cdef int32_t i
        cdef int32_t known
        cdef int32_t goes_on
        cdef slot_t slot
        for i in range(self.running.size):
            slot = slots[i]
            known = num_tokens[slot] + pending[slot]
            goes_on = known < max_len[slot]
            odd |= goes_on & ((known - computed[slot] != 1) | (span_at[slot] < num_spans[slot]))
            if computed[slot] >= size[slot] * block_size:
                fetch(&self.tables.rows[slot * self.tables.num_groups][size[slot]])
                grown += goes_on
            changed += size[slot] - dirty[slot]
        grown *= self.tables.num_groups
        changed = changed * self.tables.num_groups + grown
        if odd or changed > plan.max_updates:
            return False
        return grown <= self.tables.pool.num_free + self.tables.pool.num_cached

    cdef void emit(self, StepPlan plan) noexcept nogil:
        """Write the rows of a step that fits into a clear plan: each has a token, and each samples."""
        cdef const int32_t* slots = &self.running.slots[0]
        cdef const int32_t* num_tokens = &self.seqs.num_tokens[0]
        cdef const int32_t* max_len = &self.seqs.max_len[0]
        cdef const int32_t* epoch = &self.seqs.epoch[0]
        cdef const int64_t* request = &self.seqs.request[0]
        cdef int32_t* pending = &self.seqs.pending[0]
        cdef int32_t* computed = &self.seqs.computed[0]
        cdef int32_t* in_flight = &self.seqs.in_flight[0]
        cdef const int32_t* size = &self.tables.size[0]
        cdef const int32_t* dirty = &self.tables.dirty[0]
        cdef int32_t block_size = self.tables.block_size
        cdef int32_t row = 0
        cdef int32_t i
        cdef int32_t start
        cdef int32_t fed
        cdef slot_t slot
        for i in range(self.running.size):
            slot = slots[i]
            start = computed[slot]
            if num_tokens[slot] + pending[slot] >= max_len[slot]:
                continue
            if start >= size[slot] * block_size and self.tables.grow(slot, start + 1) < 0:
                continue
            fed = pending[slot] != 0
            plan.row_slot[row] = slot
            plan.row_len[row] = 1
            plan.row_computed[row] = start
            plan.row_epoch[row] = epoch[slot]
            plan.out_request[row] = request[slot]
            plan.row_flags[row] = ROW_SAMPLE | (ROW_FEED if fed else 0)
            plan.token_ids[row] = -1 if fed else self.seqs.tokens[slot][start]
            pending[slot] += 1
            computed[slot] = start + 1
            in_flight[slot] += 1
            if dirty[slot] < size[slot]:
                self.tables.send(slot, plan)
            row += 1
            plan.row_start[row] = row
        plan.num_rows = plan.num_tokens = plan.num_decode_rows = plan.num_sampled = row

    cdef int32_t settle(self, StepPlan plan, int32_t row, const token_t* sampled) noexcept nogil:
        """Settle rows from this one on, up to the first that does not simply go on; its number."""
        cdef const int32_t* slots = &plan.row_slot[0]
        cdef const int32_t* flags = &plan.row_flags[0]
        cdef const int32_t* planned_epoch = &plan.row_epoch[0]
        cdef const uint8_t* state = &self.seqs.state[0]
        cdef const uint8_t* void = &self.seqs.void[0]
        cdef const uint8_t* doomed = &self.seqs.doomed[0]
        cdef const int32_t* epoch = &self.seqs.epoch[0]
        cdef const int32_t* room = &self.seqs.token_room[0]
        cdef const int32_t* max_len = &self.seqs.max_len[0]
        cdef const int32_t* span_done = &self.seqs.span_done[0]
        cdef const int32_t* num_spans = &self.seqs.num_spans[0]
        cdef const int32_t* boundary = &self.seqs.boundary[0]
        cdef const Near* near
        cdef token_t** tokens = self.seqs.tokens
        cdef int32_t* num_tokens = &self.seqs.num_tokens[0]
        cdef int32_t* pending = &self.seqs.pending[0]
        cdef int32_t* in_flight = &self.seqs.in_flight[0]
        cdef int32_t* committed = &self.seqs.committed[0]
        cdef int32_t last = plan.num_rows - 1
        cdef int32_t length
        cdef token_t token
        cdef slot_t slot
        while row <= last:
            slot = slots[min(row + AHEAD, last)]
            fetch(tokens[slot] + num_tokens[slot])
            slot = slots[row]
            token = sampled[row]
            length = num_tokens[slot] + 1
            near = &self.seqs.near[slot]
            if not (
                (state[slot] == RUNNING) & (void[slot] == 0) & (doomed[slot] == 0)
                & (planned_epoch[row] == epoch[slot]) & (flags[row] & ROW_SAMPLE)
                & (token >= 0) & (length <= room[slot]) & (length < max_len[slot])
                & (token != near.id[0]) & (token != near.id[1]) & (token != near.id[2]) & (token != near.id[3])
                & (near.more == 0) & (span_done[slot] >= num_spans[slot])
            ):
                return row
            tokens[slot][length - 1] = token
            num_tokens[slot] = length
            pending[slot] -= 1
            in_flight[slot] -= 1
            plan.out_token[row] = token
            plan.out_finish[row] = FINISH_NONE
            committed[slot] = plan.row_computed[row] + plan.row_len[row]
            self.crossed[self.num_crossed] = slot
            self.num_crossed += committed[slot] >= boundary[slot]
            row += 1
        return row

    cdef void name_blocks(self) noexcept nogil:
        """After all rows: name and drop what those that settle() went past have filled and left behind."""
        self.tables.settle_all(&self.crossed[0], self.num_crossed)
        self.num_crossed = 0
