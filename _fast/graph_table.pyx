"""GraphTable: captured graphs by kind, variant and size, and the choice of the graph for a step.

Owner: the device thread. In: handles of graphs, one per rank, at start; afterwards counts of tokens or rows. Out: the
smallest graph that is large enough. layout.GraphKind defines the kinds and what their sizes count. `variant` is a bit
field: a step requests the bits that its rows need. If no graph of a kind has one of these bits, the kind's graphs
without the bit are used.
"""

cimport cython
from libc.string cimport memcpy

from _fast.layout cimport GRAPH_MIXED, GRAPH_PREP, GRAPH_STEP, NUM_GRAPH_KINDS

cdef enum:
    SMALL = 64  # tokens up to which padding is cheap


@cython.final
cdef class GraphTable:
    """Graph handles, which the caller keeps alive."""

    cdef add(self, int32_t kind, int32_t variant, int32_t size, void** graphs, int32_t num_ranks):
        """Add the ranks' graphs for up to `size` tokens or rows."""
        cdef Graphs* own = &self.graphs[kind][variant]
        cdef int32_t at = own.count
        cdef int32_t rank
        for rank in range(num_ranks):
            if size < 1 or graphs[rank] == NULL:
                raise ValueError(
                    f"a graph of size {size} at {<size_t>graphs[rank]:#x}: sizes are at least 1, handles not null"
                )
        if own.count == MAX_GRAPHS:
            raise ValueError(f"{MAX_GRAPHS} graphs of one kind and variant are the most")
        while at > 0 and own.size[at - 1] > size:
            own.size[at] = own.size[at - 1]
            memcpy(own.graph[at], own.graph[at - 1], sizeof(own.graph[at]))
            at -= 1
        own.size[at] = size
        for rank in range(num_ranks):
            own.graph[at][rank] = graphs[rank]
        own.count += 1
        self.variant_bits[kind] |= variant
        self.variant_bits[GRAPH_STEP] |= variant  # a whole step without the bit would omit that part's work

    cdef int32_t place(self, int32_t kind, int32_t variant, int32_t count) noexcept nogil:
        """Return the index of the kind's smallest graph for `count` tokens or rows; the number of graphs if none is."""
        cdef Graphs* own = &self.graphs[kind][variant]
        cdef int32_t low = 0
        cdef int32_t high = own.count
        cdef int32_t mid
        while low < high:
            mid = (low + high) >> 1
            if own.size[mid] < count:
                low = mid + 1
            else:
                high = mid
        return low

    cdef int32_t choose(self, int32_t kind, int32_t variant, int32_t count) noexcept nogil:
        """Return the smallest size >= `count`; 0: there is none, or too much would be padding."""
        variant &= self.variant_bits[kind]
        cdef Graphs* own = &self.graphs[kind][variant]
        cdef int32_t at = self.place(kind, variant, count)
        if at == own.count or (kind == GRAPH_MIXED and count > SMALL and 4 * own.size[at] > 5 * count):
            return 0
        return own.size[at]

    cdef void** find(self, int32_t kind, int32_t variant, int32_t size) noexcept nogil:
        """Return the ranks' graphs of exactly this size, or NULL."""
        variant &= self.variant_bits[kind]
        cdef Graphs* own = &self.graphs[kind][variant]
        cdef int32_t at = self.place(kind, variant, size)
        return own.graph[at] if at < own.count and own.size[at] == size else NULL

    cdef void** prep(self) noexcept nogil:
        """Return the ranks' graphs with which every step begins, or NULL."""
        cdef Graphs* own = &self.graphs[GRAPH_PREP][0]
        return own.graph[0] if own.count else NULL

    cdef check(self, int32_t kind, int32_t variant):
        """Raise ValueError if there is no such kind or variant."""
        if not 0 <= kind < NUM_GRAPH_KINDS:
            raise ValueError(f"kind {kind}: there are 0 to {NUM_GRAPH_KINDS - 1}")
        if not 0 <= variant < NUM_VARIANTS:
            raise ValueError(f"variant {variant}: there are 0 to {NUM_VARIANTS - 1}")
