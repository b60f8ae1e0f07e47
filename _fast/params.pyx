"""SlotParams: the twelve words per slot that a prep kernel needs to place and sample tokens, and who has been sent.

Owner: the device thread. In: an admitted request's words. Out: appended to a plan's record, right behind its
block-table updates, the first time a step names the slot; never again until something new is staged.

    admission: stage(slot, words)    each step: schedule(plan), pack(plan), launch    slot freed: forget(slot)

Words: slot, prompt_len, position_delta, then temperature, top_k, top_p, min_p, seed (low, high), presence, frequency
and repetition; floats as the bits of a float32.
"""

from array import array

cimport cython
from libc.string cimport memcpy

from _fast.types cimport AT_PARAMS, AT_USED, PARAM_WORDS


@cython.final
cdef class SlotParams:
    """A line of words per slot and whether the device has it."""

    def __init__(self, int32_t max_slots):
        if max_slots < 1:
            raise ValueError(f"max_slots={max_slots}: need at least 1")
        self.max_slots = max_slots
        self.words = array("i", bytes(4 * PARAM_WORDS * max_slots))
        self.unsent = array("B", bytes(max_slots))
        self.num_unsent = 0

    def stage(self, int32_t slot, const int32_t[::1] words not None):
        """The slot's words from its next step on."""
        self._check_slot(slot)
        if words.shape[0] != PARAM_WORDS or words[0] != slot:
            raise ValueError(f"{words.shape[0]} words: a slot has {PARAM_WORDS}, the first is its own number, {slot}")
        memcpy(&self.words[slot * PARAM_WORDS], &words[0], PARAM_WORDS * sizeof(int32_t))
        self.num_unsent += 1 - self.unsent[slot]
        self.unsent[slot] = 1

    def forget(self, int32_t slot):
        """The slot is free: what was staged and not sent is nobody's."""
        self._check_slot(slot)
        self.num_unsent -= self.unsent[slot]
        self.unsent[slot] = 0

    def pack(self, StepPlan plan not None):
        """Append the words of the plan's slots that the device has not seen; returns how many slots that were."""
        if plan.record[AT_USED] != plan.tail_at + 4 * plan.num_updates:
            raise ValueError("the plan is empty, packed already, or has its positions: pack() follows schedule()")
        self.append(plan)
        return plan.num_params

    cdef void append(self, StepPlan plan) noexcept nogil:
        """pack() without its checks."""
        cdef int32_t row
        cdef slot_t slot
        cdef int32_t at = plan.record[AT_USED]
        if self.num_unsent == 0:
            return
        for row in range(plan.num_rows):
            slot = plan.row_slot[row]
            if self.unsent[slot]:
                memcpy(&plan.record[at], &self.words[slot * PARAM_WORDS], PARAM_WORDS * sizeof(int32_t))
                at += PARAM_WORDS
                self.unsent[slot] = 0
                self.num_unsent -= 1
                plan.num_params += 1
        plan.record[AT_PARAMS] = plan.num_params
        plan.record[AT_USED] = at

    cdef _check_slot(self, int32_t slot):
        if not 0 <= slot < self.max_slots:
            raise ValueError(f"slot {slot}: there are slots 0 to {self.max_slots - 1}")
