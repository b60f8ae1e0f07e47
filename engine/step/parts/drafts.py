"""Drafts: the part that guesses a row's next tokens, so that one step may yield several of them.

Owner: device thread; the stream runs `after_choice`. A step computes a row's newest token and its drafts together; the
drafts that equal the row's own samples count, so the answer is the same with and without drafts. Drafts stay on the
device: the choice of a step is followed by the guess for the next step, which may be launched already.

    device  forward n | choice n: tokens, verified | drafts of n + 1 | forward n + 1 ...
    host    plan n + 1: at most so many drafts  | settle n: tokens of n, number of drafts of n + 1

Methods `ngram` and `suffix` copy drafts from the row's own text (kernels/sampling), which lies on the device. The text
is the prompt and the chosen tokens. Tokens that a grammar forces are written with the step that computes them.
"""

from __future__ import annotations

import numpy as np

from _fast.layout import RowFlag
from _fast.scheduler import Scheduler
from engine.base.drafts import DraftConfig
from engine.base.request import Request, SamplingParams
from engine.kernels.sampling.append import append
from engine.kernels.sampling.ngram import Texts, empty_texts, ngram
from engine.kernels.sampling.suffix import Matches, empty_matches, suffix
from engine.kernels.sampling.top_logprobs import MOST
from engine.sampling.pending import send
from engine.step.live import LiveRow, Place
from engine.step.parts.part import ABSENT, JOINS, Claim, StepPart, Steps
from engine.step.sizes import Sizes
from engine.step.step import Chosen, Step


class Drafts(StepPart):
    """The texts of live slots, and what continues them."""

    name = "drafts"

    def __init__(self, config: DraftConfig, sizes: Sizes, raw: bool, rests: bool) -> None:
        """`raw`: log-probabilities are those of the model's logits; `rests`: in steps without drafts the part rests."""
        self._config, self._sizes, self._raw, self.rests = config, sizes, raw, rests
        self.texts: Texts
        self._prompt_len = np.full(sizes.max_slots, sizes.max_model_len, np.int32)  # of slots with a grammar
        self._matches: Matches | None = None  # for method `suffix`

    def claim(self) -> Claim:
        longest, sizes = self._sizes.max_model_len + 1, self._sizes
        matches = 0 if self._config.suffix is None else longest * sizes.max_rows
        return Claim(variants=int(self.rests), weight_bytes=4 * (sizes.max_slots + 1) * longest + matches)

    def start(self, steps: Steps) -> None:
        sizes = self._sizes
        longest, device = sizes.max_model_len + 1, steps.backend.rank.device
        self.texts = empty_texts(sizes.max_slots, longest, sizes.max_rows, device)
        if (rules := self._config.suffix) is not None:
            shape = rules.depth, rules.factor, self._config.num_tokens
            self._matches = empty_matches(sizes.max_rows, longest, *shape, device)

    def place(self, request: Request, place: Place, scheduler: Scheduler) -> None:
        if takes_drafts(request.sampling, self._raw) and not place.traced:
            place.drafts = self._config.num_tokens

    def admit(self, slot: int, row: LiveRow, words: np.ndarray) -> bool:
        """Writes the prompt; the rest of the text follows from the choices, unless a grammar forces tokens."""
        prompt = np.ascontiguousarray(row.request.prompt_token_ids, np.int32)
        self.texts.tokens[slot, : len(prompt)].copy_(send(prompt, self.texts.tokens.device))
        if row.request.grammar is None:
            return False
        self._prompt_len[slot] = len(prompt)
        return True

    def reset(self, slot: int, poison: bool) -> None:
        self._prompt_len[slot] = self._sizes.max_model_len

    def role(self, step: Step) -> int:
        return JOINS if len(self._known(step)) else ABSENT

    def before(self, step: Step) -> None:
        rows, tokens = step.rows, np.asarray(step.plan.token_ids)
        for row in self._known(step).tolist():
            start, count, place = int(rows.starts[row]), int(rows.lens[row]), int(rows.computed[row])
            text = self.texts.tokens[int(rows.slots[row]), place : place + count]
            text.copy_(send(tokens[start : start + count], text.device))

    def _known(self, step: Step) -> np.ndarray:
        """The plan rows whose tokens are of the answer and come from the host."""
        rows = step.rows
        return np.flatnonzero((rows.flags & RowFlag.FEED == 0) & (rows.computed >= self._prompt_len[rows.slots]))

    def after_choice(self, chosen: Chosen, variant: int) -> None:
        config, rules = self._config, self._config.suffix
        if rules is None or self._matches is None:
            ngram(chosen.state, self.texts, chosen.runs, chosen.slots, config.lookup_min, config.lookup_max)
            return
        texts, least = self.texts.tokens, rules.least_probability
        suffix(chosen.state, texts, self._matches, chosen.runs, chosen.slots, least)

    def after_rest(self, chosen: Chosen, variant: int) -> None:
        append(self.texts.tokens, chosen.state, chosen.runs, chosen.lines)


def takes_drafts(params: SamplingParams, raw: bool) -> bool:
    """Whether a row can choose several tokens in a step: none of its rules and reports needs the host between them. The
    masks of grammars are filled along the drafts.

    `raw`: log-probabilities are those of the model's logits, for tokens that the model chose.
    """
    several = any(len(word) > 1 for word in params.bad_words)
    reports = params.logprobs is not None and not (raw and 0 <= params.logprobs <= MOST)
    waits = params.logprob_token_ids or params.timestamps is not None or params.dry_multiplier
    return not (several or reports or waits)
