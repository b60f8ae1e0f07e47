"""The block pool as plain lists: idle blocks and idle runs in the order of allocation, and a count per block."""


class Pool:
    def __init__(self, num_blocks, state_blocks=0, tail_blocks=0):
        self.total = num_blocks - 1
        self.idle = [(block, False) for block in range(1, num_blocks)]
        self.refs = dict.fromkeys(range(1, num_blocks), 0)
        self.named = {}  # block -> 1, or 2 for a state that is dropped late
        self.sizes = {1: state_blocks, 2: tail_blocks}
        self.runs = {}  # first block of the run -> (kind, blocks of the run)
        self.idle_runs = {1: [], 2: [], 3: [], 4: []}

    def is_loose(self):
        return bool(self.idle) and not self.idle[0][1]

    def loosen(self):
        for place in (1, 2):
            if self.idle_runs[place]:
                head = self.idle_runs[place].pop(0)
                for block in self.runs.pop(head)[1]:
                    self.idle.insert(0, (block, False))
                return True
        return False

    def acquire(self):
        if not self.is_loose():
            self.loosen()
        if not self.idle:
            return 0
        block, _ = self.idle.pop(0)
        self.named.pop(block, None)
        self.refs[block] = 1
        return block

    def acquire_run(self, kind):
        if self.idle_runs[kind]:
            head = self.idle_runs[kind].pop(0)
            self.refs[head] = 1
            return head
        blocks = []
        while len(blocks) < self.sizes[kind] and (self.is_loose() or self.loosen()):
            blocks.append(self.idle.pop(0)[0])
        if len(blocks) < self.sizes[kind]:
            for block in blocks:
                self.idle.insert(0, (block, False))
            return 0
        self.runs[blocks[0]] = (kind, blocks)
        self.refs[blocks[0]] = 1
        return blocks[0]

    def _place(self, block):
        """The list that holds an idle block, and the block's entry in that list."""
        if block not in self.runs:
            return self.idle, (block, block in self.named)
        mark = self.named.get(block)
        return self.idle_runs[2 + mark if mark else self.runs[block][0]], block

    def share(self, block):
        if self.refs[block] == 0:
            place, entry = self._place(block)
            place.remove(entry)
        self.refs[block] += 1

    def free(self, block):
        self.refs[block] -= 1
        if self.refs[block] == 0:
            place, entry = self._place(block)
            place.insert(len(place) if block in self.named else 0, entry)

    def set_named(self, block, named):
        if named:
            self.named[block] = 1
            return
        if self.refs[block] == 0:
            place, entry = self._place(block)
            place.remove(entry)
        del self.named[block]
        if self.refs[block] == 0:
            place, entry = self._place(block)
            place.insert(0, entry)

    def idle_heads(self, *places):
        return [head for place in places for head in self.idle_runs[place]]

    @property
    def counts(self):
        def blocks(heads):
            return sum(len(self.runs[head][1]) for head in heads)

        cached = sum(named for _, named in self.idle)
        free = len(self.idle) - cached + blocks(self.idle_heads(1, 2))
        cached += blocks(self.idle_heads(3, 4))
        return free, cached, self.total - free - cached
