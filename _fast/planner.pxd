from _fast.drafts cimport Drafts
from _fast.encoder cimport EncoderTable
from _fast.plan cimport StepPlan
from _fast.queue cimport WaitQueue
from _fast.running cimport RunningRows
from _fast.seqs cimport SeqTable
from _fast.settle cimport Settler
from _fast.shares cimport TokenShares
from _fast.tables cimport BlockTables
from _fast.types cimport int32_t, int64_t, slot_t


cdef class Planner:
    cdef SeqTable seqs
    cdef BlockTables tables
    cdef WaitQueue queue
    cdef EncoderTable encoder
    cdef RunningRows running
    cdef TokenShares shares
    cdef Drafts drafts
    cdef Settler settler
    cdef int32_t max_rows
    cdef bint stateful  # the model has states
    cdef bint whole_prompts  # a prompt is computed in one step
    cdef int64_t next_step  # the step_id of the next plan that has rows
    cdef int64_t prefix_queries  # tokens looked up in the prefix index, since start
    cdef int64_t prefix_hits  # tokens found there, since start
    cdef int32_t updates_left  # block-table changes for which the plan still has room
    cdef bint preempted  # a row was preempted for this plan

    cdef void plan(self, StepPlan plan) noexcept nogil
    cdef void _load(self, int32_t width) noexcept nogil
    cdef void _yield_idle(self) noexcept nogil
    cdef bint _is_decoding(self) noexcept nogil
    cdef void _continue(self, StepPlan plan) noexcept nogil
    cdef bint _provide(self, slot_t slot, int32_t count) noexcept nogil
    cdef void _preempt(self, slot_t slot) noexcept nogil
    cdef void _admit(self, StepPlan plan) noexcept nogil
    cdef slot_t _next(self) noexcept nogil
    cdef bint _start(self, slot_t slot, StepPlan plan) noexcept nogil
    cdef bint _has_blocks(self, slot_t slot, int32_t hit) noexcept nogil
    cdef void _enter(self, slot_t slot, int32_t hit, int32_t count, StepPlan plan) noexcept nogil
    cdef void _emit(self, StepPlan plan) noexcept nogil
    cdef int32_t _idle_after(self) noexcept nogil
    cdef bint _is_open(self) noexcept nogil
    cdef void _row(self, slot_t slot, int32_t count, int32_t drafts, StepPlan plan) noexcept nogil
