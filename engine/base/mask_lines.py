"""Lines: which tokens the rows of a step may choose, as their grammars leave them.

Owner: device thread. In: the matchers of a step's rows (advance). Out: bits by row for the choice of tokens, on the
host (sampling/sampler) or on a device (sampling/masks).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Lines:
    """Which tokens the rows with grammars of one step may choose."""

    places: list[int]  # among the step's sampled rows
    words: np.ndarray  # int32 [places, words]: bit t % 32 of word t // 32
    tails: np.ndarray  # int32 [places]: each word of the ids behind these

    def flags(self, number: int, vocab: int) -> np.ndarray:
        """bool [vocab]: a row's line."""
        found = np.full(max(vocab, 32 * self.words.shape[1]), bool(self.tails[number]))
        found[: 32 * self.words.shape[1]] = np.unpackbits(self.words[number].view(np.uint8), bitorder="little")
        return found[:vocab]
