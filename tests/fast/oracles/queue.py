"""The wait queue as a list that is sorted each time it is asked."""


class Queue:
    def __init__(self, by_priority):
        self.by_priority = by_priority
        self.waiting = {}

    def add(self, slot, priority, arrival, order, again):
        self.waiting[slot] = (priority if self.by_priority else not again, arrival, order)

    def discard(self, slot):
        return self.waiting.pop(slot, None) is not None

    def peek(self):
        return min(self.waiting, key=self.waiting.__getitem__, default=-1)
