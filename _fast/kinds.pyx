"""Kinds of cache groups: the rules by which the layers of a group use blocks, one branch for each kind.

Owner: none, there is no state here. In: a group's kind and window, as a class of engine/cache declares them. Out: the
blocks that a row needs, the positions where a chunk may end, the entries that the prefix index names. Block tables,
shares and the planner ask here through BlockTables, and no other module compares kinds.

Entry j of a row's block table holds positions j * block_size .. (j + 1) * block_size - 1. Kinds differ in which earlier
entries a token still reads:

    full      [b b b b b b]          sliding  [0 0 0 b b b]   (the window reaches back two blocks)

Another kind is a member of GroupKind, its branches below, and a file in engine/cache that declares it; `window` is the
one number that it brings, whatever it counts. A latent for each token has the answers of full. A state, which each
token reads and replaces, has one block for a row and one more for each step in flight: `takes` gives one to the entries
where a step may end, `needed_from` is the entry of the token before, `chunk_end` is a multiple of `window`, and
`is_named` is true of an entry whose end is what is committed: there alone a block holds the state after its last token.
"""

FULL = GROUP_FULL  # every earlier token is read
SLIDING = GROUP_SLIDING  # the last `window` tokens are read, the newest included
STATE = 2  # a row has runs of blocks, whatever its tokens (engine/cache/state); block tables have no such group


cdef int fill_group(Group* group, int32_t kind, int32_t window, int32_t block_size, int32_t max_chunk) except -1:
    """ValueError unless there is such a kind, and its window is right."""
    if kind not in (GROUP_FULL, GROUP_SLIDING):
        raise ValueError(f"a group has kind {kind}: 0 is full, 1 is sliding")
    if kind == GROUP_SLIDING and window < 1:
        raise ValueError(f"a group slides with window {window}: at least 1 token")
    group.kind, group.window, group.block_size, group.max_chunk = kind, window, block_size, max_chunk
    return 0


cdef int32_t needed_from(const Group* group, int32_t position) noexcept nogil:
    """The first entry that a token at `position`, or a later one, reads."""
    if group.kind == GROUP_SLIDING and position >= group.window:
        return (position - group.window + 1) // group.block_size
    return 0


cdef int32_t demand(const Group* group, int32_t hit, int32_t entries) noexcept nogil:
    """New blocks that a row holds at once, at most, on its way from `hit` entries, which it found, to `entries`."""
    cdef int32_t most = entries - hit
    if group.kind == GROUP_SLIDING:
        # The window, a chunk in flight and the next one that is planned meanwhile, and ragged ends.
        most = min(most, (group.window + 2 * group.max_chunk) // group.block_size + 3
                   - (hit - needed_from(group, hit * group.block_size)))
    return max(most, 0)


cdef bint takes(const Group* group, int32_t entry, int32_t least, int32_t target) noexcept nogil:
    """Whether a new entry takes a block, for a step that ends with `least` to `target` entries; both kinds: each."""
    return entry < target


cdef int32_t chunk_end(const Group* group, int32_t start, int32_t end) noexcept nogil:
    """Where a chunk from `start` on ends that may reach up to `end`: behind `start`; both kinds: at `end`.

    A bidirectional span, or media for which the encoder has no room yet, may still end the chunk elsewhere.
    """
    return end


cdef bint is_named(const Group* group, int32_t entry, int32_t committed) noexcept nogil:
    """Whether the prefix index names a full entry when `committed` tokens are; both kinds: if the row holds it."""
    return (entry + 1) * group.block_size <= committed


cdef bint vouches(const Group* group) noexcept nogil:
    """Whether a row holds each entry to its end and each is named: a chain of these names stands for the prefix."""
    return group.kind == GROUP_FULL


def lasts(int32_t kind, int32_t window):
    """Whether a row holds its blocks in a group to its end."""
    cdef Group group
    fill_group(&group, kind, window, 1, 1)
    return vouches(&group)


def row_blocks(int32_t kind, int32_t window, int32_t num_tokens, int32_t block_size, int32_t max_chunk):
    """Blocks that a row of so many tokens holds at most in a group; `max_chunk`: of these in a step."""
    cdef Group group
    fill_group(&group, kind, window, block_size, max_chunk)
    return demand(&group, 0, (num_tokens + block_size - 1) // block_size)
