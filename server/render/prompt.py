"""Prompt: the result of rendering, for media loading and the engine; and the rules about its length.

Owner: none, a frozen value made in the pool. In: token ids and media in the order of their placeholders. Out: int32
ids, MediaRefs, and for each MediaRef the index of its single placeholder token (mm/splice.py expands it).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from mm.client_rows import ClientRows
from mm.item import MediaRef
from server.render.errors import RenderError, invalid

Side = Literal["left", "right"]
PIECE = 16384  # ids per piece; NumPy holds the GIL for about 0.3 ms to read them


@dataclass(frozen=True, slots=True)
class PromptRows:
    """A client's rows in place of text."""

    start: int  # index of the first of their ids, one id per row
    rows: ClientRows


@dataclass(frozen=True, slots=True)
class Prompt:
    """One rendered prompt."""

    token_ids: np.ndarray  # int32 [num_tokens]
    media: tuple[MediaRef, ...] = ()
    slots: tuple[int, ...] = ()  # index in token_ids of each item's placeholder, ascending
    text: str | None = None  # None when the client sent token ids
    rows: tuple[PromptRows, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)


def id_array(ids: list[int]) -> np.ndarray:
    """int32 [num_tokens]. Long lists are read in pieces: in one piece, 160,000 ids would block the loop for 3 ms."""
    if len(ids) <= PIECE:
        return np.array(ids, dtype=np.int32)
    found = np.empty(len(ids), dtype=np.int32)
    for start in range(0, len(ids), PIECE):
        found[start : start + PIECE] = ids[start : start + PIECE]
    return found


def empty(ids: list[int]) -> None:
    """Empty a list of ids in pieces: freeing a million ids at once holds the GIL for 7 ms."""
    while ids:
        del ids[-PIECE:]


def encoded_size(text: str, param: str) -> int:
    """Bytes of a text in UTF-8; refuses half of a surrogate pair."""
    try:
        return len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError as error:
        raise invalid(f"{param} contains half of a surrogate pair, which is no character.", param) from error


def context_error(max_model_len: int, num_tokens: int, param: str | None = None, note: str = "") -> RenderError:
    """The error for a prompt that is too long; clients match on its words."""
    return RenderError(
        400,
        "context_length_exceeded",
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains {num_tokens}"
        f" input tokens{note}. Please shorten the prompt.",
        param,
    )


def no_embedding(token: int, name: str | None, num_embeddings: int, param: str) -> RenderError:
    """The error for a token of the tokenizer that has no embedding in the model."""
    return RenderError(
        400,
        "token_id_out_of_range",
        f"{param} holds {name!r}, token {token} of the tokenizer; the model has {num_embeddings} tokens, "
        "so leave it out.",
        param,
    )


def truncate(token_ids: np.ndarray, limit: int | None, side: Side, max_model_len: int) -> np.ndarray:
    """The first or last `limit` tokens (`side`: the side that is cut off); -1: the context length."""
    if limit is None:
        return token_ids
    if limit < -1:
        raise invalid(f"truncate_prompt_tokens={limit}: give -1 or a number of tokens >= 0.", "truncate_prompt_tokens")
    if limit > max_model_len:
        raise invalid(
            f"truncate_prompt_tokens={limit} is more than this model's context of {max_model_len} tokens; "
            "give at most that, or -1.",
            "truncate_prompt_tokens",
        )
    keep = max_model_len if limit == -1 else limit
    if len(token_ids) <= keep:
        return token_ids
    return token_ids[len(token_ids) - keep :] if side == "left" else token_ids[:keep]
