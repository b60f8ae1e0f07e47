"""Consequences of failed steps: the device counts as lost, or steps are smaller for a while (SECURITY S38 to S40).

Owner: device thread. In: how each step ended, with the time of time.monotonic. Out: whether the device counts as lost,
and how many tokens a step may have. A step that fails ends its rows only. An accelerator that has lost its context
fails every later step. An accelerator that ran out of memory usually has memory for half as many tokens.
"""

from __future__ import annotations

from collections import deque

from engine.base.errors import is_out_of_memory, scope_of

WINDOW_S = 60.0
SMALLER_STEPS = 100  # number of smaller steps after a step that did not fit into the device's memory


class FailureCount:
    """Failed steps in a row, and steps in the last minute that did not fit into the device's memory."""

    __slots__ = ("_max_failed", "_max_oom", "in_a_row", "out_of_memory")

    def __init__(self, max_failed_steps: int, max_oom: int) -> None:
        self._max_failed = max_failed_steps
        self._max_oom = max_oom
        self.in_a_row = 0
        self.out_of_memory: deque[float] = deque(maxlen=max_oom)  # times of these steps, oldest first

    def note_ok(self) -> None:
        """A step ended well."""
        self.in_a_row = 0

    def note_failed(self, error: BaseException, now: float) -> bool:
        """A step ended with `error`; True when the device counts as lost."""
        if scope_of(error) == "device":
            return True
        if is_out_of_memory(error):
            self.out_of_memory.append(now)
            return len(self.out_of_memory) == self._max_oom and now - self.out_of_memory[0] <= WINDOW_S
        self.in_a_row += 1
        return self.in_a_row >= self._max_failed


class TokenBudget:
    """The tokens that a step may have: half the maximum for SMALLER_STEPS steps after an out-of-memory step."""

    __slots__ = ("_least", "_most", "_whole_from")

    def __init__(self, max_tokens: int, least: int = 1) -> None:
        """`least`: tokens that a step must be able to hold, because some prompts are computed in one step."""
        self._most, self._least = max_tokens, least
        self._whole_from = 0  # the first step that may have all tokens again

    def halve(self, next_step: int) -> int:
        """Halves the budget from step `next_step` on; returns the tokens that these steps may have."""
        self._whole_from = next_step + SMALLER_STEPS
        return self.of(next_step)

    def of(self, step_id: int) -> int:
        """Tokens that a step may have, beyond one token for each decoding row."""
        return self._most if step_id >= self._whole_from else max(self._most // 2, self._least)
