"""What a step's rows bring home from a pooler: a line for each input that ends, or the lines of all of its tokens.

Owner: the slots are staged by the device thread at admission; the steps of a slot then come in order, on the stream of
a CPU or, on an accelerator, when they are collected.
"""

from __future__ import annotations

import numpy as np

from _fast.layout import TokenCode
from engine.base.request import PoolingParams
from engine.step.result import StepResult


def take_lines(step: StepResult, lines: np.ndarray, outside: np.ndarray, num_embeddings: int) -> None:
    """lines float32 [num_sampled, width], which nobody writes again; outside bool [num_sampled].

    A row ends without a token. One whose line is not finite, or whose ids were no tokens, ends with an error.
    """
    sampled = step.rows.sampled
    chosen = np.full((len(sampled), 1), int(TokenCode.END), np.int32)
    chosen[~np.isfinite(lines).all(axis=1), 0] = TokenCode.INVALID
    chosen[outside, 0] = TokenCode.OUTSIDE
    step.take_tokens(chosen, num_embeddings)
    step.pooled = {int(row): line for row, line in zip(sampled, lines) if int(row) not in step.invalid}


class TokenwiseRows:
    """Slots whose request wants a line for every token; the lines of a prompt's chunks wait for its last one."""

    def __init__(self, max_slots: int) -> None:
        self._asked = np.zeros(max_slots, np.bool_)
        self._parts: dict[int, list[np.ndarray]] = {}  # by slot

    def admit(self, slot: int, pooling: PoolingParams | None) -> None:
        """Stages a slot."""
        self._asked[slot] = pooling is not None and pooling.per_token

    def reset(self, slot: int) -> None:
        """Forgets a freed slot."""
        self._asked[slot] = False
        self._parts.pop(slot, None)

    def __len__(self) -> int:
        return len(self._parts)

    def any(self, slots: np.ndarray) -> bool:
        """Whether one of these slots wants the lines of its tokens."""
        return bool(self._asked[slots].any())

    def take(self, step: StepResult, lines: np.ndarray) -> None:
        """lines float32 [num_tokens, width] of all tokens of the step, which nobody writes again."""
        rows, ends = step.rows, set(step.rows.sampled.tolist())
        for row in np.flatnonzero(self._asked[rows.slots]).tolist():
            slot, start = int(rows.slots[row]), int(rows.starts[row])
            if rows.computed[row] == 0:  # the first chunk, maybe once more after a preemption
                self._parts[slot] = []
            self._parts[slot].append(lines[start : start + int(rows.lens[row])])
            if row in ends and row not in step.invalid:
                step.pooled[row] = np.concatenate(self._parts.pop(slot))
