"""PromptLogprobs: which rows of a step owe log-probabilities of their prompt's own tokens, and where those go.

Owner: rows are staged by the device thread at admission, when no step in flight knows the slot; the steps of that slot
then ask in order. A prompt that is computed again after a preemption starts its list again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine.request import Request, TokenLogprob
from engine.step.build import RowArrays


@dataclass(slots=True)
class Due:
    """One row's share of a step: hidden states of `count` tokens from `start` on predict `next_tokens`."""

    start: int
    count: int
    next_tokens: np.ndarray  # int32 [count]
    k: int  # how many of the most likely; -1 all
    target: list[TokenLogprob | None]  # grows by count


class PromptLogprobs:
    """Slots whose request asked for prompt_logprobs."""

    def __init__(self, as_logits: bool, vocab: int) -> None:
        self.as_logits = as_logits
        self._vocab = vocab
        self._asked: dict[int, tuple[Request, list[TokenLogprob | None]]] = {}

    def admit(self, slot: int, request: Request, target: list[TokenLogprob | None] | None) -> None:
        """Stages a slot; nothing is kept for one that did not ask (`target` None)."""
        if target is not None:
            self._asked[slot] = (request, target)

    def reset(self, slot: int) -> None:
        """Forgets a freed slot."""
        self._asked.pop(slot, None)

    def __len__(self) -> int:
        return len(self._asked)

    def due(self, rows: RowArrays) -> Iterator[Due]:
        """What this step's rows owe, ascending."""
        if not self._asked:
            return
        for row, slot in enumerate(rows.slots.tolist()):
            asked = self._asked.get(slot)
            if asked is None:
                continue
            request, target = asked
            prompt, done = request.prompt_token_ids, int(rows.computed[row])
            count = min(int(rows.lens[row]), len(prompt) - 1 - done)
            if count > 0:
                del target[done + 1 :]  # a preempted prompt is computed again
                following = prompt[done + 1 : done + 1 + count].clip(0, self._vocab - 1)  # they are looked up
                yield Due(int(rows.starts[row]), count, following, request.sampling.prompt_logprobs or 0, target)
