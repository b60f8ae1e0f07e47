"""The rules part on an accelerator: handles rows whose sampling needs the host in each step.

Owner: device thread. Most sampling parameters are data in the slot's words, which every plain step reads. Some
parameters change with the answer: bad words of several tokens, time limits, log-probabilities of given token ids. Rules
need a line in tables on the device; a slot takes a line with its first step (sampling/lines). On the CPU the sampler
applies the rules itself, so this part does not exist there.
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
    """Slots with rules, or with log-probabilities that the kernels of plain steps do not compute."""

    name = "rules"

    def __init__(self, model: Model, sizes: Sizes) -> None:
        self._vocab, self._max_rows = model.config.text.vocab_size, sizes.max_rows
        self._steps: Steps
        self._sampler: RuledSampler
        self._parked: set[int] = set()  # slots that have lost their line; Python launches their next step

    def claim(self) -> Claim:
        """Memory for float32 logits of CHUNK rows and for sorting them."""
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
        """Assigns lines to the step's slots and sends their words. The words overwrite the slot's newest token on the
        device. The host already has this token: a slot takes a line with its first step, or after a step without it.
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
        """Reads log-probabilities from separate kernels, and updates the rules with the sampled tokens."""
        home, sampled = step.home, step.rows.sampled
        assert home.tokens is not None
        pending: Pending | None = step.notes.get("pending")
        if pending is not None:
            found = {int(sampled[place]): entry for place, entry in pending.collect().items()}
            width = home.width
            home.logprobs |= {row * width: entry for row, entry in found.items() if row not in home.invalid}
        self._sampler.record(step.sampled_slots, home.tokens[sampled, 0])
