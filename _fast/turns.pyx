"""Turns: selects the next of the waiting flows, by the tokens that each has used.

Owner: the device thread, only through WaitQueue. In: which flows wait, the tokens that they use, and weights. Out: a
flow. This is deficit round robin with a quantum of one token, in virtual time: a round gives each waiting flow one
token times its weight, and a flow is served while it owes nothing. So the tokens that a flow uses delay its next turn
by the number of rounds that pay for them; generated tokens are charged when the request ends. Rounds also pay for a
flow without waiting requests, and credit is not accumulated. If no flow waits, nothing is owed.

    flow A, requests of 40 tokens   due at   0 ........ 40 ........ 80
    flow B, requests of 20 tokens   due at   0 .. 20 .. 40 .. 60 .. 80
    served                                   A B  B     A B   B     A B
"""

from array import array

cimport cython

cdef enum:
    SHARED = 4096  # new things of one flow behind which flows count as alone again


@cython.final
cdef class Turns:
    """Flows are numbers from 0."""

    def __init__(self, int32_t num_flows):
        if num_flows < 1:
            raise ValueError(f"num_flows={num_flows}: need at least 1")
        self.num_flows = num_flows
        self.num_active = 0
        self.clock = self.latest = self.count = 0
        self.newest = -1
        self.shared_for = 0
        self.due, self.since = array("q", bytes(8 * num_flows)), array("q", bytes(8 * num_flows))
        self.weight = array("i", [1]) * num_flows
        self.active = array("i", bytes(4 * num_flows))
        self.place = array("i", [-1]) * num_flows
        self.passed = array("B", bytes(num_flows))

    cdef int32_t flow(self) noexcept nogil:
        """Return the flow with the earliest due time, among equals the one that has waited longest; -1: none waits.

        Flows in `passed` are skipped.
        """
        cdef int32_t best = -1
        cdef int32_t flow
        cdef int32_t k
        for k in range(self.num_active):
            flow = self.active[k]
            if self.passed[flow]:
                continue
            if best < 0 or self.due[flow] < self.due[best] or (
                self.due[flow] == self.due[best] and self.since[flow] < self.since[best]
            ):
                best = flow
        return best

    cdef void meet(self, int32_t flow) noexcept nogil:
        """Something new has come of the flow."""
        if flow != self.newest and self.newest >= 0:
            self.shared_for = SHARED
        elif self.shared_for:
            self.shared_for -= 1
        self.newest = flow

    cdef bint is_shared(self) noexcept nogil:
        """Whether several flows have come of late."""
        return self.shared_for > 0

    cdef void offer(self, int32_t flow, bint waits) noexcept nogil:
        """Set whether the flow has waiting requests."""
        cdef int32_t at = self.place[flow]
        cdef int32_t last
        if waits and at < 0:
            self.due[flow] = max(self.due[flow], self.clock)
            self.since[flow] = self.count
            self.count += 1
            self.active[self.num_active] = flow
            self.place[flow] = self.num_active
            self.num_active += 1
        elif not waits and at >= 0:
            self.num_active -= 1
            last = self.active[self.num_active]
            self.active[at] = last
            self.place[last] = at
            self.place[flow] = -1

    cdef void serve(self, int32_t flow, int64_t tokens) noexcept nogil:
        """Serve a waiting request of the flow: advance the clock to the flow's due time and charge the tokens."""
        self.clock = max(self.clock, self.due[flow])
        self.since[flow] = self.count
        self.count += 1
        self.pay(flow, tokens)

    cdef void pay(self, int32_t flow, int64_t tokens) noexcept nogil:
        """Charge the flow for tokens."""
        self.due[flow] = max(self.due[flow], self.clock) + tokens * UNIT // self.weight[flow]
        self.latest = max(self.latest, self.due[flow])

    cdef void rest(self) noexcept nogil:
        """Clear all debts if no flow waits."""
        if self.num_active == 0:
            self.clock = max(self.clock, self.latest)

    # For the engine and tests.

    def forget(self, int32_t flow):
        """Reuse the number for another flow, which owes nothing."""
        self._check(flow)
        self.due[flow] = self.clock

    def owed(self, int32_t flow):
        """Return the tokens that the flow still owes, for a weight of 1."""
        self._check(flow)
        return max(self.due[flow] - self.clock, 0) // UNIT

    cdef _check(self, int32_t flow):
        if not 0 <= flow < self.num_flows:
            raise ValueError(f"flow {flow}: there are flows 0 to {self.num_flows - 1}")
