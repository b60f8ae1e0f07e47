from _fast.types cimport int32_t, int64_t, slot_t

cdef enum:
    PLACES = 128  # more than a row has drafts


cdef class Estimates:
    cdef int32_t num_slots
    cdef int32_t[::1] of  # [slots, PLACES]
    cdef int64_t right[PLACES]  # drafts of all requests, by place
    cdef int64_t tried[PLACES]

    cdef void fetch(self, const slot_t* slots, int32_t count) noexcept nogil
    cdef void enter(self, slot_t slot) noexcept nogil
    cdef void learn(self, slot_t slot, int32_t verified, int32_t right) noexcept nogil
    cdef void survive(self, slot_t slot, int32_t drafts, int32_t* into) noexcept nogil
