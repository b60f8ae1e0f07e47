"""DraftedRows: the rows of a step on a server with drafts, as the hooks and kernels of drafters read them.

Made by a backend for each forward, read until the step's choice. Thread: the stream.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from engine.kernels.step_tensors import SlotTensors


class DraftedRows(NamedTuple):
    """R rows; on an accelerator at fixed addresses, with padding."""

    slots: Tensor  # [R] int32
    drafts: Tensor  # [R] int32: drafts behind the newest token of a row that samples; -1: the row does not sample
    query_start: Tensor  # [R + 1] int32, offsets into the step's tokens
    context_len: Tensor  # [R] int32, tokens up to the row's last of this step
    lines: Tensor | None  # [R] int32: each row's line of the block tables; None: line r
    most: int  # rows that may have drafts
    state: SlotTensors
