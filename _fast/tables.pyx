"""BlockTables: the blocks that hold each slot's KV, by cache group, and the changes not yet sent to the device.

Owner: the device thread, only through Scheduler. In: how far a slot's KV will reach, and how far it is committed. Out:
blocks taken from the one pool, prefix hits, names for full committed blocks, changes for the StepPlan.
Entry j of a slot's table holds positions j * block_size .. (j + 1) * block_size - 1, in every group. Differences
between groups are defined by their kinds (kinds.pyx): an entry is 0 if the kind takes no block for it, or if no token
reads it any more. States have runs of blocks in place of entries (states.pyx).

When a row commits a full block and an equal block is already named, the row switches to it and frees its own. So rows
with equal prefixes hold the same blocks, and a block's parent is in use whenever the block is, and evicted later.
"""

from array import array

cimport cython
from libc.stdlib cimport calloc, free, realloc

from _fast cimport kinds
from _fast.checkpoints cimport Checkpoints
from _fast.names cimport name_entry
from _fast.prefix cimport Name, PrefixIndex


@cython.final
cdef class BlockTables:
    """Rows of block numbers per slot and group; all groups draw from one pool."""

    def __cinit__(self, BlockPool pool, PrefixIndex index, SeqTable seqs, list groups, int32_t block_size,
                  int32_t max_len, int32_t max_chunk, bint caching, int32_t most_new_runs, int32_t state_mode,
                  int32_t state_every, double state_share):
        cdef int32_t i
        cdef int32_t chunk = kinds.take_states(groups)  # groups of states share runs and have no block tables
        self.num_slots = seqs.num_slots
        self.num_groups = <int32_t>len(groups)
        self.rows = <int32_t**>calloc(<size_t>self.num_slots * max(self.num_groups, 1), sizeof(int32_t*))
        self.groups = <Group*>calloc(max(self.num_groups, 1), sizeof(Group))
        if not self.rows or not self.groups:
            raise MemoryError(f"no memory for the block tables of {self.num_slots} slots")
        self.primary = -1
        for i in range(self.num_groups):
            kind, window = groups[i]
            kinds.fill_group(&self.groups[i], kind, window, block_size, max_chunk)
            if self.primary < 0 and kinds.vouches(&self.groups[i]):
                self.primary = i
        self.pool = pool
        self.seqs = seqs
        self.names = BlockNames(index, seqs, block_size, self.primary)
        if (chunk > 0) != (pool.sizes[1] > 0):
            raise ValueError("groups of states need state_blocks and tail_blocks, and other groups need none")
        cache = Checkpoints(pool, self.names, self.num_groups, state_share, most_new_runs)
        self.states = StateRuns(cache, pool, seqs, chunk, state_mode if caching else 0, state_every)
        self.caching = caching
        self.block_size = block_size
        self.max_blocks = (max_len + block_size - 1) // block_size
        self.size = array("i", bytes(4 * self.num_slots))
        self.dirty = array("i", bytes(4 * self.num_slots))
        self.room = array("i", bytes(4 * self.num_slots))
        self.first = array("i", bytes(4 * self.num_slots * max(self.num_groups, 1)))
        self.hits = array("i", bytes(4 * max(self.num_groups, 1) * (self.max_blocks + 1)))

    def __dealloc__(self):
        cdef int32_t i
        for i in range(self.num_slots * self.num_groups if self.rows else 0):
            free(self.rows[i])
        free(self.rows)
        free(self.groups)

    cdef int32_t blocks_for(self, int32_t length) noexcept nogil:
        """Return the number of entries for `length` tokens."""
        return (length + self.block_size - 1) // self.block_size

    cdef int32_t demand(self, int32_t hit, int32_t length) noexcept nogil:
        """Return the most new blocks, in all groups, of a row of `length` tokens with `hit` found entries."""
        cdef int32_t entries = self.blocks_for(length)
        cdef int32_t total = self.states.demand(hit) if self.states.active else 0
        cdef int32_t g
        for g in range(self.num_groups):
            total += kinds.demand(&self.groups[g], hit, entries)
        return total

    cdef bint covers(self, slot_t slot, int32_t reach) noexcept nogil:
        """Whether the slot's entries cover positions up to `reach`."""
        return reach <= self.size[slot] * self.block_size

    cdef int32_t missing(self, slot_t slot, int32_t end, int32_t reach) noexcept nogil:
        """Return the missing blocks, in all groups, for a step that ends between `end` and `reach`."""
        cdef int32_t target = self.blocks_for(reach)
        cdef int32_t start = self.seqs.of[slot].computed
        cdef int32_t total = self.states.missing(slot, start, end - start) if self.states.active else 0
        cdef int32_t g
        cdef int32_t j
        for j in range(self.size[slot], target):
            for g in range(self.num_groups):
                total += kinds.takes(&self.groups[g], j, self.blocks_for(end), target)
        return total

    cdef int32_t chunk_end(self, int32_t start, int32_t end) noexcept nogil:
        """Return where a chunk from `start` on, up to at most `end`, ends: a position that every group allows."""
        cdef int32_t before = -1
        cdef int32_t g
        while before != end:
            before = end
            for g in range(self.num_groups):
                end = kinds.chunk_end(&self.groups[g], start, end)
        return end

    cdef int grow(self, slot_t slot, int32_t end, int32_t reach) noexcept nogil:
        """Take the missing blocks; the caller has checked that the pool has them. -1: no memory or no room."""
        cdef int32_t start = self.seqs.of[slot].computed
        if self.states.active and not self.states.take(slot, start, end - start):
            return -1
        return self._append(slot, self.blocks_for(end), self.blocks_for(reach))

    cdef int _append(self, slot_t slot, int32_t least, int32_t target) noexcept nogil:
        """Append entries up to `target` for a step that ends with at least `least` entries. -1: no memory."""
        cdef int32_t j
        cdef int32_t g
        cdef block_t block
        if self._reserve(slot, target) < 0:
            return -1
        for j in range(self.size[slot], target):
            for g in range(self.num_groups):
                block = 0
                if kinds.takes(&self.groups[g], j, least, target):
                    if self.states.active:
                        self.states.cache.free_block()
                    block = self.pool.take()
                    if self.pool.named[block]:
                        self.states.cache.forget(block)
                self.rows[slot * self.num_groups + g][j] = block
        self.size[slot] = max(self.size[slot], target)
        return 0

    cdef bint grow_idle(self, slot_t slot, int32_t end, int32_t reach) noexcept nogil:
        """Take missing blocks from idle blocks; return whether no block is missing afterwards."""
        if self.covers(slot, reach) and not self.states.active:
            return True
        return self.missing(slot, end, reach) <= self.pool.num_idle() and self.grow(slot, end, reach) == 0

    cdef int _reserve(self, slot_t slot, int32_t count) noexcept nogil:
        """Enlarge the slot's rows to `count` entries; -1: no memory."""
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
        """Return the number of entries available in the prefix index; at least one token is left to compute.

        Fills `hits`, and sets `num_revived` to how many of them are idle now. Takes no blocks.
        """
        cdef int32_t count = (self.seqs.of[slot].num_tokens - 1) // self.block_size
        cdef int32_t before
        cdef int32_t g
        cdef int32_t j
        self.num_revived = 0
        self.states.reach = self.states.found = 0
        if not self.caching or not self.seqs.of[slot].read_cache:
            return 0
        if self.primary < 0 and self.names.hash(slot, count) < 0:
            return 0
        if self.primary >= 0:
            count = self._walk(slot, count)
        if self.states.active:
            before = -1
            count = self._common(slot, count)
            self.states.reach = count if self.num_groups else 0
            while before != count:  # a shorter hit has other windows, and a gap requires another state
                before = count
                count = self.states.shorten(
                    slot, count, &self.hits[self.primary * self.max_blocks] if self.primary >= 0 else NULL
                )
                count = self._common(slot, count)
            self.num_revived = self.states.revived()
        else:
            count = self._common(slot, count)
        for g in range(self.num_groups):
            for j in range(kinds.needed_from(&self.groups[g], count * self.block_size), count):
                if self.pool.refs[self.hits[g * self.max_blocks + j]] == 0:
                    self.num_revived += 1
        return count

    cdef int32_t _common(self, slot_t slot, int32_t count) noexcept nogil:
        """Return how many of `count` entries of the primary group a row can use: all groups have what it needs."""
        cdef int32_t before = -1
        cdef int32_t g
        cdef int32_t j
        cdef int32_t low
        while before != count:
            # A gap in one group's window shortens the hit for all groups: repeat until no group shortens it.
            before = count
            for g in range(self.num_groups):
                if g == self.primary:
                    continue
                low = kinds.needed_from(&self.groups[g], count * self.block_size)
                for j in range(count - 1, low - 1, -1):
                    self.hits[g * self.max_blocks + j] = self._lookup(slot, g, j)
                    if not self.hits[g * self.max_blocks + j]:
                        count = j
                        break
        return count

    cdef int32_t _walk(self, slot_t slot, int32_t count) noexcept nogil:
        """Follow the primary group's chain from its root to the first miss."""
        cdef int32_t j
        for j in range(count):
            if self.names.hash(slot, j + 1) < 0:
                return j
            self.hits[self.primary * self.max_blocks + j] = self._lookup(slot, self.primary, j)
            if not self.hits[self.primary * self.max_blocks + j]:
                return j
        return count

    cdef block_t _lookup(self, slot_t slot, int32_t group, int32_t j) noexcept nogil:
        """Return the named block of entry j, or 0; the primary's hits up to j must be known."""
        cdef block_t above = 0
        if self.primary >= 0:
            if group != self.primary:
                above = self.hits[self.primary * self.max_blocks + j]
            elif j:
                above = self.hits[self.primary * self.max_blocks + j - 1]
        return self.names.find(slot, group, j, above)

    cdef int attach(self, slot_t slot, int32_t count) noexcept nogil:
        """Take the first `count` hits of the last match(); the slot must hold no blocks. -1: no memory."""
        cdef int32_t g
        cdef int32_t j
        cdef int32_t low
        cdef int32_t* row
        if self._reserve(slot, count) < 0:
            return -1
        for g in range(self.num_groups):
            row = self.rows[slot * self.num_groups + g]
            low = kinds.needed_from(&self.groups[g], count * self.block_size)
            self.first[slot * self.num_groups + g] = low
            for j in range(low):
                row[j] = 0
            for j in range(low, count):
                row[j] = self.hits[g * self.max_blocks + j]
                self.pool.hold(row[j])
        self.size[slot] = count
        self.dirty[slot] = 0
        if self.states.active:
            self.states.attach(slot, count, self.primary_row(slot))
        return 0

    cdef void settle(self, slot_t slot) noexcept nogil:
        """Name full blocks and drop unneeded ones, after committed KV has crossed a block's end."""
        cdef int32_t full = self.seqs.of[slot].committed // self.block_size
        if self.caching and not self.seqs.of[slot].unnamed:
            self._names(slot, full)
        self._trim(slot, self.seqs.of[slot].committed)
        self.seqs.of[slot].boundary = (full + 1) * self.block_size

    cdef const int32_t* primary_row(self, slot_t slot) noexcept nogil:
        """Return the slot's blocks in the primary group; NULL: there is none."""
        return self.rows[slot * self.num_groups + self.primary] if self.primary >= 0 else NULL

    cdef void _names(self, slot_t slot, int32_t end) noexcept nogil:
        """Name the unnamed entries before `end`; if an equal block has the name, the slot switches to that block."""
        cdef int32_t j
        cdef int32_t k
        cdef int32_t g
        cdef block_t own
        cdef block_t other
        cdef block_t above
        cdef int32_t num_words
        cdef int32_t* row
        cdef Name name
        if self.names.hash(slot, end) < 0:
            return
        for j in range(self.seqs.of[slot].num_named, end):
            num_words = self.seqs.gather(slot, j * self.block_size, self.block_size, &self.names.keys[0])
            for k in range(self.num_groups):
                # The primary group comes first, because names of other groups link to its block.
                g = k
                if self.primary > 0 and k <= self.primary:
                    g = self.primary if k == 0 else k - 1
                row = self.rows[slot * self.num_groups + g]
                own = row[j]
                if own == 0 or not kinds.is_named(&self.groups[g], j, self.seqs.of[slot].committed):
                    continue
                above = 0
                if self.primary >= 0:
                    if g != self.primary:
                        above = self.rows[slot * self.num_groups + self.primary][j]
                    elif j:
                        above = row[j - 1]
                name_entry(self.names, slot, g, j, above, &name)
                other = self.names.index.find(&name, &self.names.keys[0], num_words)
                if other == 0:
                    self.names.index.insert(own, &name, &self.names.keys[0], num_words)
                    self.pool.name(own)
                elif other != own and self.seqs.of[slot].traced:
                    # The device's table includes this block, and a change might not be sent before the row's end.
                    self.seqs.of[slot].unnamed = 1
                    return
                elif other != own:
                    self.pool.hold(other)
                    row[j] = other
                    self.pool.release(own)
                    self.dirty[slot] = min(self.dirty[slot], j)
            self.seqs.of[slot].num_named = j + 1

    cdef void _trim(self, slot_t slot, int32_t position) noexcept nogil:
        """Free entries that tokens from `position` on do not read."""
        cdef int32_t g
        cdef int32_t j
        cdef int32_t at
        cdef int32_t low
        for g in range(self.num_groups):
            at = slot * self.num_groups + g
            low = min(kinds.needed_from(&self.groups[g], position), self.size[slot])
            # Later entries first, so that the beginning of a chain is evicted last.
            for j in range(low - 1, self.first[at] - 1, -1):
                if self.rows[at][j]:
                    self.pool.release(self.rows[at][j])
                    self.rows[at][j] = 0
            self.first[at] = max(self.first[at], low)

    cdef void release(self, slot_t slot) noexcept nogil:
        """Free all blocks of the slot, the end first, because others are least likely to share it."""
        cdef int32_t g
        cdef int32_t j
        if self.states.active:
            self.states.release(slot, self.primary_row(slot))
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
        """Return the number of entries that were not sent to the device yet."""
        return (self.size[slot] - self.dirty[slot]) * self.num_groups

    cdef void send(self, slot_t slot, StepPlan plan) noexcept nogil:
        """Write the slot's changes into the plan that includes the slot; the caller has checked that they fit."""
        cdef int32_t j
        cdef int32_t g
        for j in range(self.dirty[slot], self.size[slot]):
            for g in range(self.num_groups):
                plan.update(slot, g, j, self.rows[slot * self.num_groups + g][j])
        self.dirty[slot] = self.size[slot]

    cdef void forget_names(self) noexcept nogil:
        """Empty the prefix index. Blocks of live rows lose their names, too, and these rows name no more blocks."""
        cdef int32_t i
        if self.states.active:
            self.states.cache.drop_all()
        for i in range(1, self.pool.total + 1):
            if self.pool.named[i]:
                self.pool.unname(i)
        if self.caching:
            self.names.index.clear()
        for i in range(self.num_slots):
            if self.size[i]:
                self.seqs.of[i].unnamed = 1

    cdef void disown(self, slot_t slot) noexcept nogil:
        """Remove the slot's blocks, whose contents are wrong, from the prefix index, so that no request finds them.

        Live rows that share some of these blocks continue, but name no more blocks, because the parents have no names.
        """
        cdef int32_t g
        cdef int32_t j
        cdef slot_t other
        cdef block_t block
        if self.states.active:
            self.states.disown(slot)
        for g in range(self.num_groups):
            for j in range(self.size[slot]):
                block = self.rows[slot * self.num_groups + g][j]
                if block == 0 or not self.pool.named[block]:
                    continue
                self.states.cache.forget(block)
                for other in range(self.num_slots):
                    if j < self.size[other] and self.rows[other * self.num_groups + g][j] == block:
                        self.seqs.of[other].unnamed = 1

    def row(self, int32_t slot, int32_t group=0):
        """Return a slot's blocks in one group (for tests); 0 for a dropped entry."""
        if not (0 <= slot < self.num_slots and 0 <= group < self.num_groups):
            raise ValueError(f"slot {slot}, group {group}: have {self.num_slots} slots and {self.num_groups} groups")
        return [self.rows[slot * self.num_groups + group][j] for j in range(self.size[slot])]
