"""DryHistory: the state of DRY for one row, as one line of the device's table (engine/kernels/sampling/dry.py).

Owner: the device thread makes it at admission from the prompt; on a CPU it follows the answer, on an accelerator it is
sent once and the kernels go on with it. The first state takes linear time for every prompt (`_fast/repeats`), a token
one pass over the window.
"""

from __future__ import annotations

import numpy as np
import torch

from _fast.repeats import repeats
from engine.base.limits import MAX_HISTORY
from engine.base.request import SamplingParams
from engine.kernels.sampling.dry import HEAD_LEN, PARTS, line_len, list_repeats, punished, remember_reference

LEAST_HISTORY = 64  # tokens


def history_for(max_model_len: int) -> int:
    """The tokens of history that a line has room for: a power of two."""
    return min(MAX_HISTORY, max(LEAST_HISTORY, 1 << (max_model_len - 1).bit_length()))


class DryHistory:
    """The last tokens of a text, how far its end repeats at each distance, and the tokens to punish next."""

    __slots__ = ("_allowed", "_base", "_multiplier", "_position", "_vocab", "breaks", "line", "window")

    def __init__(self, params: SamplingParams, prompt: np.ndarray, vocab: int, history: int) -> None:
        """prompt int32 [prompt_len]."""
        self._multiplier, self._base = params.dry_multiplier, params.dry_base
        self._allowed, self._vocab = params.dry_allowed_length, vocab
        last = params.dry_penalty_last_n
        self.window = history if last < 0 else min(last, history)  # tokens
        self.breaks = np.zeros(vocab, np.bool_)
        if params.dry_breakers:
            packed = np.frombuffer(params.dry_breakers, np.uint8)
            self.breaks = np.unpackbits(packed, count=vocab, bitorder="little").view(np.bool_)
        self.line = np.zeros(line_len(history), np.int32)
        tokens, lags = self.line[HEAD_LEN:].reshape(PARTS, history)[:2]
        text = np.ascontiguousarray(prompt[-self.window :], np.int32)
        repeats(text, lags[: len(text)])
        known = (text >= 0) & (text < vocab)
        broken = np.flatnonzero(known & self.breaks[np.where(known, text, 0)])
        np.minimum(lags, len(text) - 1 - broken[-1] if len(broken) else len(text), out=lags)
        self._position = len(prompt)
        tokens[np.arange(len(prompt) - len(text), len(prompt)) % history] = text
        list_repeats(self.line, vocab, self.breaks, len(prompt) - 1, len(text), self._allowed)

    def apply(self, logits: torch.Tensor) -> None:
        """Subtracts the penalties of repetitions from logits float32 [vocab] in place."""
        count = int(self.line[0])
        if count:
            listed, lengths = torch.from_numpy(self.line)[HEAD_LEN:].view(PARTS, -1)[2:, :count]
            logits.copy_(punished(logits, listed, lengths, self._multiplier, self._base, self._allowed))

    def record(self, token: int) -> None:
        """Appends a chosen token."""
        numbers = self._position, self.window, self._allowed
        remember_reference(token, self._vocab, self.line, self.breaks, *numbers)
        self._position += 1
