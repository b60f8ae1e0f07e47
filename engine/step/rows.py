"""RowArrays: the columns of a plan's rows as numpy views, cut to the number of rows in the step.

Owner: device thread, which makes the arrays once for each step that Python launches or settles. Backends and parts read
the arrays.
"""

from __future__ import annotations

from copy import copy

import numpy as np

from _fast.layout import RowFlag
from _fast.plan import StepPlan


class RowArrays:
    """The R rows of one step."""

    __slots__ = ("computed", "flags", "lens", "places", "sampled", "slots", "starts")

    def __init__(self, plan: StepPlan) -> None:
        rows = plan.num_rows
        self.slots = np.asarray(plan.row_slot)[:rows]  # [R]
        # [R + 1] first token of each row in the step, as if no row had drafts
        self.starts = np.asarray(plan.row_start)[: rows + 1]
        self.lens = np.asarray(plan.row_len)[:rows]  # [R] tokens of each row in the step; with drafts: the most
        self.places = plan.num_tokens - int(self.starts[-1])  # places for drafts, for all rows together
        self.computed = np.asarray(plan.row_computed)[:rows]  # [R] tokens that earlier steps compute
        self.flags = np.asarray(plan.row_flags)[:rows]  # [R] RowFlag
        self.sampled = np.flatnonzero(self.flags & RowFlag.SAMPLE)  # plan rows that sample a token, ascending

    def without_drafts(self) -> RowArrays:
        """The same rows, with only the newest token of rows with drafts; `self` if there are none."""
        if not self.places:
            return self
        found = copy(self)
        found.lens = np.diff(self.starts)
        return found

    def moved(self, computed: np.ndarray, lens: np.ndarray) -> RowArrays:
        """The same rows with other places in their sequences and other numbers of tokens; both int [R]."""
        found = copy(self)
        found.computed, found.lens = computed, lens
        found.starts = np.concatenate(([0], lens.cumsum()))
        return found
