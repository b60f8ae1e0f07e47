"""Prompts and parameters of a caller, in vLLM's words, as the jobs of one request.

Owner: loop. In: texts, token ids, media and messages. Out: what `answer_with` takes: the checked parameters and the
jobs. Errors name `prompt`, `messages` or the parameter.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy as np

from engine.base.request import Modality
from mm.item import MediaRef
from server.errors import from_validation, invalid, quoted
from server.http.exchange import Exchange
from server.http.watch import preparing
from server.jobs.job import Job, media_preload, prepare
from server.jobs.sampling import Asked, priority_of, resolve, salt_of
from server.render.prompt import Prompt, id_array
from server.routes.endpoint import side_of
from server.schema.common import SamplingFields
from server.state import AppState

OF_HTTP = ("model", "stream", "stream_options", "stream_interval", "request_id", "return_token_ids")
Messages = Sequence[Mapping[str, Any]]
Given = str | Sequence[int] | Mapping[str, Any]
KEYS = ("prompt", "prompt_token_ids", "multi_modal_data")


class SamplingParams(SamplingFields, kw_only=True):
    """The fields of /v1/completions that concern one answer. A field that is None has the default of the checkpoint
    or the operator, as over HTTP.
    """

    max_tokens: int | None = 16
    logprobs: int | None = None
    logit_bias: dict[int | str, float] | None = None  # type: ignore[assignment]  # Python's keys may be integers


def checked(params: SamplingParams) -> SamplingParams:
    """A copy whose fields have the right types. Raises ApiError."""
    for name in OF_HTTP:
        if getattr(params, name) is not None:
            raise invalid(name, f"{name}: has no meaning without HTTP; leave it out")
    values = {name: value for name in params.__struct_fields__ if (value := getattr(params, name)) is not None}
    if params.logit_bias is not None:
        values["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    try:
        return msgspec.convert({"max_tokens": None, **msgspec.to_builtins(values)}, SamplingParams)
    except msgspec.ValidationError as error:
        raise from_validation(error) from None


def asked_of(state: AppState, params: SamplingParams) -> Asked:
    """The checked parameters."""
    return resolve(params, params.logprobs, params.max_tokens, state.defaults, state.config, state.vocabulary)


async def plain_job(exchange: Exchange, given: Given, params: SamplingParams, asked: Asked) -> Job:
    """The job of a text, of token ids, or of a text with media."""
    state = exchange.state
    text: Any = given
    media: dict[str, list[MediaRef]] = {}
    if isinstance(given, Mapping):
        unknown = next((key for key in given if key not in KEYS), None)
        if unknown is not None:
            raise invalid("prompt", f"prompt: has an unknown key {quoted(unknown)}; known keys are {', '.join(KEYS)}")
        text = given.get("prompt_token_ids", given.get("prompt"))
        media = media_of(given.get("multi_modal_data") or {})
    if isinstance(text, str) and media:
        state.tokenizer.require_texts("prompt")
        text = state.tokenizer.encode(text, params.add_special_tokens is not False)
    if not isinstance(text, str | Sequence):
        raise invalid("prompt", f"prompt: must be a text, token ids, or an object with {' or '.join(KEYS[:2])}")
    async with preparing(exchange):
        if media:
            ids = list(text)
            prompt = state.renderer.from_ids(ids, in_order(state, ids, media), "prompt")
        else:
            prompt = await state.renderer.completion(
                text if isinstance(text, str) else list(text),
                params.add_special_tokens is not False,
                truncate_prompt_tokens=params.truncate_prompt_tokens,
                truncation_side=side_of(params.truncation_side),
            )
        return await job_of(exchange, prompt, params, asked, "prompt")


async def chat_job(
    exchange: Exchange, messages: Messages, params: SamplingParams, asked: Asked, options: Mapping[str, Any]
) -> Job:
    """The job of a conversation; `options`: arguments of the renderer."""
    listed = [dict(message) for message in messages]
    async with preparing(exchange), media_preload(exchange, salt_of(params)) as preload:
        await preload.begin(exchange.state.renderer.embedded(listed))
        prompt = await exchange.state.renderer.chat(
            listed,
            truncate_prompt_tokens=params.truncate_prompt_tokens,
            truncation_side="left" if params.truncation_side is None else side_of(params.truncation_side),
            add_special_tokens=bool(params.add_special_tokens),
            **options,
        )
        priority = priority_of(params, exchange.state.config)
        return await prepare(exchange, prompt, asked, salt=salt_of(params), priority=priority, preload=preload)


async def job_of(exchange: Exchange, prompt: Prompt, params: SamplingParams, asked: Asked, param: str) -> Job:
    priority = priority_of(params, exchange.state.config)
    return await prepare(exchange, prompt, asked, salt=salt_of(params), priority=priority, param=param)


def media_of(data: Mapping[str, Any]) -> dict[str, list[MediaRef]]:
    """The items by modality: one or a list of each; bytes of a file, a URL, a PIL image, or (samples, rate)."""
    found: dict[str, list[MediaRef]] = {}
    for modality, given in data.items():
        if modality not in ("image", "audio", "video"):
            raise invalid("prompt", f"multi_modal_data: got {quoted(modality)}; must be image, audio or video")
        kind, path = cast(Modality, modality), f"multi_modal_data.{modality}"
        items = given if isinstance(given, list) else [given]
        found[modality] = [MediaRef(kind, source_of(item, path)) for item in items]
    return found


def source_of(item: Any, path: str) -> str | bytes:
    """The bytes of a file with the item, or its URL."""
    if isinstance(item, str | bytes):
        return item
    if hasattr(item, "save"):  # a PIL image
        data = io.BytesIO()
        item.save(data, "PNG")
        return data.getvalue()
    if isinstance(item, tuple) and len(item) == 2:
        return wave(np.asarray(item[0], np.float32), int(item[1]))
    raise invalid("prompt", f"{path}: must be bytes of a file, a URL, a PIL image, or a pair of samples and their rate")


def wave(samples: np.ndarray, rate: int) -> bytes:
    """float32 [samples] -> a WAV file of one channel with 32-bit floats."""
    data = samples.astype("<f4").tobytes()
    form = struct.pack("<HHIIHH", 3, 1, rate, 4 * rate, 4, 32)
    chunks = b"fmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def in_order(state: AppState, ids: list[int], media: Mapping[str, list[MediaRef]]) -> list[MediaRef]:
    """The items in the order of their placeholders; items without a placeholder follow."""
    left = {modality: list(items) for modality, items in media.items()}
    modality_of = {token: modality for modality, token in state.renderer.media.ids.items()}
    array, found = id_array(ids), []
    for at in np.flatnonzero(np.isin(array, list(modality_of))):
        items = left.get(modality_of[int(array[at])])
        if items:
            found.append(items.pop(0))
    return found + [item for items in left.values() for item in items]
