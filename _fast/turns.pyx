"""Turns: whose turn it is among flows that wait, by deficit round robin over tokens.

Owner: the device thread, through WaitQueue alone. In: the price in tokens of what each flow would have served next,
what a flow has taken, and weights. Out: a flow. In its turn a flow gets QUANTUM tokens of credit times its weight, and
is served while the credit pays. What a request generates is paid for when the request ends, so a credit can be
negative: rounds that pass pay it off, also while the flow has nothing that waits. Where nothing waits, nothing is owed.

    flow A   credit 300 | pays 256 for a1      |                           | + 256, pays for a2 ...
    flow B   credit   0 |                      | + 256, pays 100 for b1    |
"""

from array import array

cimport cython


@cython.final
cdef class Turns:
    """Flows are numbers from 0; one that waits has a place in the round."""

    def __init__(self, int32_t num_flows):
        if num_flows < 1:
            raise ValueError(f"num_flows={num_flows}: need at least 1")
        self.num_flows = num_flows
        self.num_active = self.at = 0
        self.rounds = 0
        self.credit, self.seen = array("q", bytes(8 * num_flows)), array("q", bytes(8 * num_flows))
        self.price = array("q", [-1]) * num_flows
        self.weight = array("i", [1]) * num_flows
        self.active = array("i", bytes(4 * num_flows))
        self.place = array("i", [-1]) * num_flows

    cdef int32_t flow(self) noexcept nogil:
        """The flow that is served next; -1: none has anything. The same until something is offered or paid."""
        cdef int32_t flow
        if self.num_active == 0:
            return -1
        flow = self.active[self.at]
        if self.price[flow] < 0 or self.credit[flow] < self.price[flow]:
            self._turn_on()
            flow = self.active[self.at]
        return flow if self.price[flow] >= 0 else -1

    cdef void offer(self, int32_t flow, int64_t price) noexcept nogil:
        """What the flow would have served next costs so much; -1: it has nothing, and leaves at the next `rest`."""
        self.price[flow] = price
        if price >= 0 and self.place[flow] < 0:
            self._wake(flow)

    cdef void pay(self, int32_t flow, int64_t tokens) noexcept nogil:
        """The flow has taken so many tokens; where nothing waits they are free."""
        if self.num_active:
            self._update(flow)
            self.credit[flow] -= tokens

    cdef void rest(self) noexcept nogil:
        """Flows that have nothing any more leave the round: unused credit is gone, what they owe is not."""
        cdef int32_t k
        for k in range(self.num_active - 1, -1, -1):
            if self.price[self.active[k]] < 0:
                self._leave(self.active[k])

    cdef void _wake(self, int32_t flow) noexcept nogil:
        """The flow's turn comes when all others have had theirs."""
        cdef int32_t k
        self._update(flow)
        if self.at == 0:
            k = self.num_active  # behind the last is before the first
        else:
            for k in range(self.num_active, self.at, -1):
                self.active[k] = self.active[k - 1]
                self.place[self.active[k]] = k
            k = self.at
            self.at += 1
        self.active[k] = flow
        self.place[flow] = k
        self.num_active += 1

    cdef void _leave(self, int32_t flow) noexcept nogil:
        cdef int32_t gap = self.place[flow]
        cdef int32_t k
        self.place[flow] = -1
        self.num_active -= 1
        for k in range(gap, self.num_active):
            self.active[k] = self.active[k + 1]
            self.place[self.active[k]] = k
        if gap <= self.at:  # in its own turn the one before is served out again: the next turn is the one behind's
            self.at = self.at - 1 if self.at else max(self.num_active - 1, 0)
        self.credit[flow] = min(self.credit[flow], 0)
        self.seen[flow] = self.rounds
        if self.num_active == 0:
            self.rounds += IDLE_ROUNDS

    cdef void _update(self, int32_t flow) noexcept nogil:
        """Rounds that have passed while the flow was not in them pay what it owes."""
        cdef int64_t passed = self.rounds - self.seen[flow]
        if self.place[flow] >= 0:
            return
        if passed >= -self.credit[flow]:
            self.credit[flow] = 0
        else:
            self.credit[flow] = min(0, self.credit[flow] + passed * QUANTUM * self.weight[flow])
        self.seen[flow] = self.rounds

    cdef void _turn_on(self) noexcept nogil:
        """On to the next turn in which a flow can pay; as many rounds pass as that takes."""
        cdef int64_t fewest = -1
        cdef int64_t grant
        cdef int64_t lack
        cdef int64_t needed
        cdef int32_t chosen = 0
        cdef int32_t flow
        cdef int32_t k
        for k in range(1, self.num_active + 1):
            flow = self.active[(self.at + k) % self.num_active]
            if self.price[flow] < 0:
                continue
            grant = QUANTUM * <int64_t>self.weight[flow]
            lack = self.price[flow] - self.credit[flow]
            needed = 1 if lack <= grant else (lack + grant - 1) // grant
            if fewest < 0 or needed < fewest:
                fewest, chosen = needed, k
        if fewest < 0:
            return
        for k in range(1, self.num_active + 1):
            flow = self.active[(self.at + k) % self.num_active]
            if self.price[flow] >= 0:
                self.credit[flow] += QUANTUM * <int64_t>self.weight[flow] * (fewest if k <= chosen else fewest - 1)
        self.rounds += fewest if self.at + chosen >= self.num_active else fewest - 1
        self.at = (self.at + chosen) % self.num_active

    # What the engine calls, and what tests see.

    def forget(self, int32_t flow):
        """The number goes to another flow, which owes nothing."""
        self._check(flow)
        self.credit[flow] = 0

    def credit_of(self, int32_t flow):
        """Tokens that the flow has left; negative: tokens that it owes."""
        self._check(flow)
        self._update(flow)
        return self.credit[flow]

    cdef _check(self, int32_t flow):
        if not 0 <= flow < self.num_flows:
            raise ValueError(f"flow {flow}: there are flows 0 to {self.num_flows - 1}")
