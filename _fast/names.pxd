from _fast.prefix cimport Name, PrefixIndex
from _fast.seqs cimport SeqTable
from _fast.types cimport block_t, int32_t, int64_t, slot_t, uint64_t


cdef class BlockNames:
    cdef PrefixIndex index
    cdef SeqTable seqs
    cdef int32_t block_size
    cdef int32_t primary
    cdef int64_t[::1] keys  # keys of one entry, as SeqTable.gather writes them

    cdef int hash(self, slot_t slot, int32_t count) noexcept nogil
    cdef block_t find(self, slot_t slot, int32_t group, int32_t j, block_t above) noexcept nogil


cdef inline void name_entry(BlockNames of, slot_t slot, int32_t group, int32_t j, block_t above,
                            Name* name) noexcept nogil:
    """Build the name of entry j. above: its parent (primary group) or the primary's block at j (other groups)."""
    cdef const uint64_t* hashes = of.seqs.of[slot].hashes
    name.hash_lo = hashes[2 * j] & of.index.keep_lo
    name.hash_hi = hashes[2 * j + 1] & of.index.keep_hi
    name.depth = j
    name.group = group
    if of.primary >= 0 and (j or group != of.primary):
        name.link_lo = <uint64_t>of.index.entries[above].serial
        name.link_hi = 0
    elif j:
        # No group keeps the chain alive: the parent's 128-bit hash is used in place of the parent.
        name.link_lo = hashes[2 * j - 2]
        name.link_hi = hashes[2 * j - 1]
    else:
        name.link_lo = of.seqs.of[slot].root_lo
        name.link_hi = of.seqs.of[slot].root_hi
