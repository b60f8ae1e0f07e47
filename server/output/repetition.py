"""Repetition: detects an answer that repeats the same few tokens, while it grows.

Owner: the loop; one RepetitionWatch per choice. In: token ids. Out: how many of them there were when a repetition was
complete. For each pattern length p it counts how many of the newest tokens in a row equal the token p places before, so
the work per token does not grow with the answer.

    a b c b c b c     length 2: three times "b c"  ->  4 tokens in a row equal the one 2 places before
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Repetition:
    """The rule: a pattern of `shortest` to `longest` tokens, `min_count` times in a row."""

    shortest: int
    longest: int
    min_count: int  # >= 2


class RepetitionWatch:
    """Compares one choice's newest tokens with earlier ones."""

    __slots__ = ("_min_tokens", "_needed", "_num_tokens", "_runs", "_shortest", "_tail")

    def __init__(self, rule: Repetition, min_tokens: int = 0) -> None:
        lengths = np.arange(rule.shortest, rule.longest + 1)  # [patterns]
        self._shortest = rule.shortest
        self._needed = lengths * (rule.min_count - 1)
        self._runs = np.zeros(len(lengths), np.int64)
        self._tail = np.full(rule.longest, -1, np.int64)  # newest first
        self._num_tokens = 0
        self._min_tokens = min_tokens

    def feed(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens there were when a repetition was complete; 0 if none is complete."""
        for count, token in enumerate(token_ids, 1):
            self._runs += 1
            self._runs *= self._tail[self._shortest - 1 :] == token
            self._tail[1:] = self._tail[:-1]
            self._tail[0] = token
            self._num_tokens += 1
            if self._num_tokens >= self._min_tokens and bool((self._runs >= self._needed).any()):
                return count
        return 0
