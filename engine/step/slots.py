"""Per-slot state that steps read by slot number: last sampled token, block table, positions.

Owner: rows are staged by the device thread at admission, when no step in flight knows the slot; after that only the
stream touches them, in step order. Block-table changes arrive as deltas in the plan and are applied by the step that
first needs them, so a step still running never sees a later one's table.
"""

from __future__ import annotations

import numpy as np

from engine.base.ahead import Ahead, joints_of, last_keys
from engine.base.request import Request


class SlotState:
    """Arrays indexed by slot; `reset` covers every one of them."""

    __slots__ = (
        "_adapters",
        "_ahead",
        "adapter",
        "block_tables",
        "joints",
        "last_token",
        "outside",
        "position_delta",
        "positions",
        "prompt_len",
    )

    def __init__(
        self,
        max_slots: int,
        max_blocks: int,
        num_groups: int,
        ahead: Ahead = "",
        adapters: tuple[str, ...] = (),
    ) -> None:
        self._ahead: Ahead = ahead
        self._adapters = adapters
        self.adapter = np.zeros(max_slots, np.int32)  # the number of the request's adapter; 0: none
        self.last_token = np.zeros(max_slots, np.int64)  # token sampled by the last step that had the row
        self.block_tables = np.zeros((num_groups, max_slots, max_blocks), np.int32)
        self.position_delta = np.zeros(max_slots, np.int64)  # position of token i is i + delta beyond the prompt
        self.prompt_len = np.zeros(max_slots, np.int64)
        self.outside = np.zeros(max_slots, np.bool_)  # one of its token ids was not a row of the embedding
        self.positions: dict[int, np.ndarray] = {}  # slot -> int32 [axes, prompt_len], M-RoPE prompts only
        self.joints: dict[int, np.ndarray] = {}  # slot -> int32 [m, 2], prompts whose tokens see later ones only

    def admit(self, slot: int, request: Request) -> None:
        """Stages a new request's row."""
        self.last_token[slot] = 0
        self.block_tables[:, slot] = 0
        self.position_delta[slot] = request.position_delta
        self.prompt_len[slot] = len(request.prompt_token_ids)
        self.outside[slot] = False
        self.adapter[slot] = request.adapter(self._adapters) if self._adapters else 0
        if request.positions is not None:
            self.positions[slot] = request.positions
        joints = joints_of(request, self._ahead) if self._ahead else None
        if joints is not None:
            self.joints[slot] = joints

    def last_keys(self, slots: np.ndarray, lens: np.ndarray, computed: np.ndarray) -> np.ndarray | None:
        """AttentionMeta.last_keys of a step's rows, where there are joints."""
        return last_keys(slots, lens, computed, self.joints, self._ahead)

    def reset(self, slot: int, poison: bool = False) -> None:
        """Forgets a freed slot; with `poison` its numbers become ones that no live row may use."""
        bad = np.iinfo(np.int32).max if poison else 0
        self.last_token[slot] = bad
        self.block_tables[:, slot] = bad
        self.position_delta[slot] = bad
        self.prompt_len[slot] = 0
        self.outside[slot] = poison
        self.adapter[slot] = bad
        self.positions.pop(slot, None)
        self.joints.pop(slot, None)
