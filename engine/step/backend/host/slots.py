"""Per-slot state that steps on the host read by slot number: last sampled token, block tables, positions.

Owner: rows are staged by the device thread at admission, when no step in flight knows the slot; after that only the
stream touches them, in step order. Block-table changes arrive as deltas in the plan and are applied by the step that
first needs them, so a step still running never sees a later one's table.
"""

from __future__ import annotations

import numpy as np

from _fast.layout import UpdateWord
from _fast.plan import StepPlan
from engine.base.bidirectional import Bidirectional
from engine.base.request import Request
from engine.step.positions import Positions


class HostSlots:
    """Arrays indexed by slot; `reset` covers every one of them."""

    __slots__ = ("_adapters", "adapter", "block_tables", "last_token", "outside", "positions")

    def __init__(
        self,
        max_slots: int,
        max_blocks: int,
        num_groups: int,
        bidirectional: Bidirectional = "",
        adapters: tuple[str, ...] = (),
    ) -> None:
        self._adapters = adapters
        self.positions = Positions(max_slots, bidirectional)
        self.adapter = np.zeros(max_slots, np.int32)  # the number of the request's adapter; 0: none
        self.last_token = np.zeros(max_slots, np.int64)  # token sampled by the last step that had the row
        self.block_tables = np.zeros((num_groups, max_slots, max_blocks), np.int32)
        self.outside = np.zeros(max_slots, np.bool_)  # one of its token ids was not a row of the embedding

    def admit(self, slot: int, request: Request) -> None:
        """Stages a new request's row."""
        self.positions.admit(slot, request)
        self.last_token[slot] = 0
        self.block_tables[:, slot] = 0
        self.outside[slot] = False
        self.adapter[slot] = request.adapter(self._adapters) if self._adapters else 0

    def reset(self, slot: int, poison: bool = False) -> None:
        """Forgets a freed slot; with `poison` its numbers become ones that no live row may use."""
        bad = np.iinfo(np.int32).max if poison else 0
        self.positions.reset(slot, poison)
        self.last_token[slot] = bad
        self.block_tables[:, slot] = bad
        self.outside[slot] = poison
        self.adapter[slot] = bad

    def apply(self, plan: StepPlan) -> None:
        """Writes the plan's block-table changes; later entries for the same place win."""
        updates = np.asarray(plan.updates)[: plan.num_updates]  # [num_updates, UPDATE_WORDS]
        slot, index, block, group = (updates[:, word] for word in UpdateWord)
        self.block_tables[group, slot, index] = block
