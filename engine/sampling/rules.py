"""The rules of one request that change its logits: bias, allowed ids, bad words, min_tokens, penalties, DRY.

Owner: the device thread makes them at admission. Rules are data: the CPU's sampler applies them in torch, the
accelerator's sampler sends them to the device:

    edits   (token, value, until): value is added to the token's logit; -inf before the answer's token number `until`
    bits()  the tokens that may be chosen: allowed ids that complete no bad word; None: all tokens
    kinds   the tables that are used: seen tokens (repetition), counts (presence, frequency), bits, repetitions (DRY)
    dry     the state of DRY after the prompt

Only bad words of several tokens and timestamps change the bits during the answer; `record` passes each token to both.
"""

from __future__ import annotations

import numpy as np

from engine.base.request import SamplingParams
from engine.kernels.sampling.rules import ALLOWED, COUNTED, REPEATS, SEEN
from engine.sampling.dry import DryHistory
from engine.sampling.timestamps import Timestamps


def needs_rules(params: SamplingParams) -> bool:
    """Whether a row's logits are changed before sampling."""
    return bool(
        params.logit_bias
        or params.allowed_token_ids is not None
        or params.bad_words
        or params.min_tokens
        or params.not_first_token_ids
        or params.timestamps is not None
        or has_penalties(params)
        or has_dry(params)
    )


def has_penalties(params: SamplingParams) -> bool:
    """Whether any of the three penalties is on."""
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)


def has_dry(params: SamplingParams) -> bool:
    """Whether repetitions are punished."""
    return bool(params.dry_multiplier and params.dry_penalty_last_n)


class RowRules:
    """Compiled rules of one slot's request."""

    __slots__ = (
        "_allowed", "_keep", "_tail", "_words", "dry", "edits", "has_grammar", "kinds", "params", "prompt", "times",
    )  # fmt: skip

    def __init__(
        self, params: SamplingParams, prompt: np.ndarray, vocab: int, history: int, has_grammar: bool = False
    ) -> None:
        """prompt int32 [prompt_len]; history: tokens in which DRY may find repetitions; if the row has a grammar,
        engine/grammar writes the bits."""
        self.params = params
        values = dict.fromkeys(sorted(params.edited_token_ids), 0.0)
        for token, value in params.logit_bias:
            values[token] += value
        until = dict.fromkeys(params.not_first_token_ids, 1)
        if params.min_tokens:
            until |= dict.fromkeys(params.ending_token_ids, params.min_tokens)
        self.edits = [(token, value, until.get(token, 0)) for token, value in values.items()]
        self.kinds = SEEN * (params.repetition_penalty != 1.0)
        self.kinds |= COUNTED * bool(params.presence_penalty or params.frequency_penalty)
        self.kinds |= REPEATS * has_dry(params)
        self.dry = DryHistory(params, prompt, vocab, history) if has_dry(params) else None
        self.prompt = prompt[(prompt >= 0) & (prompt < vocab)] if self.kinds & SEEN else prompt[:0]
        self._allowed = None  # bool [vocab], without bad words of several tokens
        self.times = None if params.timestamps is None else Timestamps(params.timestamps)
        if params.allowed_token_ids is not None or params.bad_words or self.times is not None:
            self.kinds |= ALLOWED
            self._allowed = np.full(vocab, params.allowed_token_ids is None)
            self._allowed[list(params.allowed_token_ids or ())] = True
            self._allowed[[word[0] for word in params.bad_words if len(word) == 1]] = False
        self.has_grammar = has_grammar
        self.kinds |= ALLOWED * has_grammar
        self._words = [word for word in params.bad_words if len(word) > 1]
        self._keep = max((len(word) - 1 for word in self._words), default=0)
        # The last tokens of prompt and answer, as many as the longest bad word needs.
        self._tail: list[int] = prompt[-self._keep :].tolist() if self._keep else []

    @property
    def moves(self) -> bool:
        """Whether the bits change during the answer."""
        return bool(self._words) or self.times is not None

    def bits(self) -> np.ndarray | None:
        """bool [vocab]: the tokens that may be chosen next."""
        if self._allowed is None:
            return None
        ended = [word[-1] for word in self._words if tuple(self._tail[1 - len(word) :]) == word[:-1]]
        if not ended and self.times is None:
            return self._allowed
        found = self._allowed.copy()
        found[ended] = False
        if self.times is not None:
            self.times.restrict(found)
        return found

    def record(self, token: int) -> None:
        """Records a chosen token."""
        if self.times is not None:
            self.times.record(token)
        if self._keep:
            self._tail.append(token)
            del self._tail[: -self._keep]
