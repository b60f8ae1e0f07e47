"""RunningRows: the slots that hold blocks and are planned, sorted from best to worst.

Owner: the device thread, only through Scheduler. In: slots that start or stop running. Out: `slots[0 .. size - 1]` in
the order in which they get blocks. Rows are preempted from the end, so a row never takes a block from a better row, and
the first row always continues.
"""

from array import array

cimport cython

from _fast.types cimport IDLE_PRIORITY


@cython.final
cdef class RunningRows:
    """Order: (priority, arrival, running number), or without the priority; idle rows are last."""

    def __init__(self, SeqTable seqs not None, bint by_priority=False):
        self.seqs = seqs
        self.by_priority = by_priority
        self.size = 0
        self.slots = array("i", bytes(4 * seqs.num_slots))

    cdef bint precedes(self, slot_t a, slot_t b) noexcept nogil:
        """Whether a is better than b."""
        if self.seqs.of[a].priority != self.seqs.of[b].priority and (
            self.by_priority or self.seqs.of[a].priority == IDLE_PRIORITY or self.seqs.of[b].priority == IDLE_PRIORITY
        ):
            return self.seqs.of[a].priority < self.seqs.of[b].priority
        if self.seqs.of[a].arrival != self.seqs.of[b].arrival:
            return self.seqs.of[a].arrival < self.seqs.of[b].arrival
        return self.seqs.of[a].order < self.seqs.of[b].order

    cdef void enter(self, slot_t slot) noexcept nogil:
        """Add a slot that starts running. Search from the end, because the newest row is usually the worst."""
        cdef int32_t at = self.size
        while at and self.precedes(slot, self.slots[at - 1]):
            self.slots[at] = self.slots[at - 1]
            at -= 1
        self.slots[at] = slot
        self.size += 1

    cdef void leave(self, slot_t slot) noexcept nogil:
        """Remove a slot that stops running. Search from the end, because preempted rows are there."""
        cdef int32_t at = self.size - 1
        cdef slot_t moved = self.slots[at]
        cdef slot_t here
        while moved != slot:
            at -= 1
            here = self.slots[at]
            self.slots[at] = moved
            moved = here
        self.size -= 1

    cdef slot_t last_idle(self) noexcept nogil:
        """The worst row if it is idle, else -1: no row is idle."""
        cdef slot_t slot = self.slots[self.size - 1] if self.size else -1
        return slot if slot >= 0 and self.seqs.of[slot].priority == IDLE_PRIORITY else -1

    cdef int32_t num_idle(self) noexcept nogil:
        """Number of idle rows."""
        cdef int32_t count = 0
        while count < self.size and self.seqs.of[self.slots[self.size - 1 - count]].priority == IDLE_PRIORITY:
            count += 1
        return count

    def __len__(self):
        return self.size
