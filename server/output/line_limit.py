"""LineLimit: ends an answer after a whole line once its time is over, for editors whose user is waiting.

Owner: the loop; one per choice. In: pieces of text. Out: whether the answer ends.
"""

from __future__ import annotations

import time


class LineLimit:
    """Counts `seconds` from the first piece."""

    __slots__ = ("_begun", "_has_line", "_seconds")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._begun: float | None = None
        self._has_line = False

    def reached(self, text: str) -> bool:
        """Whether the text so far has a whole line and the time is over."""
        now = time.monotonic()
        if self._begun is None:
            self._begun = now
        self._has_line = self._has_line or "\n" in text
        return self._has_line and now - self._begun >= self._seconds
