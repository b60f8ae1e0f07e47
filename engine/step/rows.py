"""RowArrays: the columns of a plan's rows as numpy views, cut to the rows that the step has.

Owner: device thread; made once per step that Python launches or settles. Backends and parts read it.
"""

from __future__ import annotations

import numpy as np

from _fast.layout import RowFlag
from _fast.plan import StepPlan


class RowArrays:
    """One step's rows; R of them."""

    __slots__ = ("computed", "flags", "lens", "sampled", "slots", "starts")

    def __init__(self, plan: StepPlan) -> None:
        rows = plan.num_rows
        self.slots = np.asarray(plan.row_slot)[:rows]  # [R]
        self.starts = np.asarray(plan.row_start)[: rows + 1]  # [R + 1] of the rows' tokens in the step
        self.lens = np.asarray(plan.row_len)[:rows]  # [R] tokens in the step
        self.computed = np.asarray(plan.row_computed)[:rows]  # [R] tokens that earlier steps compute
        self.flags = np.asarray(plan.row_flags)[:rows]  # [R] RowFlag
        self.sampled = np.flatnonzero(self.flags & RowFlag.SAMPLE)  # plan rows that yield a token, ascending
