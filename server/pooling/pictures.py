"""Pictures as inputs of a model that takes one text or one picture per input (API.md section 13).

Owner: loop; media are fetched and decoded in the pool. In: one message, or sides of pairs, with content parts. Out: the
inputs of the request. A picture's input is the model's text for pages, or, for models with two encoders, one
placeholder, which the picture's row overwrites.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from engine.base.model_config import PoolingConfig
from mm.item import MediaRef
from mm.splice import splice
from server.errors import invalid
from server.http.exchange import Exchange
from server.jobs.job import media_preload, note_media
from server.pooling.conversations import Parts, replaced
from server.pooling.tokens import WITH_MEDIA, Cut, PooledInputs, no_room, pooling_of, tokenized
from server.render.chat import FORMAT_FACTS
from server.render.media import MediaTokens
from server.render.messages import MessageReader, MessageRules
from server.state import AppState

TOKENS = MediaTokens({"image": 0}, {}, {"image": ""})  # no text can contain a picture's placeholder here
NONE = MediaTokens({}, {}, {})


async def text_or_picture(
    exchange: Exchange, messages: list[dict[str, Any]], cut: Cut, salt: str, before: str, prompt_name: str | None
) -> PooledInputs:
    """The one input of a conversation; `before` is the text of the prompt with this name, which precedes the text."""
    state, param = exchange.state, "messages[0].content"
    config = pooling_of(state)
    if len(messages) != 1:
        text = f"messages: got {len(messages)}; this model reads one message, with one text or one image"
        raise invalid("messages", text)
    reader = reader_of(state)
    (message,) = reader.read(messages)
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    texts = [str(part["text"]) for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    pictures = reader.media
    if len(pictures) + len(texts) != 1:
        raise invalid(
            param,
            f"{param}: got {len(texts)} texts and {len(pictures)} images; this model reads one text or one "
            "image, so send each as a request of its own",
        )
    if texts:
        role = prompt_name or config.default_prompt or ""
        return await tokenized(state, [texts[0]], cut, True, before, param, role)
    check_queries(config, {0: (messages[0]["content"], param)}, int(prompt_name == "query"))
    return await loaded(exchange, PooledInputs([np.zeros(1, np.int32)]), {0: pictures[0]}, cut, salt)


def check_queries(config: PoolingConfig, parts: Mapping[int, Parts], count: int) -> None:
    """Raise 400 for a picture among the first `count` items, which are queries, if the model reads pictures as
    pages.
    """
    first = min(parts, default=count)
    if config.page and first < count:
        param = parts[first][1]
        raise invalid(
            param,
            f"{param}: is an image; this model finds pages by a text, so send the query as a text and "
            "images as documents",
        )


async def with_pictures(
    exchange: Exchange, inputs: PooledInputs, parts: Mapping[int, Parts], cut: Cut, salt: str
) -> PooledInputs:
    """The inputs, with these pictures in place of their texts."""
    most = exchange.state.config.media.media_max_items
    if len(parts) > most:
        raise invalid("documents", f"documents: the pairs hold {len(parts)} images; at most {most} are allowed")
    refs = {}
    for at, (given, param) in parts.items():
        if len(given) != 1:
            text = f"{param}: got {len(given)} parts; this model compares one text or one image each"
            raise invalid(param, text)
        reader = reader_of(exchange.state)
        reader.parts(given, param)
        refs[at] = replace(reader.media[0], param=param)
    return await loaded(exchange, inputs, refs, cut, salt)


async def loaded(
    exchange: Exchange, inputs: PooledInputs, refs: Mapping[int, MediaRef], cut: Cut, salt: str
) -> PooledInputs:
    """The inputs, with each picture in place of its item and ready for its encoder."""
    state = exchange.state
    assert state.media is not None, "a reader of messages refuses pictures where there is no tower"
    async with media_preload(exchange, salt) as preload:
        processed = await preload.load(list(refs.values()))
    processor, page = state.media.processor, pooling_of(state).page
    assert processor is not None, "the model has a tower"
    placeholder = processor.placeholder("image")
    ids = np.array(state.tokenizer.encode(page) if page else [placeholder], np.int32)
    slots = np.flatnonzero(ids == placeholder).tolist()
    made = {at: splice(ids, slots, [item], processor) for at, item in zip(refs, processed)}
    for at, ref in refs.items():
        if len(made[at].prompt_token_ids) > cut.limit:
            raise no_room(Cut(cut.limit), len(made[at].prompt_token_ids), ref.param or "input", WITH_MEDIA)
    note_media(exchange, preload.report)
    return replaced(inputs, made)


def reader_of(state: AppState) -> MessageReader:
    """A reader of one message or item; a server without an encoder refuses pictures by name."""
    config = state.renderer.config
    media = NONE if state.media is None else TOKENS
    return MessageReader(
        MessageRules(
            "openai",
            FORMAT_FACTS,
            media,
            config.max_media_items,
            config.limit_mm_per_prompt,
            config.max_messages,
            config.max_parts,
        )
    )
