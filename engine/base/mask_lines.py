"""Lines: bit masks of the tokens that the grammars of a step's rows allow.

Owner: device thread. In: the matchers of a step's rows (advance). Out: a bit mask per row for sampling on the
host (sampling/sampler) or on a device (sampling/masks).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Lines:
    """The masks of one step's rows with grammars."""

    places: list[int]  # index of each masked row among the step's sampled rows
    words: np.ndarray  # int32 [places, words]: bit t % 32 of word t // 32
    tails: np.ndarray  # int32 [places]: the value of every word beyond `words`, for the remaining ids

    def flags(self, number: int, vocab: int) -> np.ndarray:
        """The mask of row `number` as bool [vocab]."""
        found = np.full(max(vocab, 32 * self.words.shape[1]), bool(self.tails[number]))
        found[: 32 * self.words.shape[1]] = np.unpackbits(self.words[number].view(np.uint8), bitorder="little")
        return found[:vocab]
