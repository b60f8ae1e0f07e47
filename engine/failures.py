"""FailureCount: when steps that fail are no longer bad luck but a broken device (SECURITY S38 to S40).

Owner: device thread. In: how each step ended, with the time of time.monotonic. Out: whether that was one too many. A
step that fails ends its rows only; an accelerator that has lost its context fails every step that follows.
"""

from __future__ import annotations

from collections import deque

from engine.errors import is_out_of_memory, scope_of

WINDOW_S = 60.0


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
