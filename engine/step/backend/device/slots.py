"""DeviceSlots: what the host and the device keep of live requests, and how the first reaches the second.

Owner: device thread. A slot's words (_fast/layout: SlotWord) are staged at admission and travel in the record of the
first step that names the slot; positions of prompts that bring their own travel with every step that computes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from _fast.layout import Header, SlotWord
from _fast.params import SlotParams
from _fast.plan import StepPlan
from engine.base.bidirectional import Bidirectional
from engine.device.accelerator import Accelerator
from engine.kernels.step_tensors import empty_slots
from engine.step.live import LiveRow
from engine.step.positions import Positions
from engine.step.rows import RowArrays
from engine.step.sizes import Sizes


class DeviceSlots:
    """By slot."""

    def __init__(
        self, sizes: Sizes, num_groups: int, axes: int, bidirectional: Bidirectional, accelerator: Accelerator
    ) -> None:
        self._axes = axes
        self.params = SlotParams(sizes.max_slots)
        self.positions = Positions(sizes.max_slots, bidirectional)
        self.tensors = empty_slots(sizes.max_slots, sizes.max_blocks, num_groups, accelerator.device)

    def admit(self, slot: int, row: LiveRow, words: np.ndarray, adapters: Sequence[str]) -> None:
        """Stages a request's positions, and writes what follows from them and from its adapter into the slot's words,
        which are sent by `params.stage`. `adapters`: those of the model."""
        request = row.request
        words[SlotWord.SLOT], words[SlotWord.PROMPT_LEN] = slot, len(request.prompt_token_ids)
        words[SlotWord.POSITION_DELTA] = request.position_delta
        words[SlotWord.ADAPTER] = request.adapter(adapters)
        self.positions.admit(slot, request)

    def reset(self, slot: int, poison: bool) -> None:
        """Forgets a freed slot."""
        self.params.forget(slot)
        self.positions.reset(slot, poison)

    def pack(self, plan: StepPlan, rows: RowArrays) -> None:
        """Completes a planned record: the words of slots that the device does not know, and positions."""
        self.params.pack(plan)
        positions: np.ndarray | None = None
        if self._axes > 1 and self.positions.inside(rows).any():
            positions = self.positions.axes_of(rows, self._axes)  # int64 [axes, num_tokens]
        elif self.positions.bi_spans:
            positions = self.positions.last_keys(rows)  # int32 [num_tokens], of tokens that see later ones
        if positions is not None:
            append(plan, Header.POSITIONS_AT, positions)


def append(plan: StepPlan, word: Header, values: np.ndarray) -> None:
    """Appends whole numbers of 32 bits to a planned record; the header's `word` says where they begin."""
    record = np.asarray(plan.record)
    start = plan.used_len
    record[start : start + values.size] = values.reshape(-1)
    record[word], record[Header.USED_LEN] = start, start + values.size
