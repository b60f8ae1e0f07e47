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

    __slots__ = ("computed", "flags", "lens", "sampled", "slots", "starts")

    def __init__(self, plan: StepPlan) -> None:
        rows = plan.num_rows
        self.slots = np.asarray(plan.row_slot)[:rows]  # [R]
        self.starts = np.asarray(plan.row_start)[: rows + 1]  # [R + 1] first token of each row in the step
        self.lens = np.asarray(plan.row_len)[:rows]  # [R] tokens of each row in the step
        self.computed = np.asarray(plan.row_computed)[:rows]  # [R] tokens that earlier steps compute
        self.flags = np.asarray(plan.row_flags)[:rows]  # [R] RowFlag
        self.sampled = np.flatnonzero(self.flags & RowFlag.SAMPLE)  # plan rows that sample a token, ascending

    def moved(self, computed: np.ndarray, lens: np.ndarray) -> RowArrays:
        """The same rows with other places in their sequences and other numbers of tokens; both int [R]."""
        found = copy(self)
        found.computed, found.lens = computed, lens
        found.starts = np.concatenate(([0], lens.cumsum()))
        return found
