"""Lines: bit masks of the tokens that the grammars of a step's rows allow.

Owner: device thread. In: the matchers of a step's rows (advance). Out: bit masks for sampling on the host
(sampling/sampler) or on a device (sampling/masks): one per row, and one for the token behind each of the row's drafts.
A mask of zeros behind a draft ends the row's run before this token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Lines:
    """The masks of one step's rows with grammars."""

    places: list[int]  # index of each mask's row among the step's sampled rows
    after: list[int]  # the number of the row's drafts before each mask's token
    words: np.ndarray  # int32 [places, words]: bit t % 32 of word t // 32
    tails: np.ndarray  # int32 [places]: the value of every word beyond `words`, for the remaining ids
    firsts: np.ndarray  # int [sampled rows]: the line of logits of each row's first token; those of its drafts follow

    def behind(self, drafts: int, rows: np.ndarray) -> Lines:
        """The masks behind so many drafts, with their index among `rows`, int [n] of the sampled rows."""
        index = {row: number for number, row in enumerate(rows.tolist())}
        pairs = enumerate(zip(self.places, self.after))
        chosen = [number for number, (place, after) in pairs if after == drafts and place in index]
        places = [index[self.places[number]] for number in chosen]
        return Lines(places, [0] * len(places), self.words[chosen], self.tails[chosen], self.firsts)

    def flags(self, number: int, vocab: int) -> np.ndarray:
        """The mask of row `number` as bool [vocab]."""
        found = np.full(max(vocab, 32 * self.words.shape[1]), bool(self.tails[number]))
        found[: 32 * self.words.shape[1]] = np.unpackbits(self.words[number].view(np.uint8), bitorder="little")
        return found[:vocab]
