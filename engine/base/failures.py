"""Consequences of failed steps: the device counts as lost, or steps are smaller for a while (SECURITY S38 to S40).

Owner: device thread. In: how each step ended, with the time of time.monotonic. Out: whether that was one too many, and
how many tokens a step may have. A step that fails ends its rows only; an accelerator that has lost its context fails
every step that follows; one that had no room has some for half as many tokens.
"""

from __future__ import annotations

from collections import deque

from engine.base.errors import is_out_of_memory, scope_of

WINDOW_S = 60.0
SMALLER_STEPS = 100  # after one that did not fit into the device's memory


class FailureCount:
    """Failed steps in a row, and steps in the last minute that did not fit into the device's memory."""

    __slots__ = ("_max_failed", "_max_oom", "in_a_row", "out_of_memory")

    def __init__(self, max_failed_steps: int, max_oom: int) -> None:
        self._max_failed = max_failed_steps
        self._max_oom = max_oom
        self.in_a_row = 0
        self.out_of_memory: deque[float] = deque(maxlen=max_oom)  # when, oldest first

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
    """How many tokens a step may have: half of the most for SMALLER_STEPS after one for which there was no room."""

    __slots__ = ("_least", "_most", "_whole_from")

    def __init__(self, max_tokens: int, least: int = 1) -> None:
        """`least`: what a step must hold, since prompts are computed as a whole."""
        self._most, self._least = max_tokens, least
        self._whole_from = 0  # the first step that may have all of them again

    def halve(self, next_step: int) -> int:
        """Steps from `next_step` on have less room: their tokens."""
        self._whole_from = next_step + SMALLER_STEPS
        return self.of(next_step)

    def of(self, step_id: int) -> int:
        """Tokens of a step, but for one of each row that decodes."""
        return self._most if step_id >= self._whole_from else max(self._most // 2, self._least)
