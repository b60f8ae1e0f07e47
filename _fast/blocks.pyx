"""BlockPool: which KV blocks are idle, in what order they are given out again, and how often each one is used.

Owner: the device thread; safe without the GIL because no other thread uses it. In: take, hold, release, and
whether the prefix index names a block. Out: block numbers 1 .. num_blocks - 1; block 0 is the dummy.
Idle blocks form one doubly linked list by index, with block 0 as its sentinel:

    0 <-> [not named: reused first] <-> [named, least recently used] ... [named, most recently used] <-> 0

Invariant: num_free + num_cached + num_used == total.
"""

from array import array

cimport cython


@cython.final
cdef class BlockPool:
    """Reference counts and the list of idle blocks; one pool serves every cache group."""

    def __init__(self, int32_t num_blocks):
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}: block 0 is the dummy, so at least 2 are needed")
        cdef int32_t i
        self.total = num_blocks - 1
        self.num_free = self.total
        self.num_cached = 0
        self.num_used = 0
        self.refs = array("i", bytes(4 * num_blocks))
        self.before = array("i", bytes(4 * num_blocks))
        self.after = array("i", bytes(4 * num_blocks))
        self.named = array("B", bytes(num_blocks))
        for i in range(num_blocks):
            self.after[i] = i + 1 if i + 1 < num_blocks else 0
            self.before[i] = i - 1 if i else num_blocks - 1

    cdef int32_t num_idle(self) noexcept nogil:
        """Blocks that can be handed out."""
        return self.num_free + self.num_cached

    cdef block_t take(self) noexcept nogil:
        """Hand out the next block in eviction order, or 0. If it is named, the caller drops its name."""
        cdef block_t block = self.after[0]
        if block:
            self.hold(block)
        return block

    cdef void hold(self, block_t block) noexcept nogil:
        """One more user. An idle block leaves the list."""
        if self.refs[block] == 0:
            self._unlink(block)
            if self.named[block]:
                self.num_cached -= 1
            else:
                self.num_free -= 1
            self.num_used += 1
        self.refs[block] += 1

    cdef void release(self, block_t block) noexcept nogil:
        """One user less. The last one puts it where its name says: named blocks at the end, others in front."""
        self.refs[block] -= 1
        if self.refs[block] == 0:
            self.num_used -= 1
            if self.named[block]:
                self.num_cached += 1
                self._link(block, False)
            else:
                self.num_free += 1
                self._link(block, True)

    cdef void name(self, block_t block) noexcept nogil:
        """The prefix index now names this block; it must be in use."""
        self.named[block] = 1

    cdef void unname(self, block_t block) noexcept nogil:
        """The prefix index dropped it. An idle block moves to the front: nothing is lost by reusing it first."""
        self.named[block] = 0
        if self.refs[block] == 0:
            self.num_cached -= 1
            self.num_free += 1
            self._unlink(block)
            self._link(block, True)

    cdef void _link(self, block_t block, bint first) noexcept nogil:
        cdef block_t left = 0 if first else self.before[0]
        cdef block_t right = self.after[left]
        self.before[block] = left
        self.after[block] = right
        self.after[left] = block
        self.before[right] = block

    cdef void _unlink(self, block_t block) noexcept nogil:
        self.after[self.before[block]] = self.after[block]
        self.before[self.after[block]] = self.before[block]

    # What tests and tools see: the same moves, with their arguments checked.

    def acquire(self):
        """Take a block: its number, or 0 when none is idle. It loses its name, if it had one."""
        cdef block_t block = self.take()
        if block and self.named[block]:
            self.unname(block)
        return block

    def share(self, int32_t block):
        """One more reference to a block that is used or cached."""
        self._check(block)
        if self.refs[block] == 0 and not self.named[block]:
            raise ValueError(f"block {block} is free: only used or cached blocks can be shared")
        self.hold(block)

    def free(self, int32_t block):
        """Drop one reference."""
        self._check(block)
        if self.refs[block] == 0:
            raise ValueError(f"block {block} is not in use: it was freed once too often")
        self.release(block)

    def set_named(self, int32_t block, bint named):
        """Say whether the prefix index names the block; an idle block can only lose its name."""
        self._check(block)
        if named and self.refs[block] == 0:
            raise ValueError(f"block {block} is idle: only blocks in use can be named")
        if named:
            self.name(block)
        elif self.named[block]:
            self.unname(block)

    def refcount(self, int32_t block):
        """How many rows use the block."""
        self._check(block)
        return self.refs[block]

    def idle(self):
        """Idle blocks in the order in which they will be given out (a walk over the list: for tests)."""
        cdef block_t block = self.after[0]
        cdef list found = []
        while block:
            found.append((block, bool(self.named[block])))
            block = self.after[block]
        return found

    def sum_refs(self):
        """Sum of all reference counts."""
        cdef int64_t count = 0
        cdef int32_t i
        for i in range(self.refs.shape[0]):
            count += self.refs[i]
        return count

    cdef _check(self, int32_t block):
        if not 0 < block <= self.total:
            raise ValueError(f"block {block}: this pool has blocks 1 to {self.total}")
