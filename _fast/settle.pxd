from _fast.drafts cimport Drafts
from _fast.encoder cimport EncoderTable
from _fast.plan cimport StepPlan
from _fast.queue cimport WaitQueue
from _fast.running cimport RunningRows
from _fast.seqs cimport SeqTable
from _fast.tables cimport BlockTables
from _fast.types cimport int32_t, int64_t, slot_t, token_t, uint8_t


cdef class Settler:
    cdef SeqTable seqs
    cdef BlockTables tables
    cdef RunningRows running
    cdef WaitQueue queue
    cdef EncoderTable encoder
    cdef Drafts drafts
    cdef bint stateful  # the model has states
    cdef int64_t settled_step  # the newest step that is settled
    cdef int64_t num_preemptions
    cdef int32_t num_freed  # slots in freed_slots
    cdef int32_t[::1] freed_slots
    cdef int32_t[::1] freed_lens  # for each: its number of tokens if it was closing and is fully computed; else 0

    cdef void load(self, StepPlan plan) noexcept nogil
    cdef void _fetch_names(self, slot_t slot) noexcept nogil
    cdef void _pass_states(self, StepPlan plan) noexcept nogil
    cdef bint _drop_choice(self, slot_t slot) noexcept nogil
    cdef _check_slot(self, int32_t slot)
    cdef void commit(self, StepPlan plan, const int32_t* sampled, const int32_t* override) noexcept nogil
    cdef void _commit_row(self, StepPlan plan, int32_t row, const token_t* run, int32_t forced) noexcept nogil
    cdef void _finish(self, StepPlan plan, int32_t row, const token_t* run, int32_t why) noexcept nogil
    cdef int32_t _sample(self, StepPlan plan, int32_t row, const token_t* run, int32_t override) noexcept nogil
    cdef void fail(self, StepPlan plan, const uint8_t* again) noexcept nogil
    cdef bint _reads(self, slot_t slot, StepPlan plan) noexcept nogil
    cdef void _settle_promise(self, StepPlan plan, int32_t row) noexcept nogil
    cdef void close(self, slot_t slot) noexcept nogil
    cdef void _end_closed(self, slot_t slot) noexcept nogil
    cdef void end(self, slot_t slot) noexcept nogil
    cdef void preempt(self, slot_t slot) noexcept nogil
    cdef void _restart(self, slot_t slot) noexcept nogil
