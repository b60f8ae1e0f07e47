"""Leftovers: what prompts that wait have left of a step goes to running rows, where that takes no row's blocks.

Owner: the device thread, through Scheduler alone. In: the shares of a step in which whoever waits has started; how
many block-table changes its plan still takes. Out: larger shares, blocks for them, and how many changes are left.
Prompts come first, then rows that stood back for prompts which did not fill the step after all.
"""

cimport cython

from _fast.types cimport RUNNING


@cython.final
cdef class Leftovers:
    """Nothing of its own: it reads and writes what it is given."""

    def __init__(self, SeqTable seqs not None, BlockTables tables not None, TokenShares shares not None):
        self.seqs, self.tables, self.shares = seqs, tables, shares

    cdef int32_t to_prompts(self, int32_t updates_left) noexcept nogil:
        """Longer chunks for prompts that have one in this step."""
        cdef int32_t i
        cdef int32_t end
        cdef int32_t more
        cdef int32_t missing
        cdef slot_t slot
        for i in range(self.shares.num_prompts):
            slot = self.shares.prompts[i]
            if self.shares.tokens_left <= 0:
                break
            if self.shares.of[slot] == 0 or self.seqs.span_at[slot] < self.seqs.num_spans[slot]:
                continue
            more = self.shares.fitting(self.seqs.left(slot) - self.shares.of[slot])
            more = min(more, self.shares.max_chunk - self.shares.of[slot])
            end = self.seqs.computed[slot] + self.shares.of[slot] + more
            missing = max(self.tables.missing(slot, end), 0)
            if more <= 0 or missing > updates_left or not self._has_blocks(slot, end):
                continue
            updates_left -= missing
            self.shares.of[slot] += more
            self.shares.take(more)
        return updates_left

    cdef int32_t to_held(self, int32_t updates_left) noexcept nogil:
        """A token each for rows that stand back, the best first."""
        cdef int32_t i
        cdef int32_t changed
        cdef slot_t slot
        for i in range(self.shares.num_held):
            slot = self.shares.held[i]
            if self.shares.tokens_left <= 0:
                break
            if self.seqs.state[slot] != RUNNING or not self._has_blocks(slot, self.seqs.computed[slot] + 1):
                continue
            changed = self.tables.num_changed(slot)
            if changed > updates_left:
                continue
            updates_left -= changed
            self.shares.of[slot] = 1
            self.shares.take(1)
        return updates_left

    cdef bint _has_blocks(self, slot_t slot, int32_t end) noexcept nogil:
        """Whether the row has the blocks up to `end`, or takes them from those that lie idle."""
        cdef int32_t missing = self.tables.missing(slot, end)
        if missing <= 0:
            return True
        if missing > self.tables.pool.num_free + self.tables.pool.num_cached:
            return False
        return self.tables.grow(slot, end) == 0
