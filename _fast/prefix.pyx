"""PrefixIndex: maps chained block hashes to blocks, so that equal prefixes are computed once.

Owner: the device thread. In: a block's int64 keys, the hash of its parent chain, and a link that identifies the parent.
Out: the block with exactly these keys at this place, or 0. The keys are one word per position, its token id. A block
with media has second words after them, because 128 bits identify a medium: block_size or 2 * block_size words in total.
The hash is SipHash-2-4 with 128 bits, under a random key drawn at start-up, over the length-prefixed parent hash and
keys; it only determines where to look. A hit also requires equal keys, depth, group and link. The link is the parent
entry's serial number, which is never reused (at depth 0: the 16 root bytes). So by induction the whole chain is equal,
and hash collisions cost time but never yield a wrong block. If no group is full, the link is the parent's whole hash.

Table: open addressing, linear probing, at most half full; removal shifts later entries back, so there are no
tombstones.
"""

from array import array

cimport cython
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memset
from posix.stdlib cimport posix_memalign

from _fast cimport seqs


@cython.overflowcheck(False)
cdef inline uint64_t _rotate(uint64_t x, int bits) noexcept nogil:
    return (x << bits) | (x >> (64 - bits))


@cython.overflowcheck(False)
cdef inline void _rounds(uint64_t* v, int count) noexcept nogil:
    cdef int _i
    for _i in range(count):
        v[0] = v[0] + v[1]
        v[1] = _rotate(v[1], 13) ^ v[0]
        v[0] = _rotate(v[0], 32)
        v[2] = v[2] + v[3]
        v[3] = _rotate(v[3], 16) ^ v[2]
        v[0] = v[0] + v[3]
        v[3] = _rotate(v[3], 21) ^ v[0]
        v[2] = v[2] + v[1]
        v[1] = _rotate(v[1], 17) ^ v[2]
        v[2] = _rotate(v[2], 32)


@cython.overflowcheck(False)
cdef void siphash128(uint64_t key_lo, uint64_t key_hi, const uint64_t* head, int num_head, const uint64_t* tail,
                     int num_tail, uint64_t* out) noexcept nogil:
    """SipHash-2-4-128 of whole 64-bit words (head, then tail); little endian, like the paper's reference code."""
    cdef uint64_t v[4]
    cdef int i
    v[0] = key_lo ^ <uint64_t>0x736F6D6570736575
    v[1] = key_hi ^ <uint64_t>0x646F72616E646F6D ^ <uint64_t>0xEE
    v[2] = key_lo ^ <uint64_t>0x6C7967656E657261
    v[3] = key_hi ^ <uint64_t>0x7465646279746573
    for i in range(num_head):
        v[3] ^= head[i]
        _rounds(v, 2)
        v[0] ^= head[i]
    for i in range(num_tail):
        v[3] ^= tail[i]
        _rounds(v, 2)
        v[0] ^= tail[i]
    # The top byte of the last word is the length in bytes modulo 256; there are no remaining bytes.
    cdef uint64_t last = <uint64_t>((8 * (num_head + num_tail)) & 0xFF) << 56
    v[3] ^= last
    _rounds(v, 2)
    v[0] ^= last
    v[2] ^= 0xEE
    _rounds(v, 4)
    out[0] = v[0] ^ v[1] ^ v[2] ^ v[3]
    v[1] ^= 0xDD
    _rounds(v, 4)
    out[1] = v[0] ^ v[1] ^ v[2] ^ v[3]


@cython.final
cdef class PrefixIndex:
    """Names of blocks that hold block_size committed keys; at most one block per name."""

    def __cinit__(self, int32_t num_blocks, int32_t block_size, bytes hash_key, int hash_bits=128):
        cdef size_t count = max(num_blocks, 1)
        cdef size_t key_bytes = count * max(block_size, 1) * sizeof(int64_t)
        self.entries = NULL
        self.keys = NULL
        # calloc's pages cost nothing until they are written, so second words are free without media.
        self.seconds = <int64_t*>calloc(count, key_bytes // count)
        if (
            not self.seconds
            or posix_memalign(<void**>&self.entries, 64, count * sizeof(Entry))
            or posix_memalign(<void**>&self.keys, 64, key_bytes)
        ):
            raise MemoryError(f"no memory for the names of {num_blocks} blocks")
        memset(self.entries, 0, count * sizeof(Entry))
        memset(self.keys, 0, key_bytes)

    def __dealloc__(self):
        free(self.entries)
        free(self.keys)
        free(self.seconds)

    def __init__(self, int32_t num_blocks, int32_t block_size, bytes hash_key, int hash_bits=128):
        if len(hash_key) != 16:
            raise ValueError(f"hash_key has {len(hash_key)} bytes: SipHash takes exactly 16")
        if num_blocks < 2 or block_size < 1:
            raise ValueError(f"num_blocks={num_blocks}, block_size={block_size}: need at least 2 blocks of 1 token")
        if hash_bits not in (8, 128):
            raise ValueError(f"hash_bits={hash_bits}: 128, or 8 where a test wants collisions")
        cdef int32_t size = 8
        while size < 2 * num_blocks:
            size *= 2
        self.block_size = block_size
        self.key_lo = int.from_bytes(hash_key[:8], "little")
        self.key_hi = int.from_bytes(hash_key[8:], "little")
        self.keep_lo = <uint64_t>0xFF if hash_bits == 8 else ~(<uint64_t>0)
        self.keep_hi = <uint64_t>0 if hash_bits == 8 else ~(<uint64_t>0)
        self.mask = size - 1
        self.next_serial = 1
        self.num_entries = 0
        self.num_blocks = num_blocks
        self.table = array("i", bytes(4 * size))

    cdef void chain(self, const uint64_t* parent, const int64_t* keys, int32_t num_words, uint64_t* out) noexcept nogil:
        """Hash a block's keys with the parent's hash. Both parts include their length, so inputs cannot be confused."""
        cdef uint64_t head[4]
        head[0] = 16
        head[1] = parent[0]
        head[2] = parent[1]
        head[3] = <uint64_t>(8 * num_words)
        siphash128(self.key_lo, self.key_hi, head, 4, <const uint64_t*>keys, num_words, out)

    cdef void fetch(self, block_t block) noexcept nogil:
        """Begin to load a block's entry and keys."""
        seqs.fetch(&self.entries[block])
        seqs.fetch(&self.keys[<int64_t>block * self.block_size])

    @cython.overflowcheck(False)
    cdef int32_t _home(self, const Name* name) noexcept nogil:
        cdef uint64_t mixed = name.hash_lo ^ (name.hash_hi >> 17)
        mixed ^= <uint64_t>name.group * <uint64_t>0x9E3779B97F4A7C15
        return <int32_t>((mixed ^ (mixed >> 32)) & <uint64_t>self.mask)

    cdef block_t find(self, const Name* name, const int64_t* keys, int32_t num_words) noexcept nogil:
        """Return the block with this name and these keys, or 0."""
        cdef const Name* own
        cdef int32_t at = self._home(name)
        cdef block_t block = self.table[at]
        while block:
            own = &self.entries[block].name
            if (
                own.hash_lo == name.hash_lo
                and own.hash_hi == name.hash_hi
                and own.link_lo == name.link_lo
                and own.link_hi == name.link_hi
                and own.depth == name.depth
                and own.group == name.group
                and self.entries[block].num_words == num_words
                and self._holds(block, keys, num_words)
            ):
                return block
            at = (at + 1) & self.mask
            block = self.table[at]
        return 0

    cdef bint _holds(self, block_t block, const int64_t* keys, int32_t num_words) noexcept nogil:
        cdef size_t size = 8 * <size_t>self.block_size
        cdef int64_t at = <int64_t>block * self.block_size
        return memcmp(&self.keys[at], keys, size) == 0 and (
            num_words == self.block_size or memcmp(&self.seconds[at], keys + self.block_size, size) == 0
        )

    cdef void insert(self, block_t block, const Name* name, const int64_t* keys, int32_t num_words) noexcept nogil:
        """Name an unnamed block; the caller has checked with `find` that the name is free."""
        cdef int32_t at = self._home(name)
        cdef size_t size = 8 * <size_t>self.block_size
        while self.table[at]:
            at = (at + 1) & self.mask
        self.table[at] = block
        self.entries[block].name = name[0]
        self.entries[block].serial = self.next_serial
        self.entries[block].num_words = num_words
        memcpy(&self.keys[<int64_t>block * self.block_size], keys, size)
        if num_words > self.block_size:
            memcpy(&self.seconds[<int64_t>block * self.block_size], keys + self.block_size, size)
        self.next_serial += 1
        self.num_entries += 1

    cdef void remove(self, block_t block) noexcept nogil:
        """Remove a named block, then close the gap: an entry moves back unless its home is after the gap."""
        cdef int32_t gap = self._home(&self.entries[block].name)
        cdef int32_t at
        cdef int32_t home
        cdef block_t other
        while self.table[gap] != block:
            gap = (gap + 1) & self.mask
        at = gap
        while True:
            at = (at + 1) & self.mask
            other = self.table[at]
            if other == 0:
                break
            home = self._home(&self.entries[other].name)
            if ((at - home) & self.mask) >= ((at - gap) & self.mask):
                self.table[gap] = other
                gap = at
        self.table[gap] = 0
        self.num_entries -= 1

    cdef void clear(self) noexcept nogil:
        """Remove all entries; serial numbers continue, so links to former entries match nothing."""
        cdef int32_t i
        for i in range(self.mask + 1):
            self.table[i] = 0
        self.num_entries = 0

    # For tests: single operations with checked arguments. Links: root bytes, or a serial number as 16 bytes.

    def digest(self, bytes parent, keys):
        """Return the 16-byte chain hash of one block of keys with the given parent hash."""
        cdef int64_t[::1] view = self._check(keys)
        cdef uint64_t above[2]
        cdef uint64_t out[2]
        above[0] = int.from_bytes(parent[:8], "little")
        above[1] = int.from_bytes(parent[8:16], "little")
        self.chain(above, &view[0], <int32_t>view.shape[0], out)
        return int(out[0]).to_bytes(8, "little") + int(out[1]).to_bytes(8, "little")

    def lookup(self, bytes digest, bytes link, int32_t depth, int32_t group, keys):
        """Return the block with this name, or 0."""
        cdef int64_t[::1] view = self._check(keys)
        cdef Name name
        self._name(&name, digest, link, depth, group)
        return self.find(&name, &view[0], <int32_t>view.shape[0])

    def add(self, int32_t block, bytes digest, bytes link, int32_t depth, int32_t group, keys):
        """Name a block; return its serial number, the link of its children (16 bytes)."""
        cdef int64_t[::1] view = self._check(keys)
        cdef Name name
        self._name(&name, digest, link, depth, group)
        if not 0 < block < self.num_blocks:
            raise ValueError(f"block {block}: this index serves blocks 1 to {self.num_blocks - 1}")
        if self.find(&name, &view[0], <int32_t>view.shape[0]):
            raise ValueError("another block has this name already")
        self.insert(block, &name, &view[0], <int32_t>view.shape[0])
        return int(self.entries[block].serial).to_bytes(16, "little")

    def discard(self, int32_t block):
        """Remove a block; return whether it was named."""
        cdef int32_t i
        for i in range(self.mask + 1):
            if block and self.table[i] == block:
                self.remove(block)
                return True
        return False

    def blocks(self):
        """Return all named blocks (walks the table; for tests)."""
        return [self.table[i] for i in range(self.mask + 1) if self.table[i]]

    def reset(self):
        """Remove all entries."""
        self.clear()

    cdef _name(self, Name* name, bytes digest, bytes link, int32_t depth, int32_t group):
        if len(digest) != 16 or len(link) != 16:
            raise ValueError(f"digest has {len(digest)} and link {len(link)} bytes: both need 16")
        name.hash_lo = int.from_bytes(digest[:8], "little") & self.keep_lo
        name.hash_hi = int.from_bytes(digest[8:], "little") & self.keep_hi
        name.link_lo = int.from_bytes(link[:8], "little")
        name.link_hi = int.from_bytes(link[8:], "little")
        name.depth = depth
        name.group = group

    cdef _check(self, object keys):
        if len(keys) not in (self.block_size, 2 * self.block_size):
            raise ValueError(f"{len(keys)} words: a block has {self.block_size}, or twice as many if it has media")
        return array("q", keys)
