"""BlockTables: which blocks hold each slot's KV, by cache group, and what the device does not know of it yet.

Owner: the device thread, through Scheduler alone. In: how far a slot's KV will reach, how far it is committed. Out:
blocks taken from the one pool, prefix hits, names for full committed blocks, changes for the StepPlan.
Entry j of a slot's table holds positions j * block_size .. (j + 1) * block_size - 1. Groups differ in which earlier
entries a token still needs, and `needed_from` is the one place that knows; entries before it are 0:

    full      [b b b b b b]          sliding  [0 0 0 b b b]   (window reaches back two blocks)

When a row commits a full block whose equal is named already, the row switches to the named one and frees its own.
So rows with equal prefixes hold equal blocks, a block's parent is used whenever it is, and the parent is evicted later.
"""

from array import array

cimport cython
from libc.stdlib cimport calloc, free, realloc

from _fast.types cimport GROUP_FULL, GROUP_SLIDING


@cython.final
cdef class BlockTables:
    """Rows of block numbers per slot and group; all groups draw from one pool."""

    def __cinit__(self, BlockPool pool, PrefixIndex index, SeqTable seqs, list groups, int32_t block_size,
                  int32_t max_len, int32_t max_chunk, bint caching):
        cdef int32_t i
        self.num_slots = seqs.num_slots
        self.num_groups = <int32_t>len(groups)
        self.rows = <int32_t**>calloc(<size_t>self.num_slots * max(self.num_groups, 1), sizeof(int32_t*))
        if not self.rows:
            raise MemoryError(f"no memory for the block tables of {self.num_slots} slots")
        if not groups:
            raise ValueError("groups is empty: name at least one (kind, window)")
        self.pool = pool
        self.index = index
        self.seqs = seqs
        self.caching = caching
        self.block_size = block_size
        self.max_blocks = (max_len + block_size - 1) // block_size
        self.primary = -1
        self.kind = array("i", [kind for kind, _ in groups])
        self.window = array("i", [window for _, window in groups])
        self.most = array("i", bytes(4 * self.num_groups))
        for i in range(self.num_groups):
            if self.kind[i] not in (GROUP_FULL, GROUP_SLIDING):
                raise ValueError(f"group {i} has kind {self.kind[i]}: 0 is full, 1 is sliding")
            if self.kind[i] == GROUP_SLIDING and self.window[i] < 1:
                raise ValueError(f"group {i} slides with window {self.window[i]}: at least 1 token")
            self.most[i] = self.max_blocks
            if self.kind[i] == GROUP_SLIDING:
                # The window, a chunk in flight and one being planned, and ragged ends.
                self.most[i] = min(self.max_blocks, (self.window[i] + 2 * max_chunk) // block_size + 3)
            elif self.primary < 0:
                self.primary = i
        self.size = array("i", bytes(4 * self.num_slots))
        self.dirty = array("i", bytes(4 * self.num_slots))
        self.room = array("i", bytes(4 * self.num_slots))
        self.first = array("i", bytes(4 * self.num_slots * self.num_groups))
        self.hits = array("i", bytes(4 * self.num_groups * (self.max_blocks + 1)))
        self.scratch = array("q", bytes(16 * block_size))

    def __dealloc__(self):
        cdef int32_t i
        for i in range(self.num_slots * self.num_groups if self.rows else 0):
            free(self.rows[i])
        free(self.rows)

    cdef int32_t needed_from(self, int32_t group, int32_t position) noexcept nogil:
        """The first entry that a token at `position` reads in this group."""
        if self.kind[group] == GROUP_SLIDING and position >= self.window[group]:
            return (position - self.window[group] + 1) // self.block_size
        return 0

    cdef int32_t blocks_for(self, int32_t length) noexcept nogil:
        """Entries that `length` tokens take."""
        return (length + self.block_size - 1) // self.block_size

    cdef int32_t demand(self, int32_t hit, int32_t length) noexcept nogil:
        """New blocks, over all groups, that a row of `length` tokens with `hit` entries found will hold at most."""
        cdef int32_t g
        cdef int32_t new
        cdef int32_t total = 0
        for g in range(self.num_groups):
            new = self.blocks_for(length) - hit
            new = min(new, self.most[g] - (hit - self.needed_from(g, hit * self.block_size)))
            total += max(new, 0)
        return total

    cdef int32_t missing(self, slot_t slot, int32_t end) noexcept nogil:
        """Blocks that positions up to `end` still need."""
        return (self.blocks_for(end) - self.size[slot]) * self.num_groups

    cdef int grow(self, slot_t slot, int32_t end) noexcept nogil:
        """Take the missing blocks; the caller has seen that the pool has them. -1: no memory for the row."""
        cdef int32_t target = self.blocks_for(end)
        cdef int32_t j
        cdef int32_t g
        cdef block_t block
        if self._reserve(slot, target) < 0:
            return -1
        for j in range(self.size[slot], target):
            for g in range(self.num_groups):
                block = self.pool.take()
                if self.pool.named[block]:
                    self.index.remove(block)
                    self.pool.unname(block)
                self.rows[slot * self.num_groups + g][j] = block
        self.size[slot] = max(self.size[slot], target)
        return 0

    cdef bint grow_idle(self, slot_t slot, int32_t end) noexcept nogil:
        """Whether the slot has the blocks up to `end`, or takes them from the blocks that lie idle."""
        cdef int32_t missing = self.missing(slot, end)
        if missing <= 0:
            return True
        if missing > self.pool.num_free + self.pool.num_cached:
            return False
        return self.grow(slot, end) == 0

    cdef int _reserve(self, slot_t slot, int32_t count) noexcept nogil:
        cdef int32_t room = self.room[slot]
        cdef int32_t g
        cdef int32_t* grown
        if count <= room:
            return 0
        room = min(max(count, room + (room >> 1) + 8), max(self.max_blocks, count))
        for g in range(self.num_groups):
            grown = <int32_t*>realloc(self.rows[slot * self.num_groups + g], <size_t>room * sizeof(int32_t))
            if not grown:
                return -1
            self.rows[slot * self.num_groups + g] = grown
        self.room[slot] = room
        return 0

    cdef int32_t match(self, slot_t slot) noexcept nogil:
        """Entries that can be taken over from the prefix index, leaving one token at least to compute.

        Fills `hits`, and `num_revived` with how many of them are idle now. Takes nothing.
        """
        cdef int32_t count = (self.seqs.num_tokens[slot] - 1) // self.block_size
        cdef int32_t g
        cdef int32_t j
        cdef int32_t low
        cdef int32_t before
        self.num_revived = 0
        if not self.caching or not self.seqs.read_cache[slot]:
            return 0
        if self.primary < 0 and self._hash(slot, count) < 0:
            return 0
        if self.primary >= 0:
            count = self._walk(slot, count)
        before = -1
        while before != count:
            # A gap in one group's window shortens the hit for all groups: go round until nobody objects.
            before = count
            for g in range(self.num_groups):
                if g == self.primary:
                    continue
                low = self.needed_from(g, count * self.block_size)
                for j in range(count - 1, low - 1, -1):
                    self.hits[g * self.max_blocks + j] = self._lookup(slot, g, j)
                    if not self.hits[g * self.max_blocks + j]:
                        count = j
                        break
        for g in range(self.num_groups):
            for j in range(self.needed_from(g, count * self.block_size), count):
                if self.pool.refs[self.hits[g * self.max_blocks + j]] == 0:
                    self.num_revived += 1
        return count

    cdef int32_t _walk(self, slot_t slot, int32_t count) noexcept nogil:
        """Follow the primary group's chain from its root until the first miss."""
        cdef int32_t j
        for j in range(count):
            if self._hash(slot, j + 1) < 0:
                return j
            self.hits[self.primary * self.max_blocks + j] = self._lookup(slot, self.primary, j)
            if not self.hits[self.primary * self.max_blocks + j]:
                return j
        return count

    cdef block_t _lookup(self, slot_t slot, int32_t group, int32_t j) noexcept nogil:
        cdef Name name
        cdef block_t above = 0
        if self.primary >= 0:
            if group != self.primary:
                above = self.hits[self.primary * self.max_blocks + j]
            elif j:
                above = self.hits[self.primary * self.max_blocks + j - 1]
        self._name(slot, group, j, above, &name)
        cdef int32_t num_words = self.seqs.gather(slot, j * self.block_size, self.block_size, &self.scratch[0])
        return self.index.find(&name, &self.scratch[0], num_words)

    cdef void _name(self, slot_t slot, int32_t group, int32_t j, block_t above, Name* name) noexcept nogil:
        """What entry j is called. `above`: its parent (primary group) or the primary's block at j (other groups)."""
        cdef const uint64_t* hashes = self.seqs.hashes[slot]
        name.hash_lo = hashes[2 * j] & self.index.keep_lo
        name.hash_hi = hashes[2 * j + 1] & self.index.keep_hi
        name.depth = j
        name.group = group
        if self.primary >= 0 and (j or group != self.primary):
            name.link_lo = <uint64_t>self.index.entries[above].serial
            name.link_hi = 0
        elif j:
            # No full group keeps the chain alive: the parent's 128-bit hash stands for it.
            name.link_lo = hashes[2 * j - 2]
            name.link_hi = hashes[2 * j - 1]
        else:
            name.link_lo = self.seqs.root_lo[slot]
            name.link_hi = self.seqs.root_hi[slot]

    cdef int _hash(self, slot_t slot, int32_t count) noexcept nogil:
        """Make sure the chain hashes of the slot's first `count` entries are known; -1: no memory."""
        cdef int32_t j = self.seqs.num_hashed[slot]
        cdef int32_t room = self.seqs.hash_room[slot]
        cdef uint64_t root[2]
        cdef uint64_t* grown
        cdef int32_t num_words
        if count > room:
            room = max(count, room + (room >> 1) + 8)
            grown = <uint64_t*>realloc(self.seqs.hashes[slot], <size_t>room * 2 * sizeof(uint64_t))
            if not grown:
                return -1
            self.seqs.hashes[slot] = grown
            self.seqs.hash_room[slot] = room
        root[0] = self.seqs.root_lo[slot]
        root[1] = self.seqs.root_hi[slot]
        while j < count:
            num_words = self.seqs.gather(slot, j * self.block_size, self.block_size, &self.scratch[0])
            self.index.chain(
                &self.seqs.hashes[slot][2 * j - 2] if j else root, &self.scratch[0], num_words,
                &self.seqs.hashes[slot][2 * j],
            )
            j += 1
            self.seqs.num_hashed[slot] = j
        return 0

    cdef int attach(self, slot_t slot, int32_t count) noexcept nogil:
        """Take over the first `count` hits of the match() just made; the slot holds no blocks. -1: no memory."""
        cdef int32_t g
        cdef int32_t j
        cdef int32_t low
        cdef int32_t* row
        if self._reserve(slot, count) < 0:
            return -1
        for g in range(self.num_groups):
            row = self.rows[slot * self.num_groups + g]
            low = self.needed_from(g, count * self.block_size)
            self.first[slot * self.num_groups + g] = low
            for j in range(low):
                row[j] = 0
            for j in range(low, count):
                row[j] = self.hits[g * self.max_blocks + j]
                self.pool.hold(row[j])
        self.size[slot] = count
        self.dirty[slot] = 0
        return 0

    cdef void settle(self, slot_t slot) noexcept nogil:
        """A slot's committed KV has crossed a block's end: name what is full, drop what no token needs again."""
        cdef int32_t full = self.seqs.committed[slot] // self.block_size
        if self.caching and not self.seqs.unnamed[slot]:
            self._names(slot, full)
        self._trim(slot, self.seqs.committed[slot])
        self.seqs.boundary[slot] = (full + 1) * self.block_size

    cdef void _names(self, slot_t slot, int32_t end) noexcept nogil:
        cdef int32_t j
        cdef int32_t k
        cdef int32_t g
        cdef block_t own
        cdef block_t other
        cdef block_t above
        cdef int32_t num_words
        cdef int32_t* row
        cdef Name name
        if self._hash(slot, end) < 0:
            return
        for j in range(self.seqs.num_named[slot], end):
            num_words = self.seqs.gather(slot, j * self.block_size, self.block_size, &self.scratch[0])
            for k in range(self.num_groups):
                # The primary group first: the others' names hang on its block.
                g = k
                if self.primary > 0 and k <= self.primary:
                    g = self.primary if k == 0 else k - 1
                row = self.rows[slot * self.num_groups + g]
                own = row[j]
                if own == 0:
                    continue
                above = 0
                if self.primary >= 0:
                    if g != self.primary:
                        above = self.rows[slot * self.num_groups + self.primary][j]
                    elif j:
                        above = row[j - 1]
                self._name(slot, g, j, above, &name)
                other = self.index.find(&name, &self.scratch[0], num_words)
                if other == 0:
                    self.index.insert(own, &name, &self.scratch[0], num_words)
                    self.pool.name(own)
                elif other != own and self.seqs.traced[slot]:
                    # It is read by the table that the device knows: a change might not get there before its end.
                    self.seqs.unnamed[slot] = 1
                    return
                elif other != own:
                    self.pool.hold(other)
                    row[j] = other
                    self.pool.release(own)
                    self.dirty[slot] = min(self.dirty[slot], j)
            self.seqs.num_named[slot] = j + 1

    cdef void _trim(self, slot_t slot, int32_t position) noexcept nogil:
        """Free entries that tokens from `position` on do not read."""
        cdef int32_t g
        cdef int32_t j
        cdef int32_t at
        cdef int32_t low
        for g in range(self.num_groups):
            at = slot * self.num_groups + g
            low = min(self.needed_from(g, position), self.size[slot])
            # Later entries first, so that of a chain the beginning is evicted last.
            for j in range(low - 1, self.first[at] - 1, -1):
                self.pool.release(self.rows[at][j])
                self.rows[at][j] = 0
            self.first[at] = max(self.first[at], low)

    cdef void release(self, slot_t slot) noexcept nogil:
        """Free everything the slot holds, the end first: it is the part that others are least likely to share."""
        cdef int32_t g
        cdef int32_t j
        for j in range(self.size[slot] - 1, -1, -1):
            for g in range(self.num_groups):
                if self.rows[slot * self.num_groups + g][j]:
                    self.pool.release(self.rows[slot * self.num_groups + g][j])
        for g in range(self.num_groups):
            free(self.rows[slot * self.num_groups + g])
            self.rows[slot * self.num_groups + g] = NULL
            self.first[slot * self.num_groups + g] = 0
        self.size[slot] = 0
        self.dirty[slot] = 0
        self.room[slot] = 0

    cdef int32_t num_changed(self, slot_t slot) noexcept nogil:
        """Entries that the device does not know yet."""
        return (self.size[slot] - self.dirty[slot]) * self.num_groups

    cdef void send(self, slot_t slot, StepPlan plan) noexcept nogil:
        """Write the slot's changes into the plan that names it; the caller has seen that they fit."""
        cdef int32_t j
        cdef int32_t g
        for j in range(self.dirty[slot], self.size[slot]):
            for g in range(self.num_groups):
                plan.update(slot, g, j, self.rows[slot * self.num_groups + g][j])
        self.dirty[slot] = self.size[slot]

    cdef void forget_names(self) noexcept nogil:
        """Empty the prefix index. Blocks of live rows lose their names as well, and those rows name no more."""
        cdef int32_t i
        for i in range(1, self.pool.total + 1):
            if self.pool.named[i]:
                self.pool.unname(i)
        if self.caching:
            self.index.clear()
        for i in range(self.num_slots):
            if self.size[i]:
                self.seqs.unnamed[i] = 1

    cdef void disown(self, slot_t slot) noexcept nogil:
        """What the slot computed is not what its blocks are called: they lose their names, so nobody finds them.

        Live rows that share some of them go on, but name no more: it would hang on forgotten parents.
        """
        cdef int32_t g
        cdef int32_t j
        cdef slot_t other
        cdef block_t block
        for g in range(self.num_groups):
            for j in range(self.size[slot]):
                block = self.rows[slot * self.num_groups + g][j]
                if block == 0 or not self.pool.named[block]:
                    continue
                self.index.remove(block)
                self.pool.unname(block)
                for other in range(self.num_slots):
                    if j < self.size[other] and self.rows[other * self.num_groups + g][j] == block:
                        self.seqs.unnamed[other] = 1

    def row(self, int32_t slot, int32_t group=0):
        """A slot's blocks in one group (for tests); 0 where an entry is dropped."""
        if not (0 <= slot < self.num_slots and 0 <= group < self.num_groups):
            raise ValueError(f"slot {slot}, group {group}: have {self.num_slots} slots and {self.num_groups} groups")
        return [self.rows[slot * self.num_groups + group][j] for j in range(self.size[slot])]
