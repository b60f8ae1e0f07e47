"""Positions: the token positions of live requests, for models whose positions are not simply 0, 1, 2 ...

Owner: the device thread stages a slot at admission, when no step in flight contains the slot; after that the code that
builds the inputs of a step reads the slot. In: requests with their own positions (M-RoPE) or bidirectional spans.
"""

from __future__ import annotations

import numpy as np

from engine.base.bidirectional import Bidirectional, bi_spans_of, last_keys
from engine.base.request import Request
from engine.step.rows import RowArrays


class Positions:
    """Positions and bidirectional spans by slot; `reset` clears all of them."""

    __slots__ = ("_bidirectional", "bi_spans", "delta", "prompt_len", "prompts")

    def __init__(self, max_slots: int, bidirectional: Bidirectional = "") -> None:
        self._bidirectional: Bidirectional = bidirectional
        self.delta = np.zeros(max_slots, np.int64)  # after the prompt, token i has the position i + delta
        self.prompt_len = np.zeros(max_slots, np.int64)
        self.prompts: dict[int, np.ndarray] = {}  # slot -> int32 [axes, prompt_len], M-RoPE prompts only
        self.bi_spans: dict[int, np.ndarray] = {}  # slot -> int32 [m, 2], prompts with bidirectional spans only

    def admit(self, slot: int, request: Request) -> None:
        """Stages a new request in its slot."""
        self.delta[slot] = request.position_delta
        self.prompt_len[slot] = len(request.prompt_token_ids)
        if request.positions is not None:
            self.prompts[slot] = request.positions
        bi_spans = bi_spans_of(request, self._bidirectional) if self._bidirectional else None
        if bi_spans is not None:
            self.bi_spans[slot] = bi_spans

    def reset(self, slot: int, poison: bool = False) -> None:
        """Clears a freed slot; `poison` writes values that no live row may use."""
        self.delta[slot] = np.iinfo(np.int32).max if poison else 0
        self.prompt_len[slot] = 0
        self.prompts.pop(slot, None)
        self.bi_spans.pop(slot, None)

    def __len__(self) -> int:
        """The number of slots with their own array of positions; zero when idle."""
        return len(self.prompts)

    def last_keys(self, rows: RowArrays) -> np.ndarray | None:
        """AttentionMeta.last_keys for a step's rows; None: no row computes a bidirectional span."""
        return (
            last_keys(rows.slots, rows.lens, rows.computed, self.bi_spans, self._bidirectional)
            if self.bi_spans
            else None
        )

    def axes_of(self, rows: RowArrays, axes: int) -> np.ndarray:
        """Positions int64 [axes, num_tokens]: prompt tokens have those of the request; later tokens have index + delta
        on all axes."""
        lens = rows.lens
        row_of = np.repeat(np.arange(len(lens)), lens)  # [num_tokens]
        index = rows.computed[row_of].astype(np.int64) + np.arange(len(row_of)) - rows.starts[:-1][row_of]
        found = np.repeat((index + self.delta[rows.slots][row_of])[None, :], axes, axis=0)
        for row in np.flatnonzero(self.inside(rows)).tolist():
            slot, start, done = int(rows.slots[row]), int(rows.starts[row]), int(rows.computed[row])
            length = min(int(lens[row]), int(self.prompt_len[slot]) - done)
            given = self.prompts.get(slot)
            if given is not None:
                found[:, start : start + length] = given[:, done : done + length]
            else:  # a text prompt has positions 0, 1, 2 ..., and the delta does not apply
                found[:, start : start + length] = np.arange(done, done + length)
        return found

    def inside(self, rows: RowArrays) -> np.ndarray:
        """bool [R]: True for rows that compute tokens of their prompt."""
        inside: np.ndarray = rows.computed < self.prompt_len[rows.slots]
        return inside
