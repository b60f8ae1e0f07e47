"""PromptLogprobs: which rows of a step owe log-probabilities of their prompt's own tokens, and where those go.

Owner: the device thread puts a slot into `asked` at admission, when no step in flight knows it, and takes it out when
it is free; the steps of that slot then ask in order. A prompt that is computed again after a preemption starts its
list again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import numpy as np

from engine.base.request import Request, TokenLogprob
from engine.step.build import RowArrays


@dataclass(slots=True)
class Due:
    """What a step owes, of all its rows together."""

    asked: np.ndarray  # int64 [3, n]: whose hidden state of the step's tokens, what follows it, how many most likely
    targets: list[tuple[list[TokenLogprob | None], int]]  # by row, and by how many it grows; n in all

    def tell(self, entries: Iterable[TokenLogprob]) -> None:
        """Hands out the n log-probabilities."""
        left = iter(entries)
        for target, count in self.targets:
            target += islice(left, count)


class PromptLogprobs:
    """Slots whose request asked for prompt_logprobs."""

    def __init__(self, as_logits: bool, vocab: int) -> None:
        self.as_logits = as_logits
        self.vocab = vocab
        self.asked: dict[int, tuple[Request, list[TokenLogprob | None]]] = {}  # by slot

    def due(self, rows: RowArrays) -> Due | None:
        """What this step's rows owe; None when that is nothing."""
        found: list[np.ndarray] = []  # int64 [3, count], by row
        targets = []
        for row, slot in enumerate(rows.slots.tolist()):
            if slot not in self.asked:
                continue
            request, target = self.asked[slot]
            prompt, done = request.prompt_token_ids, int(rows.computed[row])
            count = min(int(rows.lens[row]), len(prompt) - 1 - done)
            if count > 0:
                del target[done + 1 :]  # a preempted prompt is computed again
                k = request.sampling.prompt_logprobs or 0
                asked = np.empty((3, count), np.int64)
                asked[0] = np.arange(count) + rows.starts[row]
                asked[1] = prompt[done + 1 : done + 1 + count].clip(0, self.vocab - 1)  # they are looked up
                asked[2] = self.vocab if k == -1 else min(k, self.vocab)
                found.append(asked)
                targets.append((target, count))
        return Due(np.concatenate(found, axis=1), targets) if found else None
