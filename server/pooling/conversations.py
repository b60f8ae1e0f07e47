"""Inputs as conversations of the checkpoint's chat template: for embedders that were trained on messages, for rerankers
that read a query and a document as two roles, and for all models that read pictures.

Owner: loop for media, pool for the rest. In: contents, each a text or the parts of a message. Out: token ids; with
media also the places of their rows and the positions. A text is truncated on request; content with media never is.

    message    system: the checkpoint's prompt; user: the content
    chat       system: the instruction; query: the content; document: the content
    qwen3_vl   system and user as in the training of Qwen3-VL-Reranker, hidden from clients
    jina_vl    plain text (server/pooling/written)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from engine.base.model_config import PoolingConfig
from mm.item import MediaRef, Processed
from mm.splice import Spliced, splice
from server.errors import ApiError
from server.http.exchange import Exchange
from server.jobs.job import media_preload, note_media
from server.pooling.tokens import (
    AROUND_PAIR,
    AROUND_TEXT,
    WITH_MEDIA,
    Cut,
    PooledInputs,
    checked_text,
    no_room,
    too_long,
)
from server.render.messages import MessageReader, MessageRules
from server.render.preambles import with_preambles
from server.render.prompt import Prompt, id_array
from server.render.template_facts import TemplateFacts
from server.state import AppState

JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided."
    ' Note that the answer can only be "yes" or "no".'
)
VL_INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."
PROBES = ("omniloop asks", "omniloop answers")
PARTS = TemplateFacts("openai", asks_for_string=False, asks_for_none=True, knows_developer=False)
Content = list[dict[str, Any]]  # parts in the form that templates read
Parts = tuple[list[Any], str]  # parts as a client sent them, and their path in the body
Turns = Callable[[Sequence[Content]], list[tuple[str, Content]]]  # contents -> (role, content) of each message


@dataclass(frozen=True, slots=True)
class Seen:
    """The content of an item, and its media ready for the encoders."""

    content: Content
    media: list[MediaRef] = field(default_factory=list)
    processed: list[Processed] = field(default_factory=list)


def text_part(text: str) -> Content:
    return [{"type": "text", "text": text}]


def message(system: str) -> Turns:
    """A function that makes the messages for one content."""
    before = [("system", text_part(system))] if system else []
    return lambda contents: [*before, ("user", contents[0])]


def pair(config: PoolingConfig, instruction: str | None) -> Turns:
    """A function that makes the messages for a query and a document."""
    if config.template == "qwen3_vl":
        task = text_part(f"<Instruct>: {instruction or VL_INSTRUCTION}")
        return lambda contents: [
            ("system", text_part(JUDGE)),
            ("user", [*task, *text_part("<Query>:"), *contents[0], *text_part("\n<Document>:"), *contents[1]]),
        ]
    asked = instruction or config.prompts.get(config.default_prompt or "", "")
    before = [("system", text_part(asked))] if asked else []
    return lambda contents: [*before, ("query", contents[0]), ("document", contents[1])]


class Conversations:
    """Turns the contents of one request into token ids."""

    ending: tuple[int, ...] = ()  # tokens after a conversation

    def __init__(self, state: AppState, turns: Turns, contents: int, opens: bool) -> None:
        """`contents`: per conversation; `opens`: the prompt of an answer follows. Raises 501 if the template drops some
        of them."""
        self._state, self._turns, self._opens = state, turns, opens
        template = state.renderer.template
        probes = PROBES[:contents]
        for as_parts in (False, True):
            if template is None:
                break
            self._as_parts = as_parts
            try:
                rendered = self.rendered([text_part(probe) for probe in probes])
            except ApiError:
                continue
            if all(probe in rendered for probe in probes):
                return
        roles = "`query` and `document`" if contents == 2 else "`user`"
        raise ApiError(
            501,
            "not_implemented",
            f"the checkpoint's chat template drops messages of the roles {roles}; use another one with --chat-template",
        )

    def rendered(self, contents: Sequence[Content]) -> str:
        """The text of a conversation. Contents are plain texts if the template reads texts, or reads both
        texts and parts.
        """
        template = self._state.renderer.template
        assert template is not None
        messages = []
        for role, content in self._turns(contents):
            flat = all(part["type"] == "text" for part in content) or template.content_format == "string"
            messages.append({"role": role, "content": content if self._as_parts or not flat else self.plain(content)})
        return template.render(messages, add_generation_prompt=self._opens)

    def plain(self, content: Content) -> str:
        """A content as text, with placeholders for its media."""
        written = self._state.renderer.media.placeholders
        return "".join(part["text"] if part["type"] == "text" else written[part["type"]] for part in content)

    def in_order_of_template(self, items: Sequence[Seen]) -> Sequence[Seen]:
        """A conversation's contents in the order in which the template writes them."""
        return items

    def ids(self, texts: Sequence[str], cut: Cut, most: int | None, name: str, rest: str) -> np.ndarray:
        """Token ids of texts (pool). The last text may be truncated, to `most` tokens if given. Errors name the last
        text `name` and the others `rest`."""
        tokenizer = self._state.tokenizer
        *before, text = texts
        text = checked_text(self._state, text, name, *cut.needed(most))
        before = [checked_text(self._state, one, rest, cut.limit) for one in before]  # longer ones are refused below
        for one, path in ((text, name), *((one, rest) for one in before)):
            self._state.renderer.media.refuse_in_text(one, path)
        if most is not None and len(own := tokenizer.encode(text)) > most:
            text = tokenizer.decode(own[:most])

        def made(text: str) -> list[int]:
            return [*tokenizer.encode(self.rendered([text_part(one) for one in (*before, text)])), *self.ending]

        ids = made(text)
        if len(ids) > cut.most:
            if (least := len(made(""))) >= cut.most:
                raise no_room(cut, least, rest, AROUND_PAIR if before else AROUND_TEXT)
            if cut.asked is None:
                raise too_long(cut.limit, len(ids), name)
            own = tokenizer.encode(text)
        while len(ids) > cut.most:  # the text's tokens may merge with those around it, so count again
            over = len(ids) - cut.most
            own = own[: max(0, len(own) - over)] if cut.side == "right" else own[over:]
            ids = made(tokenizer.decode(own))
        return id_array(ids)

    def spliced(self, items: Sequence[Seen], cut: Cut, name: str) -> Spliced:
        """The spliced prompt of contents with media (pool)."""
        state = self._state
        assert state.media is not None, "a reader of messages refuses media where there is no tower"
        text = state.renderer.media.spaced(self.rendered([item.content for item in items]))
        ids = id_array([*state.tokenizer.encode(text), *self.ending])
        items = self.in_order_of_template(items)
        media = [ref for item in items for ref in item.media]
        processed = [one for item in items for one in item.processed]
        prompt = Prompt(ids, tuple(media), state.renderer.media.slots(ids, media, name), text)
        if any(preambles := [one.preamble for one in processed]):
            prompt = with_preambles(prompt, preambles, state.tokenizer)
        made = splice(prompt.token_ids, prompt.slots, processed, state.media.processor)
        if len(made.prompt_token_ids) > cut.most:
            raise no_room(cut, len(made.prompt_token_ids), name, WITH_MEDIA)
        return made


async def seen(exchange: Exchange, parts: Mapping[int, Parts], salt: str) -> dict[int, Seen]:
    """Each item's content, with its media fetched, decoded and processed."""
    renderer = exchange.state.renderer
    config = renderer.config
    reader = MessageReader(
        MessageRules(
            "openai",
            PARTS,
            renderer.media,
            config.max_media_items,
            config.limit_mm_per_prompt,
            config.max_messages,
            config.max_parts,
        )
    )
    read: dict[int, tuple[Content, slice]] = {}
    for at, (given, path) in parts.items():
        first = len(reader.media)
        content = reader.parts(given, path)
        read[at] = content, slice(first, len(reader.media))
    async with media_preload(exchange, salt) as preload:
        processed = await preload.load(reader.media)
    note_media(exchange, preload.report)
    return {at: Seen(content, reader.media[own], processed[own]) for at, (content, own) in read.items()}


def messages_of(
    state: AppState,
    config: PoolingConfig,
    found: Mapping[int, Seen],
    parts: Mapping[int, Parts],
    prompts: Mapping[int, str],
    cut: Cut,
) -> dict[int, Spliced]:
    """Each item as a user's message, after the prompt if the model was trained so (pool)."""
    opens = config.template_opens_answer or not config.messages
    made = {}
    for at, one in found.items():
        turns = message(prompts[at] if config.messages else "")
        made[at] = Conversations(state, turns, 1, opens).spliced([one], cut, parts[at][1])
    return made


def replaced(inputs: PooledInputs, made: Mapping[int, Spliced]) -> PooledInputs:
    """The inputs, with those in `made` in place of their originals."""
    ids = [made[at].prompt_token_ids if at in made else one for at, one in enumerate(inputs.ids)]
    starts = np.cumsum([0, *map(len, ids)])
    media = []
    for at, one in made.items():
        for item in one.media:
            spans = tuple((int(starts[at]) + first, length) for first, length in item.spans)
            media.append(replace(item, spans=spans))
    counted = inputs.pool_starts
    if counted is not None:
        counted = np.where([at in made for at in range(len(ids))], 0, counted).astype(np.int32)
    axes = next((len(one.positions) for one in made.values() if one.positions is not None), 0)
    positions = None
    if axes:
        positions = np.concatenate([_positions(made.get(at), len(one), axes) for at, one in enumerate(ids)], 1)
    return PooledInputs(ids, inputs.seconds, counted, tuple(media), positions)


def _positions(made: Spliced | None, length: int, axes: int) -> np.ndarray:
    """Positions of an input, int32 [axes, length]."""
    if made is not None and made.positions is not None:
        return made.positions
    return np.broadcast_to(np.arange(length, dtype=np.int32), (axes, length))
