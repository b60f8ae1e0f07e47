"""SlotParams: the words of each slot (layout.SlotWord) that the host stages, and a flag whether the device has them.

Owner: the device thread. In: an admitted request's words. Out: a row in a plan's record, directly after the block-table
updates, when a step names the slot for the first time; not again until new words are staged.

    admission: stage(slot, words)    each step: schedule(plan), pack(plan), launch    slot freed: forget(slot)
"""

from array import array

cimport cython
from libc.string cimport memcpy

from _fast.layout cimport HEADER_NUM_PARAMS, HEADER_USED_LEN, SLOT_SLOT, SLOT_WORDS, UPDATE_WORDS


@cython.final
cdef class SlotParams:
    """A row of words per slot, and whether the device has it."""

    def __init__(self, int32_t max_slots):
        if max_slots < 1:
            raise ValueError(f"max_slots={max_slots}: need at least 1")
        self.max_slots = max_slots
        self.words = array("i", bytes(4 * SLOT_WORDS * max_slots))
        self.unsent = array("B", bytes(max_slots))
        self.num_unsent = 0

    def stage(self, int32_t slot, const int32_t[::1] words not None):
        """Set the slot's words from its next step on."""
        self._check_slot(slot)
        if words.shape[0] != SLOT_WORDS or words[SLOT_SLOT] != slot:
            raise ValueError(
                f"{words.shape[0]} words: slot {slot} has {SLOT_WORDS}, and its number is among them (SlotWord.SLOT)"
            )
        memcpy(&self.words[slot * SLOT_WORDS], &words[0], SLOT_WORDS * sizeof(int32_t))
        self.num_unsent += 1 - self.unsent[slot]
        self.unsent[slot] = 1

    def forget(self, int32_t slot):
        """Drop a free slot's words that were staged but not sent."""
        self._check_slot(slot)
        self.num_unsent -= self.unsent[slot]
        self.unsent[slot] = 0

    def pack(self, StepPlan plan not None):
        """Append the words of the plan's slots that the device does not have; return the number of these slots."""
        if plan.record[HEADER_USED_LEN] != plan.tail_at + UPDATE_WORDS * plan.num_updates:
            raise ValueError("the plan is empty, packed already, or has its positions: pack() follows schedule()")
        self.append(plan)
        return plan.num_params

    cdef void append(self, StepPlan plan) noexcept nogil:
        """pack() without its checks."""
        cdef int32_t row
        cdef slot_t slot
        cdef int32_t at = plan.record[HEADER_USED_LEN]
        if self.num_unsent == 0:
            return
        for row in range(plan.num_rows):
            slot = plan.row_slot[row]
            if self.unsent[slot]:
                memcpy(&plan.record[at], &self.words[slot * SLOT_WORDS], SLOT_WORDS * sizeof(int32_t))
                at += SLOT_WORDS
                self.unsent[slot] = 0
                self.num_unsent -= 1
                plan.num_params += 1
        plan.record[HEADER_NUM_PARAMS] = plan.num_params
        plan.record[HEADER_USED_LEN] = at

    cdef _check_slot(self, int32_t slot):
        if not 0 <= slot < self.max_slots:
            raise ValueError(f"slot {slot}: there are slots 0 to {self.max_slots - 1}")
