from _fast.budget cimport Budget
from _fast.plan cimport StepPlan
from _fast.running cimport RunningRows
from _fast.seqs cimport SeqTable
from _fast.shares cimport TokenShares
from _fast.tables cimport BlockTables
from _fast.types cimport int32_t, int64_t, slot_t, token_t, uint8_t

cdef enum:
    MAX_WIDTH = 127  # as in plan.pyx


cdef struct DraftTotals:  # since start, in settled steps
    int64_t drafts  # rows that verified drafts
    int64_t draft_tokens
    int64_t accepted_tokens
    int64_t invalid_tokens  # drafts without valid logits of the drafter; not among draft_tokens
    int64_t accepted_at[MAX_WIDTH]  # accepted drafts by their place behind the row's newest token


cdef tuple as_counts(const DraftTotals* of)


cdef class Drafts:
    cdef SeqTable seqs
    cdef RunningRows running
    cdef BlockTables tables
    cdef TokenShares shares
    cdef readonly Budget budget
    cdef int32_t max_lines  # most places of a step for which a token is chosen
    cdef int32_t[::1] of  # most drafts of a row in this step, by slot; valid for running rows after deal()
    cdef int32_t total  # drafts of this step over all rows
    cdef DraftTotals totals

    cdef void note(self, StepPlan plan, int32_t row, const token_t* run) noexcept nogil
    cdef void deal(self, int32_t updates_left, int32_t most) noexcept nogil
    cdef int32_t _offered(self, slot_t slot, int32_t most) noexcept nogil
    cdef void _provide(self, int32_t updates_left) noexcept nogil
    cdef bint reclaim(self) noexcept nogil
    cdef bint _reserve(self, slot_t slot, int32_t reach) noexcept nogil
    cdef void _shrink(self, slot_t slot, int32_t reach) noexcept nogil
