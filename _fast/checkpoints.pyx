"""Checkpoints: tracks which runs hold named states and the order in which they are dropped, and provides new runs.

Owner: the device thread, through BlockTables and StateRuns. In: states whose steps are committed. Out: runs for rows,
states for rows whose prefix is known, the blocks of new runs for the StepPlan. A state after j + 1 blocks has the place
of entry j:

    primary group   root <- block 0 <- block 1 <- block 2      a state is attached to the block of its entry: it is
    states                             state                   found through it, and dropped with the block's name
    no primary      root <- hash 0  <- hash 1  <- hash 2       a state has its own name in the prefix index

So a state is found only with the salt, media and adapter of its prefix. Idle states hold at most `most_idle` blocks.
Beyond this limit, and when no other idle block is left, states are dropped from two lists, least recently used first.
The first list has states at which no row has begun, and states whose only such row has named a longer prefix since. The
second list has the others. It goes first if it holds more than half of `most_idle`, so that new states have room.
"""

from array import array

cimport cython

from _fast.blocks cimport SPARE_STATES, STATE_RUN, WORN_STATES
from _fast.layout cimport HEADER_NUM_RUNS
from _fast.names cimport name_entry
from _fast.prefix cimport Name


@cython.final
cdef class Checkpoints:
    """Named states of one scheduler; empty for models without states. Methods are called only for states."""

    def __init__(self, BlockPool pool not None, BlockNames names not None, int32_t group, double share,
                 int32_t most_new):
        cdef int32_t size = pool.sizes[STATE_RUN]
        self.pool = pool
        self.names = names
        self.group = group
        # Room for at least one state, even if the share is smaller; otherwise states would be written for nothing.
        self.most_idle = max(<int32_t>(share * pool.total), size) if share > 0.0 else 0
        self.most_new = most_new
        self.new = array("i", bytes(4 * (2 * most_new + 1)))
        self.sent = array("q", [-1] * pool.heads.shape[0])
        self.below = array("i", bytes(4 * (pool.total + 1 if size else 1)))
        self.hits = array("B", bytes(pool.total + 1 if size else 1))
        self.under = array("i", bytes(4 * (pool.total + 1 if size else 1)))

    cdef block_t acquire(self, int32_t kind) noexcept nogil:
        """Return a run with one user: an idle run, or a new run from idle blocks, named blocks last. 0: no room."""
        cdef block_t head = self.pool.first_run(kind)
        cdef block_t oldest
        if head:
            self.pool.hold(head)
            return head
        if self.num_new >= self.most_new or self.pool.num_idle() < self.pool.sizes[kind]:
            return 0
        oldest = self._oldest() if self.pool.num_free < self.pool.sizes[kind] else 0
        while self.pool.num_free < self.pool.sizes[kind]:  # unnamed blocks in all lists count
            if oldest:
                oldest, head = self.pool.after[oldest], oldest
                self.forget(head)
            elif not self._evict():
                return 0
            head = self.pool.first_run(kind)
            if head:  # a state has lost its name
                self.pool.hold(head)
                return head
        head = self.pool.form(kind)
        if head:
            self.new[self.num_new] = self.pool.ids[head]
            self.num_new += 1
        return head

    cdef bint free_block(self) noexcept nogil:
        """Make sure that take() can hand out a block of the first list. False: no block is idle."""
        if self.pool.is_loose() or self.pool.loosen() or self.pool.after[0]:
            return True
        return self._evict() and self.pool.loosen()

    cdef block_t _oldest(self) noexcept nogil:
        """Return the least recently used idle named block, or 0."""
        cdef block_t block
        if self.pool.num_cached == self.pool.idle_blocks[SPARE_STATES] + self.pool.idle_blocks[WORN_STATES]:
            return 0
        block = self.pool.after[0]
        while not self.pool.named[block]:
            block = self.pool.after[block]
        return block

    cdef bint _evict(self) noexcept nogil:
        """Drop the name of the next idle state in drop order. False: there is none."""
        cdef block_t head = 0
        if 2 * self.pool.idle_blocks[WORN_STATES] <= self.most_idle:
            head = self.pool.first_run(SPARE_STATES)
        if not head:
            head = self.pool.first_run(WORN_STATES)
        if not head:
            head = self.pool.first_run(SPARE_STATES)
        if not head:
            return False
        self.drop(head)
        return True

    cdef void release(self, block_t head) noexcept nogil:
        """Remove a user of a run; drop idle states that exceed their share."""
        self.pool.release(head)
        if self.pool.named[head]:
            while self.pool.idle_blocks[SPARE_STATES] + self.pool.idle_blocks[WORN_STATES] > self.most_idle:
                self._evict()

    cdef void forget(self, block_t block) noexcept nogil:
        """Remove a block, and the state attached to it, from the prefix index."""
        self.names.index.remove(block)
        self.pool.unname(block)
        if self.pool.sizes[STATE_RUN] and self.below[block]:
            self.drop(self.below[block])

    cdef block_t find(self, slot_t slot, int32_t j, block_t above) noexcept nogil:
        """Return the state of entry j, or 0; above: the primary group's block of this entry."""
        return self.below[above] if self.names.primary >= 0 else self.names.find(slot, self.group, j, 0)

    cdef bint name(self, slot_t slot, int32_t j, block_t above, block_t head, uint8_t mark) noexcept nogil:
        """Make the run the state of entry j. False: there is one already, or the primary's block has no name."""
        cdef Name name
        cdef int32_t num_words
        if self.pool.named[head]:
            return False
        if self.names.primary >= 0:
            if not self.pool.named[above] or self.below[above]:
                return False
            self.below[above] = head
            self.under[head] = above
        else:
            if self.names.find(slot, self.group, j, 0):
                return False
            num_words = self.names.seqs.gather(
                slot, j * self.names.block_size, self.names.block_size, &self.names.keys[0]
            )
            name_entry(self.names, slot, self.group, j, 0, &name)
            self.names.index.insert(head, &name, &self.names.keys[0], num_words)
        self.pool.named[head] = mark
        self.hits[head] = 0
        self.num_named += 1
        self.num_stored += 1
        return True

    cdef void hit(self, block_t head) noexcept nogil:
        """Add a user of a state: a row that begins at it."""
        self.pool.hold(head)
        self.pool.mark(head, 2)
        self.hits[head] += self.hits[head] < 255
        self.num_hit += 1

    cdef void supersede(self, block_t head, block_t above) noexcept nogil:
        """Mark a state, because the row that named it or began at it has named a longer prefix.

        above: the block to which the state was attached then. A state at which other rows began, too, is not marked.
        """
        if self.pool.named[head] and self.under[head] == above and self.hits[head] <= 1:
            self.pool.mark(head, 1)

    cdef void drop(self, block_t head) noexcept nogil:
        """Drop a state's name; a row that holds its run continues to use the run."""
        if self.names.primary >= 0:
            self.below[self.under[head]] = 0
            self.under[head] = 0
        else:
            self.names.index.remove(head)
        self.pool.unname(head)
        self.num_named -= 1
        self.num_dropped += 1

    cdef void drop_all(self) noexcept nogil:
        """Drop the names of all states."""
        cdef int32_t i
        for i in range(1, self.pool.heads.shape[0]):
            if self.pool.heads[i] > 0 and self.pool.named[self.pool.heads[i]]:
                self.drop(self.pool.heads[i])

    cdef void send(self, StepPlan plan, int64_t step) noexcept nogil:
        """Write the blocks of new runs into this step's plan: the run's id, then its blocks, then zeros."""
        cdef int32_t width = plan.lines.run_width
        cdef int32_t* line = plan.lines.runs
        cdef int32_t count = 0
        cdef int32_t k
        cdef int32_t i
        cdef block_t block
        for k in range(min(self.num_new, self.most_new)):
            block = self.pool.heads[self.new[k]]
            if block <= 0:  # broken up again
                continue
            line[0] = self.new[k]
            self.sent[self.new[k]] = step
            for i in range(1, width + 1):
                line[i] = block
                if block:
                    block = self.pool.next[block]
            line += width + 1
            count += 1
        self.num_new = 0
        plan.lines.record[HEADER_NUM_RUNS] = count

    cdef void send_again(self, StepPlan plan) noexcept nogil:
        """Resend new runs of a failed step, whose rows have ended: the device may not have their blocks."""
        cdef int32_t k
        cdef int32_t run
        cdef block_t head
        for k in range(plan.lines.record[HEADER_NUM_RUNS]):
            run = plan.lines.runs[k * (plan.lines.run_width + 1)]
            head = self.pool.heads[run]
            if self.sent[run] != plan.step_id:  # formed anew since, and sent by a later plan
                continue
            if head > 0 and self.pool.refs[head] == 0 and not self.pool.named[head]:
                self.pool.break_up(head)
            elif head > 0 and self.num_new < 2 * self.most_new:  # the next step has given it to another row
                self.new[self.num_new] = run
                self.num_new += 1

    cdef bint is_new(self, block_t head, StepPlan plan) noexcept nogil:
        """Whether the plan was the last to send the run's blocks to the device."""
        return head and self.sent[self.pool.ids[head]] == plan.step_id
