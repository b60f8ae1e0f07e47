from _fast.device_calls cimport MAX_RANKS
from _fast.layout cimport NUM_GRAPH_KINDS
from _fast.types cimport int32_t

cdef enum:
    MAX_GRAPHS = 256  # per kind and variant
    NUM_VARIANTS = 8  # bit fields of three bits


cdef struct Graphs:  # graphs of one kind and variant, sizes ascending
    int32_t count
    int32_t size[MAX_GRAPHS]
    void* graph[MAX_GRAPHS][MAX_RANKS]


cdef class GraphTable:
    cdef Graphs graphs[NUM_GRAPH_KINDS][NUM_VARIANTS]
    cdef int32_t variant_bits[NUM_GRAPH_KINDS]  # by kind: bits that occur in the kind's graphs

    cdef add(self, int32_t kind, int32_t variant, int32_t size, void** graphs, int32_t num_ranks)
    cdef int32_t place(self, int32_t kind, int32_t variant, int32_t count) noexcept nogil
    cdef int32_t choose(self, int32_t kind, int32_t variant, int32_t count) noexcept nogil
    cdef void** find(self, int32_t kind, int32_t variant, int32_t size) noexcept nogil
    cdef void** prep(self) noexcept nogil
    cdef check(self, int32_t kind, int32_t variant)
