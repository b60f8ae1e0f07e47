"""The wait queue as lists that are sorted each time they are asked, and turns that are taken one by one."""

QUANTUM = 256
IDLE_ROUNDS = 1 << 20


class Queue:
    def __init__(self, by_priority):
        self.by_priority = by_priority
        self.waiting = {}  # slot -> (flow or None, rank, cost, deadline)
        self.flow_of, self.credit, self.weight, self.seen = {}, {}, {}, {}
        self.round, self.at, self.rounds = [], 0, 0

    def add(self, slot, priority, arrival, order, again, flow=0, weight=1, cost=0, deadline=float("inf")):
        if again:
            flow, cost, deadline = self.flow_of.get(slot, 0), 0, float("inf")
        else:
            self.flow_of[slot], self.weight[flow] = flow, weight
        line = None if again and not self.by_priority else flow
        self.waiting[slot] = (line, (priority if self.by_priority else 0, arrival, order), cost, deadline)
        if line is not None and line not in self.round:
            self.bring_up(line)
            self.round.insert(self.at if self.at else len(self.round), line)
            self.at += self.at > 0

    def line(self, flow):
        """Slots of a flow, or of those that come again, first one first."""
        return sorted((s for s, entry in self.waiting.items() if entry[0] == flow), key=lambda s: self.waiting[s][1])

    def discard(self, slot):
        found = self.waiting.pop(slot, None) is not None
        for flow in reversed(self.round):
            if not self.line(flow):
                self.rest(flow)
        return found

    def rest(self, flow):
        gap = self.round.index(flow)
        self.round.remove(flow)
        if gap <= self.at:
            self.at = self.at - 1 if self.at else max(len(self.round) - 1, 0)
        self.credit[flow] = min(self.credit.get(flow, 0), 0)
        self.seen[flow] = self.rounds
        if not self.round:
            self.rounds += IDLE_ROUNDS

    def bring_up(self, flow):
        """Rounds that have passed without the flow pay what it owes."""
        owed = min(self.credit.get(flow, 0), 0)
        paid = (self.rounds - self.seen.get(flow, 0)) * QUANTUM * self.weight.get(flow, 1)
        self.credit[flow] = min(owed + paid, 0)
        self.seen[flow] = self.rounds

    def pay(self, flow, tokens):
        if self.round:
            if flow not in self.round:
                self.bring_up(flow)
            self.credit[flow] -= tokens

    def start(self, slot, generated):
        flow = self.flow_of.get(slot, 0)
        self.pay(flow, self.waiting[slot][2])
        self.discard(slot)
        self.pay(flow, generated)

    def expire(self, at):
        late = {slot for slot, entry in self.waiting.items() if entry[3] <= at}
        self.waiting = {slot: entry for slot, entry in self.waiting.items() if slot not in late}
        self.discard(-1)
        return late

    def peek(self):
        if preempted := self.line(None):
            return preempted[0]
        if not self.round:
            return -1
        while True:
            flow = self.round[self.at]
            first = self.line(flow)[0]
            if self.credit[flow] >= self.waiting[first][2]:
                return first
            self.at += 1
            if self.at == len(self.round):
                self.at, self.rounds = 0, self.rounds + 1
            self.credit[self.round[self.at]] += QUANTUM * self.weight.get(self.round[self.at], 1)
