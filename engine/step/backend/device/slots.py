"""DeviceSlots: the state of live requests by slot, on the host and on the device, and its transfer to the device.

Owner: device thread. A slot's words (_fast/layout: SlotWord) are staged at admission and sent in the record of the
first step that contains the slot. If a prompt has its own positions, each step sends the positions that it computes.
"""

from __future__ import annotations

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
    """Parameters and positions on the host, and tensors on the device, all indexed by slot."""

    def __init__(
        self, sizes: Sizes, num_groups: int, axes: int, bidirectional: Bidirectional, accelerator: Accelerator
    ) -> None:
        self._axes = axes
        self.params = SlotParams(sizes.max_slots)
        self.positions = Positions(sizes.max_slots, bidirectional)
        device, drafts = accelerator.device, sizes.num_drafts
        self.tensors = empty_slots(sizes.max_slots, sizes.max_blocks, num_groups, device, drafts)

    def admit(self, slot: int, row: LiveRow, words: np.ndarray) -> None:
        """Stages a request's positions, and writes position and adapter values into the slot's words; `params.stage`
        sends the words."""
        request = row.request
        words[SlotWord.SLOT], words[SlotWord.PROMPT_LEN] = slot, len(request.prompt_token_ids)
        words[SlotWord.POSITION_DELTA] = request.position_delta
        words[SlotWord.ADAPTER] = row.place.adapter
        words[SlotWord.LAST_PLACE] = row.place.last_place
        self.positions.admit(slot, request)

    def reset(self, slot: int, poison: bool) -> None:
        """Clears a freed slot."""
        self.params.forget(slot)
        self.positions.reset(slot, poison)

    def pack(self, plan: StepPlan, rows: RowArrays) -> None:
        """Completes a planned record with the words of slots that are new to the device, and with positions."""
        self.params.pack(plan)
        positions: np.ndarray | None = None
        rows = rows.without_drafts()
        if self._axes > 1 and self.positions.inside(rows).any():
            positions = self.positions.axes_of(rows, self._axes)  # int64 [axes, tokens of the rows]
        elif self.positions.bi_spans:
            positions = self.positions.last_keys(rows)  # int32 [tokens], for tokens that attend to later ones
        if positions is not None:
            beyond = [(0, 0)] * (positions.ndim - 1) + [(0, rows.places)]  # the device knows the positions of drafts
            append(plan, Header.POSITIONS_AT, np.pad(positions, beyond))


def append(plan: StepPlan, word: Header, values: np.ndarray) -> None:
    """Appends int32 values to a planned record and writes their start into the header's `word`."""
    record = np.asarray(plan.record)
    start = plan.used_len
    record[start : start + values.size] = values.reshape(-1)
    record[word], record[Header.USED_LEN] = start, start + values.size
