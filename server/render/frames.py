"""Frames: the tokens that a tokenizer adds around a text, and around and between the two texts of a pair.

Owner: any thread; made once while the server loads. In: a Tokenizer. Out: token ids. Texts are tokenized without them,
so that a text can be truncated without losing the tokens after it.
"""

from __future__ import annotations

from dataclasses import dataclass

from server.render.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Frames:
    """The tokens that a tokenizer adds around a text, and around and between the two texts of a pair."""

    single: tuple[tuple[int, ...], tuple[int, ...]]  # before, after
    pair: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # before, between, after
    has_types: bool  # the second text's tokens, and those after it, have another type

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Frames:
        """Compute the frames from a text of one letter."""
        bare, whole = tokenizer.encode("x"), tokenizer.encode("x", add_special_tokens=True)
        start = place_of(bare, whole)
        single = tuple(whole[:start]), tuple(whole[start + len(bare) :])
        found = tokenizer.encode_pair("x", "x")
        if found is None:
            return cls(single, (single[0], (), single[1]), False)
        ids, types = found
        first = place_of(bare, ids)
        second = first + len(bare) + place_of(bare, ids[first + len(bare) :])
        between = ids[first + len(bare) : second]
        return cls(single, (tuple(ids[:first]), tuple(between), tuple(ids[second + len(bare) :])), any(types))


def place_of(part: list[int], whole: list[int]) -> int:
    """Index of the first occurrence of `part` in `whole`."""
    return next((k for k in range(len(whole)) if whole[k : k + len(part)] == part), 0)
