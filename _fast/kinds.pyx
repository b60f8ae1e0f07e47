"""Kinds of cache groups: rules by which a group's layers use blocks, with one branch per kind.

Owner: none, this module has no state. In: a group's kind and window, as a class of engine/cache declares them. Out: the
blocks that a row needs, the positions where a chunk may end, the entries that the prefix index names. Block tables,
shares and the planner use this module through BlockTables, and no other module compares kinds.

Entry j of a row's block table holds positions j * block_size .. (j + 1) * block_size - 1. Kinds differ in which earlier
entries a token still reads:

    full      [b b b b b b]          sliding  [0 0 0 b b b]   (the window reaches back two blocks)

A new kind needs a member of GroupKind, branches below, and a file in engine/cache that declares it. Its only parameter
is `window`, with any meaning. A latent for each token follows the rules of full. A state belongs to no token: groups of
states have no block-table entries, come after the groups that have them, and share runs (states.pyx).
"""

FULL = GROUP_FULL  # every earlier token is read
SLIDING = GROUP_SLIDING  # the last `window` tokens are read, including the newest
STATE = GROUP_STATE  # each row has a state after a multiple of `window` tokens, and the inputs of later tokens


cdef int fill_group(Group* group, int32_t kind, int32_t window, int32_t block_size, int32_t max_chunk) except -1:
    """Fill the group; raise ValueError if there is no such kind or its window is wrong."""
    if kind not in (GROUP_FULL, GROUP_SLIDING, GROUP_STATE):
        raise ValueError(f"a group has kind {kind}: 0 is full, 1 is sliding, 2 is a state")
    if kind == GROUP_STATE and window < 1:
        raise ValueError(f"a group of states folds {window} tokens at once: at least 1")
    if kind == GROUP_SLIDING and window < 1:
        raise ValueError(f"a group slides with window {window}: at least 1 token")
    group.kind, group.window, group.block_size, group.max_chunk = kind, window, block_size, max_chunk
    return 0


cdef int32_t take_states(list groups) except -1:
    """Remove the groups of states, which come last; return how many tokens their layers fold at once, or 0."""
    cdef int32_t chunk = 0
    cdef Group group
    while groups and groups[len(groups) - 1][0] == GROUP_STATE:
        fill_group(&group, GROUP_STATE, groups.pop()[1], 1, 1)
        chunk = max(chunk, group.window)
    if not groups and not chunk:
        raise ValueError("groups is empty: name at least one (kind, window)")
    for i, (kind, _) in enumerate(groups):
        if kind == GROUP_STATE:
            raise ValueError(f"group {i} has states: groups of states stand behind all others")
    return chunk


cdef int32_t needed_from(const Group* group, int32_t position) noexcept nogil:
    """Return the first entry that a token at `position` or later reads."""
    if group.kind == GROUP_SLIDING and position >= group.window:
        return (position - group.window + 1) // group.block_size
    return 0


cdef int32_t demand(const Group* group, int32_t hit, int32_t entries) noexcept nogil:
    """Return the most new blocks that a row holds at once while it grows from `hit` found entries to `entries`."""
    cdef int32_t most = entries - hit
    if group.kind == GROUP_STATE:
        return 0
    if group.kind == GROUP_SLIDING:
        # The window, a chunk in flight, the next chunk planned meanwhile, and partial blocks at the ends.
        most = min(most, (group.window + 2 * group.max_chunk) // group.block_size + 3
                   - (hit - needed_from(group, hit * group.block_size)))
    return max(most, 0)


cdef bint takes(const Group* group, int32_t entry, int32_t least, int32_t target) noexcept nogil:
    """Whether a new entry takes a block in a step that ends with `least` to `target` entries; both kinds: all."""
    return entry < target


cdef int32_t chunk_end(const Group* group, int32_t start, int32_t end) noexcept nogil:
    """Return where a chunk from `start` on, which may reach up to `end`, ends: after `start`; both kinds: at `end`.

    A bidirectional span, or media for which the encoder has no room yet, may still end the chunk elsewhere.
    """
    return end


cdef bint is_named(const Group* group, int32_t entry, int32_t committed) noexcept nogil:
    """Whether the prefix index names an entry when `committed` tokens are committed; both kinds: if full."""
    return (entry + 1) * group.block_size <= committed


cdef bint vouches(const Group* group) noexcept nogil:
    """Whether a row holds all entries to its end, all named, so that a chain of the names proves the prefix."""
    return group.kind == GROUP_FULL


def lasts(int32_t kind, int32_t window):
    """Whether a row holds its blocks in a group of this kind to its end."""
    cdef Group group
    fill_group(&group, kind, window, 1, 1)
    return vouches(&group)


def row_blocks(int32_t kind, int32_t window, int32_t num_tokens, int32_t block_size, int32_t max_chunk):
    """Return the most blocks that a row of num_tokens tokens holds in a group; max_chunk: most tokens per step."""
    cdef Group group
    fill_group(&group, kind, window, block_size, max_chunk)
    return demand(&group, 0, (num_tokens + block_size - 1) // block_size)
