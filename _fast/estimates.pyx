"""Estimates of how often a row's draft is right if all drafts before it are, by slot and place, in units of 1 / 32768.

Owner: the device thread, through Budget. In: outcomes of settled steps. Out: survivals, the products of estimates. The
device has estimates by the same arithmetic, one step newer (engine/kernels/survivals).
"""

from array import array

cimport cython

from _fast cimport seqs

from _fast.layout cimport (
    ACCEPTANCE_FIRST_RIGHT, ACCEPTANCE_FIRST_TRIED, ACCEPTANCE_HOPE, ACCEPTANCE_LEAST, ACCEPTANCE_MANY,
    ACCEPTANCE_ONE, ACCEPTANCE_WEIGHT,
)

cdef enum:
    SHIFT = 15  # ONE is 1 << SHIFT


@cython.final
cdef class Estimates:
    """Estimates of all slots, and those with which a request begins."""

    def __init__(self, int32_t num_slots):
        cdef int32_t k
        self.num_slots = num_slots
        self.of = array("i", bytes(4 * num_slots * PLACES))
        for k in range(PLACES):
            self.right[k] = ACCEPTANCE_FIRST_RIGHT
            self.tried[k] = ACCEPTANCE_FIRST_TRIED

    def values(self, int32_t slot, int32_t count):
        """Return the estimates of the slot's first drafts (for tests and reports)."""
        cdef int32_t k
        if not 0 <= slot < self.num_slots or not 0 <= count <= PLACES:
            raise ValueError(f"slot {slot}, {count} drafts: there are {self.num_slots} slots of {PLACES} drafts")
        return [self.of[slot * PLACES + k] for k in range(count)]

    cdef void fetch(self, const slot_t* slots, int32_t count) noexcept nogil:
        """Begin to load the estimates of the slots' first drafts."""
        cdef int32_t i
        for i in range(count):
            seqs.fetch(&self.of[slots[i] * PLACES])

    cdef void enter(self, slot_t slot) noexcept nogil:
        """Begin a request's estimates with those of all requests."""
        cdef int32_t k
        for k in range(PLACES):
            self.of[slot * PLACES + k] = <int32_t>(self.right[k] * ACCEPTANCE_ONE // self.tried[k])

    cdef void learn(self, slot_t slot, int32_t verified, int32_t right) noexcept nogil:
        """Take over that the first `right` of a row's `verified` drafts were right."""
        cdef int32_t* own = &self.of[slot * PLACES]
        cdef int32_t k
        for k in range(right):
            own[k] += (ACCEPTANCE_ONE - own[k]) >> ACCEPTANCE_WEIGHT
            self.right[k] += 1
        if right < verified:
            own[right] = max(own[right] - (own[right] >> ACCEPTANCE_WEIGHT), <int32_t>ACCEPTANCE_LEAST)
        elif verified:
            own[right] += (ACCEPTANCE_ONE - own[right]) >> ACCEPTANCE_HOPE
        for k in range(min(right + 1, verified)):
            self.tried[k] += 1
            if self.tried[k] >= ACCEPTANCE_MANY:
                self.tried[k] >>= 1
                self.right[k] >>= 1

    cdef void survive(self, slot_t slot, int32_t drafts, int32_t* into) noexcept nogil:
        """Write the survivals of the slot's first drafts, which fall and are at least 1."""
        cdef const int32_t* own = &self.of[slot * PLACES]
        cdef int32_t survival = ACCEPTANCE_ONE
        cdef int32_t k
        for k in range(drafts):
            survival = max((survival * own[k]) >> SHIFT, 1)
            into[k] = survival
