"""The block pool in plain lists: idle blocks in the order they are given out, and a count per block."""


class Pool:
    def __init__(self, num_blocks):
        self.total = num_blocks - 1
        self.idle = [(block, False) for block in range(1, num_blocks)]
        self.refs = dict.fromkeys(range(1, num_blocks), 0)
        self.named = set()

    def acquire(self):
        if not self.idle:
            return 0
        block, _ = self.idle.pop(0)
        self.named.discard(block)
        self.refs[block] = 1
        return block

    def share(self, block):
        if self.refs[block] == 0:
            self.idle.remove((block, True))
        self.refs[block] += 1

    def free(self, block):
        self.refs[block] -= 1
        if self.refs[block] == 0:
            if block in self.named:
                self.idle.append((block, True))
            else:
                self.idle.insert(0, (block, False))

    def set_named(self, block, named):
        if named:
            self.named.add(block)
            return
        self.named.discard(block)
        if self.refs[block] == 0:
            self.idle.remove((block, True))
            self.idle.insert(0, (block, False))

    @property
    def counts(self):
        cached = sum(named for _, named in self.idle)
        return len(self.idle) - cached, cached, self.total - len(self.idle)
