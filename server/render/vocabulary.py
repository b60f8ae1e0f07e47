"""Vocabulary: the facts about a model's tokens that a request's fields are checked against.

Owner: none, a frozen value, made once at start (server/start/load.py). In: the width of the model's logits, its end
tokens and its tokenizer. Out: the limits of token ids, the tokens of words and of stop strings, and sets of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from _fast.detok import TokenTable

SETS = 128  # sets of tokens that stay in memory, of a bit per token


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Facts about the model's tokens for checks of fields."""

    width: int  # the number of logits
    eos: tuple[int, ...]
    encode: Callable[[str], list[int]]  # plain text, no special tokens added
    require_texts: Callable[[str], None]  # raises RenderError if the server has no tokenizer
    table: TokenTable | None = None  # the bytes of tokens; None: no token has any

    def holding(self, texts: tuple[str, ...]) -> bytes:
        """The tokens whose bytes hold one of the texts, each of 1 to 64 bytes: token t is bit t % 8 of byte t // 8."""
        return _holding(self.table, self.width, texts)


@lru_cache(maxsize=SETS)
def _holding(table: TokenTable | None, width: int, texts: tuple[str, ...]) -> bytes:
    bits = np.zeros(-(-width // 8), np.uint8)
    if table is not None:
        for text in texts:
            table.mark_holding(text.encode(), bits)
    if width % 8:
        bits[-1] &= (1 << width % 8) - 1  # the tokenizer may have more ids than the model has logits
    return bits.tobytes()
