"""Timestamps: OpenAI's whisper rules for the time tokens in a text.

Owner: device thread, as part of a row's rules (engine/sampling/rules.py). Times come in pairs, the end of a segment and
the beginning of the next, and never decrease. The first token is a time, at most `latest_start`:

    <|0.00|> text text <|1.20|><|1.20|> text <|2.00|> end

If all times together are likelier than every other token, a time is chosen (`weigh`), which needs the logits. The other
rules are masks that change with the answer.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.base.request import TimestampRules


class Timestamps:
    """The timestamp state of one answer."""

    __slots__ = ("_before", "_last", "_newest", "rules")

    def __init__(self, rules: TimestampRules) -> None:
        self.rules = rules
        self._last = self._before = -1  # the last token, and the token before it
        self._newest = -1  # the newest time

    def restrict(self, flags: np.ndarray) -> None:
        """Clears in flags bool [vocab] the tokens that may not be chosen next."""
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
        """Records a chosen token."""
        self._before, self._last = self._last, token
        if token >= self.rules.first:
            self._newest = token


def weigh(logits: Tensor, first: int) -> None:
    """Bans all other tokens in rows where all times together are likelier than every other token; in place.

    logits float32 [rows, vocab]; forbidden tokens are -inf already.
    """
    times = logits[:, first:].logsumexp(-1)
    likeliest = logits[:, :first].amax(-1)
    logits[:, :first].masked_fill_((times > likeliest)[:, None], float("-inf"))


def weighed(logits: Tensor, rows: Tensor, flags: Tensor, first: int) -> Tensor:
    """A copy of logits [S, vocab] with flags bool [n, vocab] and `weigh` applied to `rows` int64 [n]."""
    chosen = logits.index_select(0, rows).float().masked_fill_(~flags, float("-inf"))
    weigh(chosen, first)
    return logits.index_copy(0, rows, chosen.to(logits.dtype))


def unpacked(lines: Tensor, vocab: int) -> Tensor:
    """Bit masks int32 [n, words] as bool [n, vocab]: token t is bit t % 32 of word t // 32."""
    bits = torch.arange(32, dtype=torch.int32, device=lines.device)
    return ((lines[:, :, None] >> bits) & 1).bool().flatten(1)[:, :vocab]
