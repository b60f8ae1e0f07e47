"""BlockPool: tracks which KV blocks are idle, the order in which they are reused, and each block's reference count.

Owner: the device thread; safe without the GIL because no other thread uses it. In: take, hold and release, and
whether the prefix index names a block. Out: block numbers 1 .. num_blocks - 1; block 0 is the dummy.
Idle blocks form one doubly linked list by index, with block 0 as its sentinel:

    0 <-> [not named: reused first] <-> [named, least recently used] ... [named, most recently used] <-> 0

A run is a chain of blocks through `next`, for a state or for a tail (HYBRID.md). Its head represents the whole run: it
has the references, the name, and the id that identifies the run on the device. Idle runs have separate lists, whose
sentinels have numbers after the last block. Unnamed runs stay whole until a caller breaks them up.

Invariant: num_free + num_cached + num_used == total; each member of a run counts.
"""

from array import array

cimport cython

from _fast.seqs cimport fetch


def num_run_ids(int32_t num_blocks, int32_t state_blocks, int32_t tail_blocks, int32_t max_tails):
    """Ids of the runs of a pool, the dummy 0 among them: as many states and tails as its blocks hold."""
    return 1 + (num_blocks - 1) // state_blocks + min((num_blocks - 1) // tail_blocks, max_tails)


@cython.final
cdef class BlockPool:
    """Reference counts and the lists of idle blocks; one pool serves every cache group."""

    def __init__(self, int32_t num_blocks, int32_t state_blocks=0, int32_t tail_blocks=0, int32_t max_tails=0):
        """state_blocks, tail_blocks: blocks per run; 0: there are no runs. max_tails: most runs for tails."""
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}: block 0 is the dummy, so at least 2 are needed")
        if state_blocks < 0 or (state_blocks > 0) != (tail_blocks > 0) or (state_blocks > 0) != (max_tails > 0):
            raise ValueError(
                f"state_blocks={state_blocks}, tail_blocks={tail_blocks}, max_tails={max_tails}: all are 0, or each is "
                "at least 1"
            )
        cdef int32_t i
        cdef int32_t num_ids
        self.total = num_blocks - 1
        self.num_free = self.total
        self.num_cached = 0
        self.num_used = 0
        self.refs = array("i", bytes(4 * num_blocks))
        self.before = array("i", bytes(4 * (num_blocks + NUM_PLACES - 1)))
        self.after = array("i", bytes(4 * (num_blocks + NUM_PLACES - 1)))
        self.named = array("B", bytes(num_blocks))
        for i in range(num_blocks):
            self.after[i] = i + 1 if i + 1 < num_blocks else 0
            self.before[i] = i - 1 if i else num_blocks - 1
        for i in range(num_blocks, num_blocks + NUM_PLACES - 1):
            self.after[i] = self.before[i] = i
        self.sizes = [1, state_blocks, tail_blocks]
        self.idle_blocks = [0, 0, 0, 0, 0]
        self.free_id = 0
        num_ids = 0
        if state_blocks:
            num_ids = num_run_ids(num_blocks, state_blocks, tail_blocks, max_tails) - 1
            self.free_id = 1
        self.next = array("i", bytes(4 * (num_blocks if state_blocks else 1)))
        self.kinds = array("B", bytes(num_blocks if state_blocks else 1))
        self.ids = array("i", bytes(4 * (num_blocks if state_blocks else 1)))
        self.heads = array("i", [-i - 1 if i < num_ids else 0 for i in range(num_ids + 1)])
        self.heads[0] = 0

    @property
    def num_ids(self):
        """Number of run ids, including the dummy 0; 0: there are no runs."""
        return self.heads.shape[0] if self.sizes[STATE_RUN] else 0

    cdef int32_t num_idle(self) noexcept nogil:
        """Return the number of blocks that can be handed out."""
        return self.num_free + self.num_cached

    cdef void fetch_idle(self, int32_t count) noexcept nogil:
        """Begin to load what taking the next blocks reads and writes."""
        cdef block_t block = self.after[0]
        cdef int32_t _k
        for _k in range(min(count, self.num_idle())):
            fetch(&self.refs[block])
            fetch(&self.before[block])
            fetch(&self.named[block])
            block = self.after[block]

    cdef block_t take(self) noexcept nogil:
        """Hand out the next block in eviction order, or 0. If it is named, the caller drops its name."""
        cdef block_t block = self.after[0]
        if block:
            self.hold(block)
        return block

    cdef void hold(self, block_t block) noexcept nogil:
        """Add a user. An idle block or run leaves its list."""
        cdef int32_t count = 1
        if self.refs[block] == 0:
            if self.sizes[STATE_RUN]:
                count = self.sizes[self.kinds[block]]
            self._unlink(block)
            if self.named[block]:
                self.num_cached -= count
            else:
                self.num_free -= count
            self.num_used += count
        self.refs[block] += 1

    cdef void release(self, block_t block) noexcept nogil:
        """Remove a user. Without users, a named block goes to the end of the idle list, others to the front."""
        cdef int32_t count = 1
        self.refs[block] -= 1
        if self.refs[block] == 0:
            if self.sizes[STATE_RUN]:
                count = self.sizes[self.kinds[block]]
            self.num_used -= count
            if self.named[block]:
                self.num_cached += count
                self._link(block, self._place(block), False)
            else:
                self.num_free += count
                self._link(block, self._place(block), True)

    cdef void name(self, block_t block) noexcept nogil:
        """Mark this block, which must be in use, as named by the prefix index."""
        self.named[block] = 1

    cdef void unname(self, block_t block) noexcept nogil:
        """Mark the block as not named. An idle block moves to the front, because its reuse loses nothing."""
        cdef int32_t count = 1
        if self.refs[block]:
            self.named[block] = 0
            return
        if self.sizes[STATE_RUN]:
            count = self.sizes[self.kinds[block]]
        self.num_cached -= count
        self.num_free += count
        self._unlink(block)
        self.named[block] = 0
        self._link(block, self._place(block), True)

    cdef int32_t _place(self, block_t block) noexcept nogil:
        """Return the list in which an idle block or run belongs."""
        if not self.sizes[STATE_RUN] or self.kinds[block] == PLAIN:
            return IDLE_BLOCKS
        return SPARE_STATES - 1 + self.named[block] if self.named[block] else self.kinds[block]

    cdef void _link(self, block_t block, int32_t place, bint first) noexcept nogil:
        cdef block_t end = self.total + place if place else 0
        cdef block_t left = end if first else self.before[end]
        cdef block_t right = self.after[left]
        self.before[block] = left
        self.after[block] = right
        self.after[left] = block
        self.before[right] = block
        if place:
            self.idle_blocks[place] += self.sizes[self.kinds[block]]

    cdef void _unlink(self, block_t block) noexcept nogil:
        """Take a block out of its list; its name and kind must be the same as when it entered the list."""
        cdef int32_t place = self._place(block)
        self.after[self.before[block]] = self.after[block]
        self.before[self.after[block]] = self.before[block]
        if place:
            self.idle_blocks[place] -= self.sizes[self.kinds[block]]

    # Runs. To become a member, a block must be idle, unnamed, and at the front of the first list.

    cdef bint is_loose(self) noexcept nogil:
        """Whether take() would hand out an unnamed block."""
        return self.after[0] != 0 and not self.named[self.after[0]]

    cdef bint loosen(self) noexcept nogil:
        """Break up an unnamed idle run, preferably a state; False: there is none."""
        cdef int32_t place
        cdef block_t head
        for place in range(IDLE_STATES, IDLE_TAILS + 1):
            head = self.first_run(place)
            if head:
                self.break_up(head)
                return True
        return False

    cdef block_t first_run(self, int32_t place) noexcept nogil:
        """Return the head of a list's first run, or 0."""
        cdef block_t head = self.after[self.total + place]
        return head if head <= self.total else 0

    cdef block_t form(self, int32_t kind) noexcept nogil:
        """Form a new run with one user from blocks for which is_loose() holds, after loosen() if needed. 0: no blocks.

        The caller has dropped the names of enough idle blocks.
        """
        cdef block_t head = 0
        cdef block_t last = 0
        cdef block_t block
        cdef int32_t _k
        if not self.free_id:
            return 0
        for _k in range(self.sizes[kind]):
            if not self.is_loose() and not self.loosen():
                break
            block = self.take()
            self.refs[block] = 0
            if head:
                self.next[last] = block
            else:
                head = block
            last = block
        else:
            self.next[last] = 0
            self.refs[head] = 1
            self.kinds[head] = <uint8_t>kind
            self.ids[head] = self.free_id
            self.free_id = -self.heads[self.free_id]
            self.heads[self.ids[head]] = head
            return head
        while head:
            block = self.next[head] if head != last else 0
            self.refs[head] = 1
            self.release(head)
            head = block
        return 0

    cdef void break_up(self, block_t head) noexcept nogil:
        """Turn the members of an unnamed idle run into idle blocks and free its id."""
        cdef block_t block
        self._unlink(head)
        self.heads[self.ids[head]] = -self.free_id
        self.free_id = self.ids[head]
        self.ids[head] = 0
        self.kinds[head] = PLAIN
        while head:
            block = self.next[head]
            self.next[head] = 0
            self._link(head, IDLE_BLOCKS, True)
            head = block

    cdef void mark(self, block_t head, uint8_t mark) noexcept nogil:
        """Mark a named state to be dropped first (1) or last (2); it counts as just used."""
        if self.named[head] == mark:
            return
        if self.refs[head] == 0:
            self._unlink(head)
            self.named[head] = mark
            self._link(head, self._place(head), False)
        else:
            self.named[head] = mark

    # The same operations for tests and tools, with checks of the arguments.

    def acquire(self):
        """Take a block and drop its name; 0 if none is idle. Idle runs are broken up first."""
        cdef block_t block
        if not self.is_loose():
            self.loosen()
        block = self.take()
        if block and self.named[block]:
            self.unname(block)
        return block

    def acquire_run(self, int32_t kind):
        """Return the head of an idle or new run of this kind; 0 if too few unnamed blocks are idle."""
        if kind not in (STATE_RUN, TAIL_RUN) or not self.sizes[STATE_RUN]:
            raise ValueError(f"kind {kind}: 1 is a state, 2 is a tail, and the pool has runs of both or of none")
        cdef block_t head = self.first_run(kind)
        if head:
            self.hold(head)
            return head
        return self.form(kind)

    def run(self, int32_t run_id):
        """Return the blocks of a run, head first; empty if no run has this id."""
        if not 0 <= run_id < self.heads.shape[0]:
            raise ValueError(f"run {run_id}: this pool has ids up to {self.heads.shape[0] - 1}")
        cdef list found = []
        cdef block_t block = max(self.heads[run_id], 0)
        while block:
            found.append(block)
            block = self.next[block]
        return found

    def run_id(self, int32_t head):
        """Return the id of the run whose head is this block; 0: the block is no head."""
        self._check(head)
        return self.ids[head] if self.sizes[STATE_RUN] else 0

    def idle_runs(self, int32_t place):
        """Return the heads of idle runs in list order; place: 1 states, 2 tails, 3 and 4 named states (for tests)."""
        if not IDLE_STATES <= place < NUM_PLACES:
            raise ValueError(f"place {place}: lists of runs are 1 to {NUM_PLACES - 1}")
        cdef list found = []
        cdef block_t head = self.after[self.total + place]
        while head <= self.total:
            found.append(head)
            head = self.after[head]
        return found

    def share(self, int32_t block):
        """Add a reference to a block that is used or cached."""
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
        """Set whether the prefix index names the block; an idle block can only lose its name."""
        self._check(block)
        if named and self.refs[block] == 0:
            raise ValueError(f"block {block} is idle: only blocks in use can be named")
        if named:
            self.name(block)
        elif self.named[block]:
            self.unname(block)

    def refcount(self, int32_t block):
        """Return the number of rows that use the block."""
        self._check(block)
        return self.refs[block]

    def idle(self):
        """Return idle blocks in the order in which they will be handed out (walks the list; for tests)."""
        cdef block_t block = self.after[0]
        cdef list found = []
        while block:
            found.append((block, bool(self.named[block])))
            block = self.after[block]
        return found

    def sum_refs(self):
        """Return the sum of all reference counts."""
        cdef int64_t count = 0
        cdef int32_t i
        for i in range(self.refs.shape[0]):
            count += self.refs[i]
        return count

    cdef _check(self, int32_t block):
        if not 0 < block <= self.total:
            raise ValueError(f"block {block}: this pool has blocks 1 to {self.total}")
