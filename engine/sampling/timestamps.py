"""Timestamps: when a text with times may hold which of its time tokens, as OpenAI's whisper rules.

Owner: device thread, as part of a row's rules (engine/sampling/rules.py). Times come in pairs, the end of a segment
and the beginning of the next, and never go back; the first token is a time, and not a late one:

    <|0.00|> text text <|1.20|><|1.20|> text <|2.00|> end

Where times together are likelier than any other token, a time is chosen (`weigh`); that needs the logits, all else is
bits that move with the answer.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.base.request import TimestampRules


class Timestamps:
    """What one answer has said of times."""

    __slots__ = ("_before", "_last", "_newest", "rules")

    def __init__(self, rules: TimestampRules) -> None:
        self.rules = rules
        self._last = self._before = -1  # the last token, and the one before it
        self._newest = -1  # the newest time

    def restrict(self, flags: np.ndarray) -> None:
        """Clears in flags bool [vocab] what may not be chosen next."""
        first, newest = self.rules.first, self._newest
        flags[first - 1] = False  # <|notimestamps|>
        if self._last < 0:
            flags[:first] = False
            flags[first + self.rules.latest_start + 1 :] = False
            return
        opens = self._last >= first and not 0 <= self._before < first  # a segment has begun
        closes = self._last >= first and not opens
        if opens:
            flags[first:] = False
        elif closes:
            flags[: self.rules.end] = False
        if newest >= 0:
            flags[first : newest if closes else newest + 1] = False

    def record(self, token: int) -> None:
        """A token was chosen."""
        self._before, self._last = self._last, token
        if token >= self.rules.first:
            self._newest = token


def weigh(logits: Tensor, first: int) -> None:
    """Bans all other tokens where times together are likelier than any of them; float32 [rows, vocab], in place.

    What may not be chosen is -inf already.
    """
    times = logits[:, first:].logsumexp(-1)
    likeliest = logits[:, :first].amax(-1)
    logits[:, :first].masked_fill_((times > likeliest)[:, None], float("-inf"))


def weighed(logits: Tensor, rows: Tensor, flags: Tensor, first: int) -> Tensor:
    """A copy of logits [S, vocab] in which `rows` int64 [n] hold what flags bool [n, vocab] allow, after `weigh`."""
    chosen = logits.index_select(0, rows).float().masked_fill_(~flags, float("-inf"))
    weigh(chosen, first)
    return logits.index_copy(0, rows, chosen.to(logits.dtype))


def unpacked(lines: Tensor, vocab: int) -> Tensor:
    """bool [n, vocab] of lines of bits int32 [n, words]: bit t is bit t % 32 of word t // 32."""
    bits = torch.arange(32, dtype=torch.int32, device=lines.device)
    return ((lines[:, :, None] >> bits) & 1).bool().flatten(1)[:, :vocab]
