from _fast.blocks cimport BlockPool
from _fast.encoder cimport EncoderTable
from _fast.plan cimport StepPlan
from _fast.prefix cimport PrefixIndex
from _fast.queue cimport WaitQueue
from _fast.running cimport RunningRows
from _fast.seqs cimport SeqTable
from _fast.settle cimport Settler
from _fast.shares cimport TokenShares
from _fast.tables cimport BlockTables
from _fast.types cimport int32_t, int64_t, slot_t, token_t


cdef class Scheduler:
    cdef readonly int32_t max_slots
    cdef readonly int32_t max_rows
    cdef readonly int32_t max_tokens
    cdef readonly int32_t max_model_len
    cdef readonly int32_t block_size
    cdef readonly int64_t prefix_queries
    cdef readonly int64_t prefix_hits
    cdef readonly BlockPool pool
    cdef readonly PrefixIndex index
    cdef readonly SeqTable seqs
    cdef readonly BlockTables tables
    cdef readonly WaitQueue queue
    cdef readonly EncoderTable encoder
    cdef int32_t max_chunk
    cdef int32_t num_groups
    cdef bint by_priority
    cdef bint whole_prompts  # a prompt is computed in one step
    cdef int64_t next_order
    cdef readonly int64_t next_step  # the step_id that the next schedule() gives
    cdef RunningRows running
    cdef readonly TokenShares shares
    cdef readonly Settler settler
    cdef int32_t updates_left
    cdef bint preempted

    cdef bint _is_decoding(self) noexcept nogil
    cdef void _plan(self, StepPlan plan) noexcept nogil
    cdef void _continue(self, StepPlan plan) noexcept nogil
    cdef void _admit(self, StepPlan plan) noexcept nogil
    cdef bint _start(self, slot_t slot, StepPlan plan) noexcept nogil
    cdef bint _provide(self, slot_t slot, int32_t count, int32_t width) noexcept nogil
    cdef void _preempt(self, slot_t slot) noexcept nogil
    cdef void _emit(self, StepPlan plan) noexcept nogil
    cdef void _row(self, slot_t slot, int32_t count, StepPlan plan) noexcept nogil
    cdef _check_oldest(self, StepPlan plan)
