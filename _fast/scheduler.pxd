from _fast.blocks cimport BlockPool
from _fast.drafts cimport Drafts
from _fast.encoder cimport EncoderTable
from _fast.plan cimport StepPlan
from _fast.planner cimport Planner
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
    cdef int64_t next_order  # running number of the next request
    cdef readonly BlockPool pool
    cdef readonly PrefixIndex index
    cdef readonly SeqTable seqs
    cdef readonly BlockTables tables
    cdef readonly WaitQueue queue
    cdef readonly EncoderTable encoder
    cdef RunningRows running
    cdef readonly TokenShares shares
    cdef readonly Settler settler
    cdef readonly Drafts drafts
    cdef Planner planner

    cdef int64_t _longest(self, int64_t n, int32_t max_tokens, int32_t min_tokens, bint traced) except -1
    cdef int64_t _media_end(self, const int32_t[:, ::1] media, int64_t n) except -1
    cdef int64_t _in_flight(self) noexcept nogil
    cdef _check_oldest(self, StepPlan plan)
