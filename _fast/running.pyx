"""RunningRows: the slots that hold blocks and are planned, sorted from the best to the worst.

Owner: the device thread, through Scheduler alone. In: slots that start or stop running. Out: `slots[0 .. size - 1]`
in the order in which they get blocks. Victims of preemption are taken from the end, so whoever needs a block never
takes it from a better row, and the first row always goes on.
"""

from array import array

cimport cython


@cython.final
cdef class RunningRows:
    """Order: (priority, arrival, running number), or without the priority."""

    def __init__(self, SeqTable seqs not None, bint by_priority=False):
        self.seqs = seqs
        self.by_priority = by_priority
        self.size = 0
        self.slots = array("i", bytes(4 * seqs.num_slots))

    cdef bint precedes(self, slot_t a, slot_t b) noexcept nogil:
        """Whether a is better than b."""
        if self.by_priority and self.seqs.priority[a] != self.seqs.priority[b]:
            return self.seqs.priority[a] < self.seqs.priority[b]
        if self.seqs.arrival[a] != self.seqs.arrival[b]:
            return self.seqs.arrival[a] < self.seqs.arrival[b]
        return self.seqs.order[a] < self.seqs.order[b]

    cdef void enter(self, slot_t slot) noexcept nogil:
        """A slot starts running. From the end: who comes last is mostly the worst."""
        cdef int32_t at = self.size
        while at and self.precedes(slot, self.slots[at - 1]):
            self.slots[at] = self.slots[at - 1]
            at -= 1
        self.slots[at] = slot
        self.size += 1

    cdef void leave(self, slot_t slot) noexcept nogil:
        """A running slot stops. From the end as well: victims stand there."""
        cdef int32_t at = self.size - 1
        cdef slot_t moved = self.slots[at]
        cdef slot_t here
        while moved != slot:
            at -= 1
            here = self.slots[at]
            self.slots[at] = moved
            moved = here
        self.size -= 1

    def __len__(self):
        return self.size
