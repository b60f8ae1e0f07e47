from _fast.blocks cimport BlockPool
from _fast.checkpoints cimport Checkpoints
from _fast.layout cimport CHECKPOINTS
from _fast.plan cimport StepPlan
from _fast.seqs cimport SeqTable
from _fast.types cimport block_t, int32_t, int64_t, slot_t


cdef enum:
    MAX_BOUNDARIES = 8


cdef enum:  # which states are named
    STATES_NONE = 0
    STATES_ALIGN = 1
    STATES_ALL = 2


cdef struct RowState:  # state of a slot; runs by their heads, 0 is none
    block_t base_run  # the next step reads it
    block_t old_run  # the newest step reads it, if it writes another run; released when the row is planned again
    block_t write_run  # run for the next base
    block_t tail_run
    block_t checkpoints[CHECKPOINTS]  # runs of intermediate states that the newest step writes; later ones are 0
    int32_t base
    int32_t old_base
    int32_t sure  # bases up to here belong to committed steps
    int32_t due  # number of tokens after which the next state is named
    int32_t branch  # tokens that attention has found, if states have found fewer; else 0
    bint extends  # the row began at a state
    block_t newest  # the state that the row named last, or began at
    block_t newest_above  # the primary's block to which `newest` is attached
    bint newest_answered  # `newest` holds tokens of the row's answer
    int32_t num_boundaries
    int32_t boundaries[8]


cdef class StateRuns:
    cdef readonly bint active  # the model has states
    cdef Checkpoints cache
    cdef BlockPool pool
    cdef SeqTable seqs
    cdef readonly int32_t chunk  # a base is a multiple of it
    cdef readonly int32_t unit  # states are named at multiples of it
    cdef int32_t mode
    cdef int32_t every  # tokens between named states in an answer (with STATES_ALL: in the whole text)
    cdef int32_t scan_variant  # of the graphs for steps that scan chunks; 0: all graphs do
    cdef RowState* rows
    cdef block_t found  # found by the newest shorten()
    cdef int32_t reach  # entries given to the newest first shorten()
    cdef int64_t reached  # tokens that only attention would have found, since start

    cdef void turn(self, slot_t slot) noexcept nogil
    cdef int32_t next_base(self, slot_t slot, int32_t start, int32_t count) noexcept nogil
    cdef int32_t missing(self, slot_t slot, int32_t start, int32_t count) noexcept nogil
    cdef bint take(self, slot_t slot, int32_t start, int32_t count) noexcept nogil
    cdef int32_t demand(self, int32_t hit) noexcept nogil
    cdef int32_t shorten(self, slot_t slot, int32_t count, const int32_t* blocks) noexcept nogil
    cdef int32_t revived(self) noexcept nogil
    cdef void attach(self, slot_t slot, int32_t count, const int32_t* blocks) noexcept nogil
    cdef int32_t cut(self, slot_t slot, int32_t start, int32_t end) noexcept nogil
    cdef void plan_row(self, slot_t slot, int32_t row, int32_t count, int32_t reserve, StepPlan plan) noexcept nogil
    cdef void settle(self, slot_t slot, StepPlan plan, int32_t row, const int32_t* blocks) noexcept nogil
    cdef void pass_over(self, StepPlan plan, int32_t row) noexcept nogil
    cdef void release(self, slot_t slot, const int32_t* blocks) noexcept nogil
    cdef bint has_new_runs(self, slot_t slot, StepPlan plan) noexcept nogil
    cdef void disown(self, slot_t slot) noexcept nogil
    cdef int32_t next_due(self, slot_t slot, int32_t after) noexcept nogil
    cdef int32_t _checkpoints(self, slot_t slot, int32_t end, int32_t* places) noexcept nogil
    cdef void _name(self, slot_t slot, block_t head, int32_t position, const int32_t* blocks) noexcept nogil
    cdef void _drop_run(self, block_t* run) noexcept nogil
