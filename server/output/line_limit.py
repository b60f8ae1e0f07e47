"""LineLimitedStream: a choice that ends after a whole line once its time is over, for editors whose user is waiting.

Owner: the loop; one per choice. In: Delta. Out: Piece, as from any ChoiceStream.
"""

from __future__ import annotations

import time
from typing import Any

from engine.base.request import Delta
from server.output.choices import ChoiceStream, Piece


class LineLimitedStream(ChoiceStream):
    """Counts `seconds` from the first Delta."""

    __slots__ = ("_begun", "_has_line", "_seconds")

    def __init__(self, *given: Any, seconds: float, **named: Any) -> None:
        super().__init__(*given, **named)
        self.plain = self._runs_free = False  # its text can end the choice
        self._seconds = seconds
        self._begun: float | None = None
        self._has_line = False

    def take(self, delta: Delta) -> Piece:
        now = time.monotonic()
        if self._begun is None:
            self._begun = now
        piece = super().take(delta)
        self._has_line = self._has_line or "\n" in piece.text
        if self._has_line and now - self._begun >= self._seconds and not self.ended:
            self.ended = True
            piece.text += self.text.finish()
            piece.finish_reason, piece.stop_engine = "length", True
        return piece
