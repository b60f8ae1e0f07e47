"""Timed texts: a window's tokens with timestamps -> segments, cut as OpenAI's whisper cuts them.

Pure. Two adjacent timestamps end a segment and begin the next. The tokens after the last such pair are a segment too;
if it has no end time, it ends with the window, because the next window begins after this one, not at its last
timestamp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

STEP_S = 0.02  # seconds from one timestamp token to the next


@dataclass(frozen=True, slots=True)
class Timed:
    """A segment within its window, in seconds from the window's beginning."""

    start: float
    end: float
    token_ids: Sequence[int]


def timed(token_ids: Sequence[int], first: int, seconds: float) -> list[Timed]:
    """The segments of a window of `seconds`; ids from `first` on are timestamps."""
    is_time = [token >= first for token in token_ids]
    cuts = [at for at in range(1, len(token_ids)) if is_time[at - 1] and is_time[at]]
    bounds = [0, *cuts, len(token_ids)]
    found: list[Timed] = []
    for begin, end in pairwise(bounds):
        piece = token_ids[begin:end]
        if all(token >= first for token in piece):
            continue
        start = seconds_of(piece[0], first) if is_time[begin] else (found[-1].end if found else 0.0)
        until = seconds_of(piece[-1], first) if is_time[end - 1] else seconds
        found.append(Timed(min(start, seconds), min(max(start, until), seconds), piece))
    return found


def seconds_of(token: int, first: int) -> float:
    return (token - first) * STEP_S


def text_of(piece: Timed, end: int, decode: Callable[[Sequence[int]], str]) -> str:
    """A segment's text; ids from `end` on are not text."""
    return decode([token for token in piece.token_ids if token < end])
