"""Vocabulary: the facts about a model's tokens that a request's fields are checked against.

Owner: none, a frozen value, made once at start (server/start/load.py). In: the width of the model's logits, its end
tokens and its tokenizer. Out: the limits of token ids, and the tokens of words and of stop strings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Facts about the model's tokens for checks of fields."""

    width: int  # the number of logits
    eos: tuple[int, ...]
    encode: Callable[[str], list[int]]  # plain text, no special tokens added
    require_texts: Callable[[str], None]  # raises RenderError if the server has no tokenizer
