"""BlockNames: names of block-table entries in the prefix index.

Owner: the device thread, only through BlockTables. In: a slot's keys and root. Out: chain hashes, names, and the blocks
with these names. A name is a hash, a depth, a group, and a link to the entry before it or above it:

    primary group    root <- block 0 <- block 1 <- block 2         the link is the serial number of the parent's name
    other groups             block 0    block 1    block 2         ... of the primary's name at the same entry
    no primary       root <- hash 0  <- hash 1  <- hash 2          no block is held to the end: the link is a hash
"""

from array import array

cimport cython
from libc.stdlib cimport realloc

from _fast.types cimport uint64_t


@cython.final
cdef class BlockNames:
    """Names of one scheduler's blocks; `primary`: the group whose chain proves the prefix for others, or -1."""

    def __init__(self, PrefixIndex index not None, SeqTable seqs not None, int32_t block_size, int32_t primary):
        self.index = index
        self.seqs = seqs
        self.block_size = block_size
        self.primary = primary
        self.keys = array("q", bytes(16 * block_size))

    cdef int hash(self, slot_t slot, int32_t count) noexcept nogil:
        """Make sure that the chain hashes of the slot's first `count` entries are computed; -1: no memory."""
        cdef int32_t j = self.seqs.of[slot].num_hashed
        cdef int32_t room = self.seqs.of[slot].hash_room
        cdef uint64_t root[2]
        cdef uint64_t* grown
        cdef int32_t num_words
        if count > room:
            room = max(count, room + (room >> 1) + 8)
            grown = <uint64_t*>realloc(self.seqs.of[slot].hashes, <size_t>room * 2 * sizeof(uint64_t))
            if not grown:
                return -1
            self.seqs.of[slot].hashes = grown
            self.seqs.of[slot].hash_room = room
        root[0] = self.seqs.of[slot].root_lo
        root[1] = self.seqs.of[slot].root_hi
        while j < count:
            num_words = self.seqs.gather(slot, j * self.block_size, self.block_size, &self.keys[0])
            self.index.chain(
                &self.seqs.of[slot].hashes[2 * j - 2] if j else root, &self.keys[0], num_words,
                &self.seqs.of[slot].hashes[2 * j],
            )
            j += 1
            self.seqs.of[slot].num_hashed = j
        return 0

    cdef block_t find(self, slot_t slot, int32_t group, int32_t j, block_t above) noexcept nogil:
        """Return the block with the name of entry j, or 0; above: as in name_entry()."""
        cdef Name name
        cdef int32_t num_words = self.seqs.gather(slot, j * self.block_size, self.block_size, &self.keys[0])
        name_entry(self, slot, group, j, above, &name)
        return self.index.find(&name, &self.keys[0], num_words)
