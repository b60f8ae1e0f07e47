"""The rules of one request that change its logits before drawing: bias, allowed ids, bad words, min_tokens, penalties.

Owner: made by the device thread at admission; afterwards only the stream reads and changes it, in step order, so
counts see every sampled token exactly once (a preempted row keeps them: its tokens are not sampled again).
"""

from __future__ import annotations

import numpy as np
import torch

from engine.kernels.sampling.penalties import penalties
from engine.request import SamplingParams

NEG_INF = float("-inf")


def needs_rules(params: SamplingParams) -> bool:
    """True when a row cannot take the plain path (logits straight to the draw)."""
    return bool(
        params.logit_bias
        or params.allowed_token_ids is not None
        or params.bad_words
        or params.min_tokens
        or has_penalties(params)
    )


def has_penalties(params: SamplingParams) -> bool:
    """True when any of the three penalties is on."""
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)


class RowRules:
    """Compiled rules of one slot's request."""

    __slots__ = ("_allowed", "_bad", "_bias_ids", "_bias_values", "_counts", "_ends", "_in_prompt", "_params", "_tail")

    def __init__(self, params: SamplingParams, prompt: np.ndarray, vocab: int) -> None:
        self._params = params
        self._bias_ids = torch.tensor([token for token, _ in params.logit_bias], dtype=torch.int64)
        self._bias_values = torch.tensor([value for _, value in params.logit_bias], dtype=torch.float32)
        self._allowed = None
        if params.allowed_token_ids is not None:
            self._allowed = torch.ones(vocab, dtype=torch.bool)  # True: forbidden
            self._allowed[list(params.allowed_token_ids)] = False
        ends = params.stop_token_ids if params.ignore_eos else (*params.eos_token_ids, *params.stop_token_ids)
        self._ends = torch.tensor(sorted(set(ends)), dtype=torch.int64)
        self._bad = params.bad_words
        self._tail: list[int] = []  # newest tokens of prompt and answer, as many as the longest bad word needs
        if self._bad:
            keep = max(len(word) for word in self._bad)
            self._tail = prompt[-keep:].tolist()
        self._counts = self._in_prompt = None
        if has_penalties(params):
            self._counts = torch.zeros(vocab, dtype=torch.int32)
            self._in_prompt = torch.zeros(vocab, dtype=torch.bool)
            known = prompt[(prompt >= 0) & (prompt < vocab)]
            self._in_prompt[torch.from_numpy(known.astype(np.int64))] = True

    def apply(self, logits: torch.Tensor, index: int) -> None:
        """Changes logits float32 [vocab] in place for the answer's token number `index` (0 is the first)."""
        params = self._params
        if len(self._bias_ids):
            logits.index_add_(0, self._bias_ids, self._bias_values)
        if self._allowed is not None:
            logits.masked_fill_(self._allowed, NEG_INF)
        for word in self._bad:
            before = len(word) - 1
            if before == 0 or (len(self._tail) >= before and tuple(self._tail[-before:]) == word[:-1]):
                logits[word[-1]] = NEG_INF
        if index < params.min_tokens and len(self._ends):
            logits.index_fill_(0, self._ends, NEG_INF)
        if self._counts is not None and self._in_prompt is not None:
            penalties(
                logits,
                self._counts,
                self._in_prompt,
                params.presence_penalty,
                params.frequency_penalty,
                params.repetition_penalty,
            )

    def record(self, token: int) -> None:
        """Counts a sampled token."""
        if self._counts is not None:
            self._counts[token] += 1
        if self._bad:
            self._tail.append(token)
            del self._tail[: -max(len(word) for word in self._bad)]
