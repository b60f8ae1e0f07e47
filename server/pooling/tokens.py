"""Texts, token ids and conversations -> token ids of inputs, with the tokens that the tokenizer adds around them.

Owner: loop; more than a few texts are tokenized in the pool, SLICE at a time. In: the fields of a body. Out: int32
arrays. An input that is too long for the model is refused by its index, unless truncation was requested. Truncation
removes tokens of the text, never those around it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np

from engine.base.model_config import PoolingConfig
from engine.base.request import MediaInput
from server.errors import ApiError, invalid, quoted
from server.render.prompt import Side, id_array
from server.schema.pooling import OF_MESSAGES, InputFields
from server.state import AppState

T = TypeVar("T")
SLICE = 64  # texts tokenized in one call
WIDER = 16  # the second attempt to cut a text tokenizes so many times the bytes of a prompt
SPARE = 64  # tokens at the end of a text's part that the text after it might change
# Parts of an input that are never truncated, for errors.
AROUND_TEXT, AROUND_PAIR = "what stands around a text", "the query with what stands around a pair"
WITH_MEDIA = "an input with media"
Inputs = list[str] | list[list[int]]
Frame = tuple[tuple[int, ...], tuple[int, ...]]  # (tokens before a text, tokens after it)


@dataclass(frozen=True, slots=True)
class Cut:
    """The longest allowed input, and how longer inputs are truncated."""

    limit: int  # tokens, including those around the text
    asked: int | None = None  # truncate_prompt_tokens; None: longer inputs are refused
    side: Side = "right"  # the side that is cut off

    @property
    def most(self) -> int:
        return self.limit if self.asked is None or self.asked == -1 else min(self.limit, self.asked)

    def needed(self, per_document: int | None = None) -> tuple[int | None, Side]:
        """(number of tokens needed of a text, or None for all of them; the side that is cut off)."""
        if per_document is not None and per_document <= self.limit:
            return per_document, "right"
        return (None if self.asked is None else self.most), self.side


@dataclass(frozen=True, slots=True)
class PooledInputs:
    """The engine's inputs: the token ids of each input, and further data of them."""

    ids: list[np.ndarray]
    seconds: np.ndarray | None = None  # int32 [inputs]: where the second text of a pair begins; 0: no pair
    pool_starts: np.ndarray | None = None  # int32 [inputs]: the first token that contributes to an input's array
    media: tuple[MediaInput, ...] = ()  # spans count from the first token of the first input
    positions: np.ndarray | None = None  # int32 [axes, tokens of all inputs] for M-RoPE; None: 0, 1, 2 ... in each
    adapters: np.ndarray | None = None  # int32 [inputs]: number of each input's adapter; None: no adapters


def cut_of(state: AppState, asked: int | None, side: str | None) -> Cut:
    """The fields truncate_prompt_tokens and truncation_side, checked."""
    limit = state.engine.max_model_len
    if asked is not None and not -1 <= asked <= limit:
        text = f"truncate_prompt_tokens: got {asked}; must be -1 (the limit) or 0 to {limit}"
        raise invalid("truncate_prompt_tokens", text)
    if side not in (None, "left", "right"):
        raise invalid("truncation_side", f"truncation_side: got {quoted(side or '')}; must be left or right")
    return Cut(limit, asked, "left" if side == "left" else "right")


def pooling_of(state: AppState) -> PoolingConfig:
    """The pooling settings of the served model; only called for models that pool."""
    pooling = state.engine.model.pooling
    assert pooling is not None
    return pooling


def inputs_of(given: str | Sequence[Any] | None, most: int, param: str = "input") -> Inputs:
    """A text, texts, token ids or lists of token ids, always returned as a list."""
    if given is None:
        raise invalid(param, f"{param}: is missing and required")
    if isinstance(given, str):
        return [given]
    if not given:
        raise invalid(param, f"{param}: is empty; send at least one input", "empty_prompt")
    kinds = set(map(type, given))
    if kinds == {int}:
        return [cast(list[int], list(given))]
    if len(given) > most:
        raise invalid(param, f"{param}: got {len(given)} inputs; at most {most} are allowed")
    if len(kinds) > 1:
        first = type(given[0])
        at = next(k for k, one in enumerate(given) if type(one) is not first)
        raise invalid(f"{param}[{at}]", f"{param}[{at}]: mixes texts and token ids; send one kind")
    return cast(Inputs, list(given))


async def in_pool_if(large: bool, state: AppState, work: Callable[[], T]) -> T:
    """The result of `work`, run in the pool if it would block the loop."""
    return await asyncio.get_running_loop().run_in_executor(state.pool, work) if large else work()


async def tokenized(
    state: AppState, inputs: Inputs, cut: Cut, special: bool, prompt: str = "", param: str = "input", role: str = ""
) -> PooledInputs:
    """The ids of each input. `prompt` precedes each text, but not token ids; `role` may be query or document."""
    config = pooling_of(state)
    if isinstance(inputs[0], str):
        texts = [prompt + text for text in inputs] if prompt else inputs
        state.tokenizer.require_texts(param)
        large = sum(map(len, texts)) > state.config.limits.tokenize_offload_bytes

        def encode() -> PooledInputs:
            frame = frame_of(state, role) if special else ((), ())
            listed = encoded(state, texts, param, *cut.needed())
            made = [
                shaped(config, framed(ids, *frame, cut, where(param, k, len(listed)))) for k, ids in enumerate(listed)
            ]
            return PooledInputs(made, pool_starts=counted_from(state, prompt, frame, cut, made, param))

        return await in_pool_if(large, state, encode)
    lists = inputs
    large = sum(map(len, lists)) > 4096
    return await in_pool_if(
        large,
        state,
        lambda: PooledInputs(
            [shaped(config, checked(state, ids, cut, where(param, k, len(lists)))) for k, ids in enumerate(lists)]
        ),
    )


def frame_of(state: AppState, role: str) -> Frame:
    """The tokens around a text: the tokenizer's, with the role's marker after the first of them; or the model's own."""
    config = pooling_of(state)
    if config.page:
        return (), tuple(state.tokenizer.encode(config.endings.get(role, "")))
    before, after = state.frames.single
    marker = config.markers.get(role)
    return (before if marker is None else (*before[:1], marker, *before[1:])), after


def where(param: str, at: int, count: int) -> str:
    """The path of an input, for errors."""
    return param if count == 1 else f"{param}[{at}]"


def encoded(
    state: AppState, texts: list[str], param: str, most: int | None = None, side: Side = "right"
) -> list[list[int]]:
    """Token ids of texts, without those around them; `most`, `side`: as in `checked_text` (pool)."""
    if pooling_of(state).lower_case:
        texts = [text.lower() for text in texts]
    found: list[list[int]] = []
    for start in range(0, len(texts), SLICE):
        part = texts[start : start + SLICE]
        found += state.tokenizer.encode_batch(
            [checked_text(state, text, where(param, at, len(texts)), most, side) for at, text in enumerate(part, start)]
        )
    return found


def checked_text(state: AppState, text: str, name: str, most: int | None = None, side: Side = "right") -> str:
    """The text, if it can be tokenized (pool). Raises 400 for a text that is too long for any tokenizer, or has invalid
    characters.

    If only `most` of its tokens are needed and `side` may be cut off, a text may have any length: a part with enough
    tokens is returned.
    """
    room = state.renderer.config.prompt_bytes
    if most is None:
        if 4 * len(text) > room and len(text.encode("utf-8", "surrogatepass")) > room:
            raise too_long(state.engine.max_model_len, max(len(text) // 16, state.engine.max_model_len + 1), name)
    elif len(text) > room:
        text = _part_of(state, text, name, most + SPARE, side)
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError:
        raise invalid(name, f"{name}: contains half of a surrogate pair, which is no character") from None
    return text


def _part_of(state: AppState, text: str, name: str, most: int, side: Side) -> str:
    """The beginning or the end of a text that has `most` tokens. White space may take many of its characters."""
    for size in (state.renderer.config.prompt_bytes, WIDER * state.renderer.config.prompt_bytes):
        part = text[:size] if side == "right" else text[-size:]
        if len(state.tokenizer.encode(part)) >= most or len(part) == len(text):
            return part
    raise invalid(
        name,
        f"{name}: {len(part)} characters of it make fewer than {most} tokens; leave out white space",
        "context_length_exceeded",
    )


def framed(ids: list[int], before: tuple[int, ...], after: tuple[int, ...], cut: Cut, name: str) -> np.ndarray:
    """A text's ids with the tokens around them, truncated if requested."""
    room = cut.most - len(before) - len(after)
    if len(ids) > room:
        if cut.asked is None:
            raise too_long(cut.limit, len(ids) + len(before) + len(after), name)
        if room < 1:
            raise no_room(cut, len(before) + len(after), name)
        ids = ids[:room] if cut.side == "right" else ids[len(ids) - room :]
    found = id_array([*before, *ids, *after])
    if not len(found):
        raise ApiError(400, "empty_prompt", f"{name}: has no tokens; send at least one", name)
    return found


def shaped(config: PoolingConfig, ids: np.ndarray) -> np.ndarray:
    """A text as an encoder of texts was trained to read it: cut after the end-of-text token, or padded."""
    if config.end_token is not None and len(ends := np.flatnonzero(ids == config.end_token)):
        return ids[: ends[0] + 1]
    missing = config.text_len - len(ids)
    return np.pad(ids, (0, missing), constant_values=config.pad_token) if missing > 0 else ids


def counted_from(
    state: AppState, prompt: str, frame: Frame, cut: Cut, inputs: list[np.ndarray], param: str
) -> np.ndarray | None:
    """int32 [inputs]: the first token that is pooled, if the model leaves prompts out of the pooling (pool).

    As in sentence-transformers, tokens before a text are left out with the prompt, and tokens after it are pooled.
    """
    if pooling_of(state).pools_prompt:
        return None
    before, after = frame
    count = len(before) + len(encoded(state, [prompt], param)[0]) + max(len(after) - 1, 0) if prompt else 0
    if count and cut.asked is not None and cut.side == "left":
        text = "truncation_side: left would cut the prompt, which this model leaves out of the vector; send right"
        raise invalid("truncation_side", text)
    for at, ids in enumerate(inputs):
        if len(ids) <= count:
            name = where(param, at, len(inputs))
            raise ApiError(
                400,
                "empty_prompt",
                f"{name}: has no tokens behind the prompt {quoted(prompt)}, which this "
                f"model leaves out; send a text, or cut it to more than {count} tokens",
                name,
            )
    return np.full(len(inputs), count, np.int32)


def checked(state: AppState, ids: list[int], cut: Cut, name: str) -> np.ndarray:
    """Check the token ids of a client."""
    width = state.engine.limits.num_embeddings
    if not ids:
        raise ApiError(400, "empty_prompt", f"{name}: has no tokens; send at least one", name)
    if len(ids) > cut.most:
        if cut.asked is None:
            raise too_long(cut.limit, len(ids), name)
        if not cut.most:
            raise no_room(cut, 0, name)
        ids = ids[: cut.most] if cut.side == "right" else ids[len(ids) - cut.most :]
    low, high = min(ids), max(ids)
    if low < 0 or high >= width:
        bad = low if low < 0 else high
        text = f"{name}: token id {bad} is out of range; ids are 0 to {width - 1}"
        raise invalid(name, text, "token_id_out_of_range")
    return id_array(ids)


def too_long(limit: int, got: int, name: str) -> ApiError:
    """An input is too long. Clients match on the beginning of this text."""
    return ApiError(
        400,
        "context_length_exceeded",
        f"This model's maximum context length is {limit} tokens. However, your prompt contains {got} input tokens "
        f"({name}). Please shorten it, or send truncate_prompt_tokens: -1.",
        name,
    )


def no_room(cut: Cut, got: int, name: str, what: str = AROUND_TEXT) -> ApiError:
    """The part that is never truncated takes `got` tokens and leaves no room for a text; with media it does not fit."""
    takes, least = f"{what} ({name}) takes {got} tokens and is never cut", got + (what != WITH_MEDIA)
    if cut.most < cut.limit:
        text = f"truncate_prompt_tokens: got {cut.asked}; {takes}, so send at least {least}"
        return invalid("truncate_prompt_tokens", text)
    return ApiError(
        400,
        "context_length_exceeded",
        f"This model's maximum context length is {cut.limit} tokens. However, {takes}. Please shorten it.",
        name,
    )


def refuse_fields_of_messages(body: InputFields, without: str) -> None:
    """Refuse fields about a conversation's prompt by name. `without`: why the request has no such prompt."""
    for name in OF_MESSAGES:
        if getattr(body, name):
            raise invalid(name, f"{name}: {without}; leave the field out")
