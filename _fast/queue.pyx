"""WaitQueue: which waiting slot comes next, by arrival or by (priority, arrival).

Owner: the device thread. In: a slot with its priority, arrival time and running number; whether it comes again after
a preemption. Out: the first slot; any slot can leave from anywhere in O(log n). A binary heap of slots, with each
slot's place in it. By arrival, preempted slots go in front of all new ones; by priority they keep their own place.

While a step is filled, slots that do not fit into what is left of it may be set aside, so that others overtake them;
then they are taken back. A slot that was overtaken in one step is never set aside again.
"""

from array import array

cimport cython


@cython.final
cdef class WaitQueue:
    """A heap of slots; ties of arrival fall to the running number, so the order is total."""

    def __init__(self, int32_t num_slots, bint by_priority=False, bint looks_past=False):
        if num_slots < 1:
            raise ValueError(f"num_slots={num_slots}: need at least 1")
        self.size = 0
        self.by_priority = by_priority
        self.looks_past = looks_past
        self.heap = array("i", bytes(4 * num_slots))
        self.place = array("i", [-1]) * num_slots
        self.rank = array("i", bytes(4 * num_slots))
        self.arrival = array("d", bytes(8 * num_slots))
        self.order = array("q", bytes(8 * num_slots))
        self.overtaken = array("B", bytes(num_slots))
        self.aside = array("i", bytes(4 * LOOK_PAST))
        self.num_aside = self.num_overtaken = 0

    cdef slot_t first(self) noexcept nogil:
        """The slot that comes next, or -1."""
        return self.heap[0] if self.size else -1

    cdef void push(self, slot_t slot, int32_t priority, double arrival, int64_t order, bint again) noexcept nogil:
        """A slot that is not in the queue enters it."""
        if self.by_priority:
            self.rank[slot] = priority
        else:
            self.rank[slot] = 0 if again else 1
        if not again:
            self.overtaken[slot] = 0
        self.arrival[slot] = arrival
        self.order[slot] = order
        self._enter(slot)

    cdef void _enter(self, slot_t slot) noexcept nogil:
        self.heap[self.size] = slot
        self.place[slot] = self.size
        self.size += 1
        self._rise(self.size - 1)

    cdef bint remove(self, slot_t slot) noexcept nogil:
        """Take a slot out, wherever it stands; False when it is not here. It overtakes all that stand aside."""
        self.num_overtaken = self.num_aside
        return self._leave(slot)

    cdef bint _leave(self, slot_t slot) noexcept nogil:
        cdef int32_t at = self.place[slot]
        cdef slot_t last
        if at < 0:
            return False
        self.size -= 1
        last = self.heap[self.size]
        self.place[slot] = -1
        if last != slot:
            self.heap[at] = last
            self.place[last] = at
            self._rise(at)
            self._sink(self.place[last])
        return True

    cdef bint set_aside(self, slot_t slot) noexcept nogil:
        """Takes a slot out until `take_back`; False when it was overtaken before, or too many stand aside."""
        if not self.looks_past or self.overtaken[slot] or self.num_aside == LOOK_PAST:
            return False
        self._leave(slot)
        self.aside[self.num_aside] = slot
        self.num_aside += 1
        return True

    cdef void take_back(self) noexcept nogil:
        """Those that stand aside wait again, where they were."""
        cdef int32_t k
        for k in range(self.num_aside):
            if k < self.num_overtaken:
                self.overtaken[self.aside[k]] = 1
            self._enter(self.aside[k])
        self.num_aside = self.num_overtaken = 0

    cdef bint ahead(self, slot_t a, slot_t b) noexcept nogil:
        """Whether a comes before b."""
        if self.rank[a] != self.rank[b]:
            return self.rank[a] < self.rank[b]
        if self.arrival[a] != self.arrival[b]:
            return self.arrival[a] < self.arrival[b]
        return self.order[a] < self.order[b]

    cdef void _rise(self, int32_t at) noexcept nogil:
        cdef slot_t slot = self.heap[at]
        cdef int32_t up
        while at:
            up = (at - 1) >> 1
            if not self.ahead(slot, self.heap[up]):
                break
            self.heap[at] = self.heap[up]
            self.place[self.heap[at]] = at
            at = up
        self.heap[at] = slot
        self.place[slot] = at

    cdef void _sink(self, int32_t at) noexcept nogil:
        cdef slot_t slot = self.heap[at]
        cdef int32_t down = 2 * at + 1
        while down < self.size:
            if down + 1 < self.size and self.ahead(self.heap[down + 1], self.heap[down]):
                down += 1
            if not self.ahead(self.heap[down], slot):
                break
            self.heap[at] = self.heap[down]
            self.place[self.heap[at]] = at
            at = down
            down = 2 * at + 1
        self.heap[at] = slot
        self.place[slot] = at

    # What tests see.

    def add(self, int32_t slot, int32_t priority=0, double arrival=0.0, int64_t order=0, bint again=False):
        """A slot enters."""
        if not 0 <= slot < self.place.shape[0]:
            raise ValueError(f"slot {slot}: this queue serves slots 0 to {self.place.shape[0] - 1}")
        if self.place[slot] >= 0:
            raise ValueError(f"slot {slot} is in the queue already")
        self.push(slot, priority, arrival, order, again)

    def discard(self, int32_t slot):
        """A slot leaves; says whether it was there."""
        if not 0 <= slot < self.place.shape[0]:
            raise ValueError(f"slot {slot}: this queue serves slots 0 to {self.place.shape[0] - 1}")
        return self.remove(slot)

    def peek(self):
        """The slot that comes next, or -1."""
        return self.first()
