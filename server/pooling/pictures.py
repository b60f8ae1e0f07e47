"""Pictures as inputs of a model of two towers: an input is one text or one picture (API.md section 13).

Owner: loop; media are fetched and decoded in the pool. In: one message, or sides of pairs, with content parts. Out: the
inputs of the request; a picture's input is one placeholder, which its row overwrites.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mm.item import MediaRef
from mm.splice import splice
from server.errors import invalid
from server.http.exchange import Exchange
from server.job import media_preload, note_media
from server.pooling.conversations import Parts
from server.pooling.tokens import Cut, PooledInputs, tokenized
from server.render.chat import FORMAT_FACTS
from server.render.media import MediaTokens
from server.render.messages import MessageReader, MessageRules
from server.state import AppState

TOKENS = MediaTokens({"image": 0}, {}, {"image": ""})  # no text can spell a picture here
NONE = MediaTokens({}, {}, {})


async def text_or_picture(exchange: Exchange, messages: list[dict[str, Any]], cut: Cut, salt: str) -> PooledInputs:
    """The one input of a conversation."""
    state = exchange.state
    if len(messages) != 1:
        text = f"messages: got {len(messages)}; this model reads one message, with one text or one picture"
        raise invalid("messages", text)
    reader = reader_of(state)
    (message,) = reader.read(messages)
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    texts = [str(part["text"]) for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    pictures = reader.media
    if len(pictures) + len(texts) != 1:
        raise invalid(
            "messages[0].content",
            f"messages[0].content: got {len(texts)} texts and {len(pictures)} pictures; this model makes a vector of "
            "one text or of one picture, so send each as a request of its own",
        )
    if texts:
        return await tokenized(state, [texts[0]], cut, special=True, param="messages[0].content")
    return await loaded(exchange, PooledInputs([np.zeros(1, np.int32)]), {0: pictures[0]}, salt)


async def shown(exchange: Exchange, inputs: PooledInputs, parts: Mapping[int, Parts], salt: str) -> PooledInputs:
    """The inputs with these pictures in the place of their texts."""
    most = exchange.state.config.media.media_max_items
    if len(parts) > most:
        raise invalid("documents", f"documents: the pairs hold {len(parts)} pictures; at most {most} are allowed")
    refs = {}
    for at, (given, param) in parts.items():
        if len(given) != 1:
            text = f"{param}: got {len(given)} parts; this model compares one text or one picture each"
            raise invalid(param, text)
        reader = reader_of(exchange.state)
        reader.parts(given, param)
        refs[at] = replace(reader.media[0], param=param)
    return await loaded(exchange, inputs, refs, salt)


async def loaded(exchange: Exchange, inputs: PooledInputs, refs: Mapping[int, MediaRef], salt: str) -> PooledInputs:
    """Each item's placeholder in the place of its input, and the item ready for its tower."""
    state = exchange.state
    assert state.media is not None, "a reader of messages refuses pictures where there is no tower"
    async with media_preload(exchange, salt) as ahead:
        processed = await ahead.load(list(refs.values()))
    processor, ids = state.media.processor, list(inputs.ids)
    assert processor is not None, "the model has a tower"
    placeholder = np.array([processor.placeholder("image")], np.int32)
    for at in refs:
        ids[at] = placeholder
    starts = np.cumsum([0, *map(len, ids)])
    media = []
    for at, item in zip(refs, processed):
        (one,) = splice(placeholder, (0,), [item], processor).media
        media.append(replace(one, spans=((int(starts[at]), 1),)))
    note_media(exchange, ahead.report)
    return PooledInputs(ids, media=tuple(media))


def reader_of(state: AppState) -> MessageReader:
    """Of one message or one item; a server without a tower refuses pictures by name."""
    config = state.renderer.config
    media = NONE if state.media is None else TOKENS
    return MessageReader(MessageRules(
        "openai", FORMAT_FACTS, media, config.max_media_items, config.limit_mm_per_prompt, config.max_messages,
        config.max_parts,
    ))  # fmt: skip
