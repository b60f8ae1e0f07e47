"""The part of rules on an accelerator: rows whose choice takes work of the host by step.

Owner: device thread. Most of what a request asks of the choice of its tokens is data in the slot's words, and every
plain step reads it. A part of it moves with the answer: bad words of several tokens, times, log-probabilities of tokens
by name. Rules need a line of tables on the device; a slot takes a line with its first step (sampling/lines). On the
host the sampler applies rules itself, so there this part is absent.
"""

from __future__ import annotations

import numpy as np

from _fast.layout import SlotWord
from _fast.steady import SPECIAL_ALWAYS
from engine.models.base.model import Model
from engine.sampling.logprobs import CHUNK
from engine.sampling.pending import Pending
from engine.step.backend.base import RuledSampler
from engine.step.live import LiveRow
from engine.step.parts.part import JOINS, WAITS, Claim, StepPart, Steps
from engine.step.sizes import Sizes
from engine.step.step import Step


class Rules(StepPart):
    """Slots with rules, or with log-probabilities that no kernel of plain steps brings home."""

    name = "rules"

    def __init__(self, model: Model, sizes: Sizes) -> None:
        self._vocab, self._max_rows = model.config.text.vocab_size, sizes.max_rows
        self._steps: Steps
        self._sampler: RuledSampler
        self._parked: set[int] = set()  # slots that have lost their line: Python launches the next step of each

    def claim(self) -> Claim:
        """Float32 logits of CHUNK rows at a time, and what a sort of all values needs."""
        return Claim(step_bytes=4 * self._vocab * 12 * min(self._max_rows, CHUNK))

    def start(self, steps: Steps) -> None:
        sampler = steps.backend.ruled
        assert sampler is not None
        self._steps, self._sampler = steps, sampler

    def admit(self, slot: int, row: LiveRow, words: np.ndarray) -> bool:
        return self._sampler.takes_part(slot)

    def reset(self, slot: int, poison: bool) -> None:
        self._parked.discard(slot)

    def special(self, slot: int) -> int:
        is_plain = slot not in self._parked and self._sampler.is_plain(np.array([slot]))
        return 0 if is_plain else SPECIAL_ALWAYS

    def role(self, step: Step) -> int:
        return JOINS if self._sampler.is_plain(step.sampled_slots) else WAITS

    def before(self, step: Step) -> None:
        """Lines for the step's slots. Words that are sent again take the slot's newest token away from it, which the
        host knows by then: a slot takes a line with its first step, or after a step that did not name it.
        """
        staged, parked = self._sampler.take_lines(step.rows.slots)
        self._parked.update(parked)
        for words in staged:
            slot = int(words[SlotWord.SLOT])
            self._parked.discard(slot)
            self._steps.backend.send(slot, words)
            self._steps.mark(slot)
        for slot in parked:
            self._steps.mark(slot)

    def collect(self, step: Step) -> None:
        """Log-probabilities that took kernels of their own; tokens are counted by the rules that move with them."""
        home, sampled = step.home, step.rows.sampled
        assert home.tokens is not None
        pending: Pending | None = step.notes.get("pending")
        if pending is not None:
            found = {int(sampled[place]): entry for place, entry in pending.collect().items()}
            home.logprobs |= {row: entry for row, entry in found.items() if row not in home.invalid}
        self._sampler.record(step.sampled_slots, home.tokens[sampled, 0])
