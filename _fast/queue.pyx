"""WaitQueue: order of waiting slots: fair between flows, and within a flow by arrival or by (priority, arrival).

Owner: the device thread. In: a slot with its flow (the request's client), prompt tokens, priority, arrival time,
running number and deadline, and whether it was preempted. Out: the next slot. Any slot can leave. Turns (_fast/turns)
selects the flow that is served; with one flow, its order is the order of the queue. By arrival, preempted slots come
before all flows; by priority they keep their place in their flow. Idle slots (IDLE_PRIORITY) have a line of their own,
by arrival, behind all flows and preempted slots, and pay nothing. A slot whose deadline has passed is removed before a
step is planned, and `take_expired` reports it.

While a step is filled, slots that do not fit into its remaining room may be set aside, so that others overtake them;
afterwards they return. A slot that was overtaken in one step is never set aside again.
"""

from array import array

cimport cython
from libc.math cimport INFINITY

from _fast.launcher cimport now
from _fast.types cimport IDLE_PRIORITY


@cython.final
cdef class WaitQueue:
    """One line of slots per flow; the running number breaks ties of arrival, so the order is total."""

    def __init__(self, int32_t num_slots, bint by_priority=False, bint looks_past=False):
        if num_slots < 1:
            raise ValueError(f"num_slots={num_slots}: need at least 1")
        self.size = self.num_expired = 0
        self.num_slots = num_slots
        self.by_priority = by_priority
        self.looks_past = looks_past
        self.turns = Turns(num_slots + 1)  # one more than slots: the flow of a request for which no slot is free
        self.preempted = self.turns.num_flows
        self.next_deadline = INFINITY
        self.slots, self.flow, self.line, self.rank, self.expired = [array("i", bytes(4 * num_slots)) for _ in range(5)]
        self.place, self.before, self.behind = [array("i", [-1]) * num_slots for _ in range(3)]
        self.head, self.tail = [array("i", [-1]) * (self.preempted + 2) for _ in range(2)]
        self.arrival = array("d", bytes(8 * num_slots))
        self.order, self.cost = array("q", bytes(8 * num_slots)), array("q", bytes(8 * num_slots))
        self.deadline = array("d", [INFINITY]) * num_slots
        self.overtaken = array("B", bytes(num_slots))
        self.aside = array("i", bytes(4 * LOOK_PAST))
        self.num_aside = self.num_overtaken = 0

    cdef void enlist(self, slot_t slot, int32_t flow, int32_t weight, int64_t cost, double deadline,
                     int32_t priority, double arrival, int64_t order) noexcept nogil:
        """Add a new slot with its flow, its cost, the deadline of its first step, and its place in the line."""
        self.flow[slot] = flow
        if priority != IDLE_PRIORITY:
            self.turns.meet(flow)
            self.turns.weight[flow] = weight
        self.cost[slot] = cost
        self.deadline[slot] = deadline
        self.push(slot, priority, arrival, order, False)

    cdef slot_t first(self) noexcept nogil:
        """Return the next slot, or -1; the result stays the same until a slot enters or leaves."""
        cdef slot_t slot = self.first_client()
        return slot if slot >= 0 else self.head[self.preempted + 1]

    cdef slot_t first_client(self) noexcept nogil:
        """Return the next slot that is not idle, or -1."""
        cdef slot_t again = self.head[self.preempted]
        cdef int32_t flow
        if again >= 0 or self.size == 0:
            return again
        flow = self.turns.flow()
        return self.head[flow] if flow >= 0 else -1

    cdef int32_t num_clients(self) noexcept nogil:
        """Number of waiting slots that are not idle."""
        cdef int32_t count = self.size
        cdef slot_t slot = self.head[self.preempted + 1]
        while slot >= 0:
            count -= 1
            slot = self.behind[slot]
        return count

    cdef slot_t newcomer(self, int32_t[::1] running, int32_t count) noexcept nogil:
        """The next slot, not an idle one, of a flow without any of these running rows, or -1; preempted slots come
        first."""
        cdef slot_t found
        cdef int32_t k
        if self.size == 0:
            return -1
        for k in range(count):
            if self.line[running[k]] <= self.preempted:  # an idle row is no row of its caller's requests
                self.turns.passed[self.flow[running[k]]] = 1
        found = self.first_client()
        for k in range(count):
            self.turns.passed[self.flow[running[k]]] = 0
        return found

    cdef void push(self, slot_t slot, int32_t priority, double arrival, int64_t order, bint again) noexcept nogil:
        """Add a slot that is not in the queue. A preempted slot (again) has already paid and has no deadline."""
        self.rank[slot] = priority if self.by_priority else 0
        self.line[slot] = self.preempted if again and not self.by_priority else self.flow[slot]
        if priority == IDLE_PRIORITY:
            self.line[slot] = self.preempted + 1
        if again:
            self.cost[slot] = 0
            self.deadline[slot] = INFINITY
        else:
            self.overtaken[slot] = 0
        self.arrival[slot] = arrival
        self.order[slot] = order
        self._enter(slot)

    cdef void _enter(self, slot_t slot) noexcept nogil:
        cdef int32_t line = self.line[slot]
        cdef slot_t left = self.tail[line]
        cdef slot_t right = -1
        self.slots[self.size] = slot
        self.place[slot] = self.size
        self.size += 1
        while left >= 0 and self.precedes(slot, left):  # from the end, because the newest slot usually belongs there
            right = left
            left = self.before[left]
        self.before[slot] = left
        self.behind[slot] = right
        if left >= 0:
            self.behind[left] = slot
        else:
            self.head[line] = slot
        if right >= 0:
            self.before[right] = slot
        else:
            self.tail[line] = slot
        self.next_deadline = min(self.next_deadline, self.deadline[slot])
        self._offer(line)

    cdef void _offer(self, int32_t line) noexcept nogil:
        """Update Turns after a slot has entered or left a line."""
        if line < self.preempted:
            self.turns.offer(line, self.head[line] >= 0)

    cdef bint remove(self, slot_t slot) noexcept nogil:
        """Remove a slot from any place; False if it does not wait."""
        cdef int32_t k
        if not self._leave(slot):
            for k in range(self.num_expired):
                if self.expired[k] == slot:
                    self.num_expired -= 1
                    self.expired[k] = self.expired[self.num_expired]
                    break
            return False
        self.turns.rest()
        return True

    cdef void serve(self, slot_t slot) noexcept nogil:
        """Remove a slot whose first step begins, and charge its flow. It overtakes all slots that are set aside."""
        self.num_overtaken = self.num_aside
        if self.line[slot] < self.preempted:
            self.turns.serve(self.flow[slot], self.cost[slot])
        self._leave(slot)
        if self.num_aside == 0:
            self.turns.rest()

    cdef void charge(self, slot_t slot, int64_t tokens) noexcept nogil:
        """Charge a slot's flow for the tokens that the slot generated, at its end."""
        if self.line[slot] <= self.preempted:
            self.turns.pay(self.flow[slot], tokens)

    cdef bint _leave(self, slot_t slot) noexcept nogil:
        cdef int32_t line = self.line[slot]
        cdef int32_t at = self.place[slot]
        cdef slot_t last
        if at < 0:
            return False
        self.size -= 1
        last = self.slots[self.size]
        self.slots[at] = last
        self.place[last] = at
        self.place[slot] = -1
        if self.before[slot] >= 0:
            self.behind[self.before[slot]] = self.behind[slot]
        else:
            self.head[line] = self.behind[slot]
        if self.behind[slot] >= 0:
            self.before[self.behind[slot]] = self.before[slot]
        else:
            self.tail[line] = self.before[slot]
        self._offer(line)
        return True

    cdef bint set_aside(self, slot_t slot) noexcept nogil:
        """Set a slot aside until `take_back`; False if it was overtaken before, or too many slots are set aside."""
        if not self.looks_past or self.overtaken[slot] or self.num_aside == LOOK_PAST:
            return False
        self._leave(slot)
        self.aside[self.num_aside] = slot
        self.num_aside += 1
        return True

    cdef void take_back(self) noexcept nogil:
        """Return the slots that were set aside to their places."""
        cdef int32_t k
        if self.num_aside == 0:
            return
        for k in range(self.num_aside):
            if k < self.num_overtaken:
                self.overtaken[self.aside[k]] = 1
            self._enter(self.aside[k])
        self.num_aside = self.num_overtaken = 0
        self.turns.rest()

    cdef void drop_expired(self) noexcept nogil:
        """Remove slots whose deadline has passed; see `take_expired`."""
        if self.next_deadline < INFINITY:
            self._expire(now())

    cdef void _expire(self, double at) noexcept nogil:
        cdef int32_t k = 0
        cdef slot_t slot
        if at < self.next_deadline:
            return
        self.next_deadline = INFINITY
        while k < self.size:
            slot = self.slots[k]
            if self.deadline[slot] <= at:
                self._leave(slot)  # the last slot takes its place
                self.expired[self.num_expired] = slot
                self.num_expired += 1
            else:
                self.next_deadline = min(self.next_deadline, self.deadline[slot])
                k += 1
        self.turns.rest()

    cdef bint precedes(self, slot_t a, slot_t b) noexcept nogil:
        """Whether a comes before b in the same line."""
        if self.rank[a] != self.rank[b]:
            return self.rank[a] < self.rank[b]
        if self.arrival[a] != self.arrival[b]:
            return self.arrival[a] < self.arrival[b]
        return self.order[a] < self.order[b]

    # For the engine and tests.

    def take_expired(self):
        """Return slots that were removed because their deadlines passed, each once; the caller ends them."""
        cdef list found = [self.expired[k] for k in range(self.num_expired)]
        self.num_expired = 0
        return found

    def add(self, int32_t slot, int32_t priority=0, double arrival=0.0, int64_t order=0, bint again=False, *,
            int32_t flow=0, int32_t weight=1, int64_t cost=0, double deadline=INFINITY):
        """Add a slot."""
        self._check(slot)
        self.check_flow(flow, weight)
        if self.place[slot] >= 0:
            raise ValueError(f"slot {slot} is in the queue already")
        if not again:
            self.enlist(slot, flow, weight, cost, deadline, priority, arrival, order)
        else:
            self.push(slot, priority, arrival, order, True)

    def discard(self, int32_t slot):
        """Remove a slot; return whether it was there."""
        self._check(slot)
        return self.remove(slot)

    def start(self, int32_t slot, int64_t generated=0):
        """Serve a waiting slot, which has then ended with `generated` tokens."""
        self._check(slot)
        if self.place[slot] < 0:
            raise ValueError(f"slot {slot} is not in the queue")
        self.serve(slot)
        self.charge(slot, generated)

    def expire(self, double at):
        """Remove slots whose deadline is `at` or earlier."""
        self._expire(at)

    def peek(self):
        """Return the next slot, or -1."""
        return self.first()

    cdef check_flow(self, int32_t flow, int32_t weight):
        if not 0 <= flow < self.preempted or weight < 1:
            raise ValueError(f"flow {flow}, weight {weight}: flows are 0 to {self.preempted - 1}, weights at least 1")

    cdef _check(self, int32_t slot):
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot {slot}: this queue serves slots 0 to {self.num_slots - 1}")
