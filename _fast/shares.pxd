from _fast.queue cimport WaitQueue
from _fast.running cimport RunningRows
from _fast.seqs cimport SeqTable
from _fast.tables cimport BlockTables
from _fast.types cimport int32_t, int64_t, slot_t


cdef class TokenShares:
    cdef SeqTable seqs
    cdef RunningRows running
    cdef WaitQueue queue
    cdef BlockTables tables
    cdef public int32_t max_tokens  # per step, except that each decoding row gets its one token
    cdef int32_t max_chunk
    cdef public int32_t prompt_budget  # budget of the next step; at least 1 token is given
    cdef int32_t[::1] of  # tokens of this step, by slot
    cdef int32_t[::1] prompts  # running slots with more than one token left, in the order in which they are served
    cdef public int32_t idle_rows  # most idle rows of the next step
    cdef public int32_t idle_budget  # prompt tokens of a step that idle rows may still join
    cdef int32_t dealt  # tokens of the budget, before any were taken
    cdef int32_t num_prompts
    cdef int32_t tokens_left  # left of the budget
    cdef int32_t room  # left in the step

    cpdef bint any_idle(self)
    cpdef bint any_client(self)
    cdef bint is_limited(self, slot_t slot) noexcept nogil
    cdef int32_t withheld(self, slot_t slot, bint runs) noexcept nogil
    cdef void deal(self, bint others_may_start) noexcept nogil
    cdef check_bi_spans(self, const int32_t[:, ::1] bi_spans, int64_t prompt_len, int32_t max_rows)
    cdef int32_t fitting(self, slot_t slot, int32_t start, int32_t lacking, int32_t granted) noexcept nogil
    cdef int32_t _cut(self, slot_t slot, int32_t start, int32_t count, int32_t granted, int32_t most) noexcept nogil
    cdef void take(self, int32_t count) noexcept nogil
    cdef int32_t deal_leftovers(self, int32_t updates_left) noexcept nogil
    cdef bint _sooner(self, slot_t a, slot_t b) noexcept nogil
    cdef int32_t _waiting_shorter(self, slot_t slot, int32_t most) noexcept nogil
