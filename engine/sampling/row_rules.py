"""HostRules: what the host keeps of one request's rules when the logits are on a device.

Owner: device thread. Rules that touch few tokens (bias, bad words, min_tokens) become edits, made for each step from
the tokens committed so far; those that touch the whole vocabulary (allowed ids, penalties) live in TokenLines. The
meaning is that of rules.py.
"""

from __future__ import annotations

import numpy as np

from engine.request import SamplingParams
from engine.sampling.rules import NEG_INF, has_penalties


class HostRules:
    """Compiled rules of one slot's request."""

    __slots__ = ("_bias", "_ends", "_keep", "_tail", "answer", "params", "penalised", "prompt")

    def __init__(self, params: SamplingParams, prompt: np.ndarray) -> None:
        self.params = params
        self.penalised = has_penalties(params)
        self.prompt = np.array(prompt if self.penalised else (), np.int64)
        self.answer: list[int] = []  # committed tokens, where penalties count them
        self._bias: dict[int, float] = {}
        for token, value in params.logit_bias:
            self._bias[token] = self._bias.get(token, 0.0) + value
        ends = params.stop_token_ids if params.ignore_eos else (*params.eos_token_ids, *params.stop_token_ids)
        self._ends = sorted(set(ends))
        self._keep = max((len(word) for word in params.bad_words), default=0)
        self._tail: list[int] = prompt[-self._keep :].tolist() if self._keep else []

    @property
    def needs_line(self) -> bool:
        """True when a rule touches the whole vocabulary."""
        return self.penalised or self.params.allowed_token_ids is not None

    def edits(self, index: int) -> dict[int, float]:
        """What is added to which token's logit for the answer's token number `index`."""
        found = dict(self._bias)
        for word in self.params.bad_words:
            before = len(word) - 1
            if before == 0 or (len(self._tail) >= before and tuple(self._tail[-before:]) == word[:-1]):
                found[word[-1]] = NEG_INF
        if index < self.params.min_tokens:
            found.update(dict.fromkeys(self._ends, NEG_INF))
        return found

    def record(self, token: int) -> None:
        """A token was committed."""
        if self.penalised:
            self.answer.append(token)
        if self._keep:
            self._tail.append(token)
            del self._tail[: -self._keep]
