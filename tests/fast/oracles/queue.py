"""The wait queue as plain lists that are sorted on each access."""

UNIT = 1024


class Queue:
    def __init__(self, by_priority):
        self.by_priority = by_priority
        self.waiting = {}  # slot -> (flow or None, rank, cost, deadline)
        self.flow_of, self.due, self.weight, self.since = {}, {}, {}, {}
        self.clock, self.count = 0, 0

    def add(self, slot, priority, arrival, order, again, flow=0, weight=1, cost=0, deadline=float("inf")):
        if again:
            flow, cost, deadline = self.flow_of.get(slot, 0), 0, float("inf")
        else:
            self.flow_of[slot], self.weight[flow] = flow, weight
        line = None if again and not self.by_priority else flow
        if line is not None and not self.line(line):
            self.due[line] = max(self.due.get(line, 0), self.clock)
            self.note(line)
        self.waiting[slot] = (line, (priority if self.by_priority else 0, arrival, order), cost, deadline)

    def line(self, flow):
        """Slots of a flow in order; for `flow` None, the slots of preempted requests."""
        return sorted((s for s, entry in self.waiting.items() if entry[0] == flow), key=lambda s: self.waiting[s][1])

    def note(self, flow):
        self.since[flow] = self.count
        self.count += 1

    def discard(self, slot):
        found = self.waiting.pop(slot, None) is not None
        if all(entry[0] is None for entry in self.waiting.values()):
            self.clock = max([self.clock, *self.due.values()])
        return found

    def pay(self, flow, tokens):
        self.due[flow] = max(self.due.get(flow, 0), self.clock) + tokens * UNIT // self.weight.get(flow, 1)

    def start(self, slot, generated):
        line, _, cost, _ = self.waiting[slot]
        if line is not None:
            self.clock = max(self.clock, self.due[line])
            self.note(line)
            self.pay(line, cost)
        self.discard(slot)
        self.pay(self.flow_of.get(slot, 0), generated)

    def expire(self, at):
        late = {slot for slot, entry in self.waiting.items() if entry[3] <= at}
        self.waiting = {slot: entry for slot, entry in self.waiting.items() if slot not in late}
        if late:
            self.discard(-1)
        return late

    def peek(self):
        if preempted := self.line(None):
            return preempted[0]
        flows = {entry[0] for entry in self.waiting.values()}
        return self.line(min(flows, key=lambda flow: (self.due[flow], self.since[flow])))[0] if flows else -1
