"""Renderer: turns messages and tools, or a bare prompt, into a Prompt.

Owner: the loop calls it; templates and long texts run in the given pool, so nothing here blocks the loop. In: plain
JSON data from a request. Out: a Prompt (token ids, MediaRefs, places of their placeholders), or RenderError.

    loop:  chat() ──┐                                   ┌──> Prompt
    pool:           └ read messages, template, tokenize ┘
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from engine.base.errors import ConfigError
from mm.item import MediaRef
from server.render.call_ids import IdForm
from server.render.errors import RenderError, invalid
from server.render.escape import Escapes
from server.render.fim import NO_TOKENS, FillIn
from server.render.media import MediaTokens
from server.render.messages import MessageReader, MessageRules
from server.render.open_end import cut_at, open_last
from server.render.prompt import PIECE, Prompt, Side, context_error, encoded_size, id_array, no_embedding, truncate
from server.render.row_marks import RowMarks
from server.render.sizes import json_size, text_size
from server.render.template import ChatTemplate, ContentFormat, TemplateLimits
from server.render.template_choice import check_defaults, choose, missing
from server.render.template_facts import TemplateFacts
from server.render.tokenizer import Tokenizer

T = TypeVar("T")

# A tokenizer's own chat format takes parts, or one string, and null content of an assistant that only called tools.
FORMAT_FACTS = TemplateFacts("openai", asks_for_string=True, asks_for_none=True, knows_developer=False)


@dataclass(frozen=True, slots=True)
class RenderConfig:
    """Settings of the operator and the model for prompts."""

    max_model_len: int
    num_embeddings: int = 0  # rows of the embedding, above all prompt ids; 0: the tokenizer's size
    media_token_ids: Mapping[str, int] = field(default_factory=dict)  # modality -> placeholder id
    placeholders: Mapping[str, str] = field(default_factory=dict)  # modality -> text, if a processor defines it
    chat_template: str | None = None  # name, file or text, in place of the checkpoint's
    content_format: str = "auto"  # auto, string, openai
    default_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    trust_request_chat_template: bool = False
    escape_special_tokens: bool = False  # in clients' texts of conversations
    max_prompt_bytes: int = 0  # 0: 16 per token of the context
    tokenize_offload_bytes: int = 2048
    template_timeout: float = 5.0
    template_max_output_bytes: int = 0  # 0: max_prompt_bytes
    template_max_kwargs: int = 32
    template_max_kwargs_bytes: int = 16384
    max_media_items: int = 64
    limit_mm_per_prompt: Mapping[str, int] = field(default_factory=dict)
    takes_media_rows: bool = False  # --enable-mm-embeds
    max_messages: int = 2048
    max_parts: int = 1024
    max_tools: int = 512

    @property
    def prompt_bytes(self) -> int:
        return self.max_prompt_bytes or 16 * self.max_model_len


class Renderer:
    """Makes prompts for one model."""

    def __init__(self, tokenizer: Tokenizer, config: RenderConfig, pool: Executor) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self._max_len = config.max_model_len
        self.media = MediaTokens.of(tokenizer, config.media_token_ids, config.placeholders)
        self._pool = pool
        self._is_oversized = 0 < config.num_embeddings < tokenizer.vocab_size
        self._limits = TemplateLimits(
            config.template_timeout,
            config.template_max_output_bytes or config.prompt_bytes,
            config.template_max_kwargs,
            config.template_max_kwargs_bytes,
        )
        self._format = tokenizer.chat_format
        if self._format is not None and config.chat_template:
            raise ConfigError(
                "--chat-template: this checkpoint's tokenizer has a chat format of its own, without templates; "
                "leave the flag out, or use --tokenizer-mode hf with a folder that has tokenizer.json"
            )
        check_defaults(config.default_template_kwargs, tokenizer)
        self.fill_in = FillIn.of(tokenizer)  # None: the tokenizer has no tokens for filling in the middle
        self.templates = choose(tokenizer, config.chat_template, config.content_format)

    @property
    def template(self) -> ChatTemplate | None:
        """The template for conversations without tools."""
        return self.templates.get("default")

    def counting(self) -> Renderer:
        """A renderer for prompts that are only counted: they may be longer than the context."""
        other = copy(self)
        other._max_len = 2**31 - 1
        return other

    async def chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        add_special_tokens: bool = False,
        truncate_prompt_tokens: int | None = None,
        truncation_side: Side = "left",
        marks: RowMarks | None = None,
    ) -> Prompt:
        """The prompt of a conversation; `marks`: marks in it that stand for rows."""
        self.tokenizer.require_texts("messages")
        if continue_final_message and add_generation_prompt:
            raise invalid(
                "continue_final_message leaves the last message open, so add_generation_prompt must be false.",
                "continue_final_message",
            )
        if isinstance(tools, list) and len(tools) > self.config.max_tools:
            raise invalid(f"tools: got {len(tools)}; at most {self.config.max_tools} are allowed.", "tools")

        def work() -> Prompt:
            if self._format is not None and chat_template is None:
                if marks is not None:
                    raise invalid("prompt_embeds: this checkpoint's chat format takes none", "messages")
                ids, media = self._formatted(messages, tools, documents, continue_final_message, template_kwargs)
                cut = truncate(ids, truncate_prompt_tokens, truncation_side, self._max_len)
                return self._prompt(cut, media, self.tokenizer.decode(cut), "messages")
            escapes = Escapes(self.tokenizer.special_spellings) if self.config.escape_special_tokens else None
            text, media = self._render(
                messages,
                tools,
                documents,
                add_generation_prompt,
                continue_final_message,
                template_kwargs,
                chat_template,
                escapes,
            )
            segments = None if escapes is None else escapes.segments(text)
            if marks is not None:
                ids, rows = marks.tokenized(self.tokenizer, segments or [(text, False)], add_special_tokens)
                return replace(self._prompt(ids, media, marks.plain(text), "messages"), rows=rows)
            return self._tokenized(
                text, media, add_special_tokens, truncate_prompt_tokens, truncation_side, "messages", segments
            )

        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def completion(
        self,
        prompt: str | list[int],
        add_special_tokens: bool = True,
        *,
        truncate_prompt_tokens: int | None = None,
        truncation_side: Side = "left",
        param: str = "prompt",
    ) -> Prompt:
        """The prompt of a bare text or of token ids."""
        if isinstance(prompt, str):
            self.tokenizer.require_texts(param)

        def work() -> Prompt:
            if isinstance(prompt, str):
                self.media.refuse_in_text(prompt, param)
                return self._tokenized(prompt, [], add_special_tokens, truncate_prompt_tokens, truncation_side, param)
            ids = truncate(self._checked_ids(prompt, param), truncate_prompt_tokens, truncation_side, self._max_len)
            return self._prompt(ids, [], None, param)

        if isinstance(prompt, list) and truncate_prompt_tokens is None and len(prompt) > self._max_len:
            raise context_error(self._max_len, len(prompt), param)
        size = len(prompt) * (4 if isinstance(prompt, list) else 1)
        if size <= self.config.tokenize_offload_bytes:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def with_media(
        self,
        prompt: str | list[int],
        parts: list[dict[str, Any]],
        add_special_tokens: bool = True,
        param: str = "prompt",
    ) -> Prompt:
        """The prompt of a bare text or of token ids with a placeholder for each part, in the order of the parts.

        Errors about a part name messages[0].content[NUMBER].
        """
        if isinstance(prompt, str):
            self.tokenizer.require_texts(param)

        def work() -> Prompt:
            _, media = self._read([{"role": "user", "content": parts}], self._rules("openai", FORMAT_FACTS), None)
            if isinstance(prompt, str):
                return self._tokenized(self.media.spaced(prompt), media, add_special_tokens, None, "left", param)
            return self._prompt(self._checked_ids(prompt, param), media, None, param)

        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def filled(self, before: str, after: str, add_special_tokens: bool = True) -> Prompt:
        """The prompt of a gap between `prompt` and `suffix`; its text is the one before the gap."""
        fill_in = self.fill_in
        if fill_in is None:
            raise RenderError(501, "not_implemented", f"suffix: {NO_TOKENS}; leave the field out", "suffix")

        def work() -> Prompt:
            self._check_size(encoded_size(before, "prompt"), "prompt")
            self._check_size(encoded_size(after, "suffix"), "suffix")
            return self._prompt(id_array(fill_in.encode(before, after, add_special_tokens)), [], before, "prompt")

        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def embedded(self, messages: list[dict[str, Any]]) -> list[MediaRef]:
        """The media of a short conversation if the request embeds all of them, otherwise none."""
        return MessageReader(self._rules("openai", FORMAT_FACTS)).embedded(messages)

    def from_ids(self, ids: list[int], media: list[MediaRef], param: str) -> Prompt:
        """The prompt of token ids that hold one placeholder per item."""
        return self._prompt(self._checked_ids(ids, param), media, None, param)

    # -- in the pool

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        documents: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: Mapping[str, Any] | None,
        chat_template: str | None,
        escapes: Escapes | None,
    ) -> tuple[str, list[MediaRef]]:
        template = self._template_for(tools) if chat_template is None else self._own_template(chat_template)
        rules = self._rules(template.content_format, template.facts, lambda: template.id_form)
        conversation, media = self._read(messages, rules, escapes)
        conversation = template.taken(conversation)
        for value, name in ((tools, "tools"), (documents, "documents"), (template_kwargs, "chat_template_kwargs")):
            if value:
                self.media.refuse_in_value(value, name)
        tag = open_last(conversation) if continue_final_message else ""
        if escapes is not None:
            tools, documents, template_kwargs = map(escapes.value, (tools, documents, template_kwargs))
        kwargs = {**self.config.default_template_kwargs, **(template_kwargs or {})}
        text = template.render(
            conversation,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            kwargs=kwargs,
            limits=self._limits,
        )
        text = cut_at(text, tag) if tag else text
        return (self.media.spaced(text) if media else text), media

    def _formatted(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        documents: list[dict[str, Any]] | None,
        continue_final_message: bool,
        template_kwargs: Mapping[str, Any] | None,
    ) -> tuple[np.ndarray, list[MediaRef]]:
        """Ids from the tokenizer's own chat format, in which a client's text cannot become control tokens."""
        assert self._format is not None
        conversation, media = self._read(messages, self._rules("openai", FORMAT_FACTS), None)
        self._check_size(json_size(tools, "tools"), "tools")
        json_size(conversation, "messages")
        ids = self._format.encode(
            conversation,
            tools=tools,
            documents=documents,
            continue_final_message=continue_final_message,
            kwargs={**self.config.default_template_kwargs, **(template_kwargs or {})},
        )
        return id_array(ids), media

    def _read(
        self, messages: list[dict[str, Any]], rules: MessageRules, escapes: Escapes | None
    ) -> tuple[list[dict[str, Any]], list[MediaRef]]:
        reader = MessageReader(rules, escapes)
        conversation = reader.read(messages)
        self._check_size(text_size(conversation), "messages")  # in an error that clients match on
        return conversation, reader.media

    def _tokenized(
        self,
        text: str,
        media: list[MediaRef],
        add_special_tokens: bool,
        limit: int | None,
        side: Side,
        param: str,
        segments: list[tuple[str, bool]] | None = None,
    ) -> Prompt:
        if segments is not None:
            text = "".join(piece for piece, _ in segments)
        try:
            size = len(text) if text.isascii() else len(text.encode())
        except UnicodeEncodeError as error:
            raise invalid(f"{param} contains half of a surrogate pair, which is no character.", param) from error
        self._check_size(size, param)
        if segments is None:
            listed = self.tokenizer.encode(text, add_special_tokens)
        else:
            listed = self.tokenizer.encode_segments(segments, add_special_tokens)
        ids = id_array(listed)
        if limit is not None and len(cut := truncate(ids, limit, side, self._max_len)) < len(ids):
            ids, text = cut, self.tokenizer.decode(cut)
        return self._prompt(ids, media, text, param)

    def _check_size(self, size: int, param: str) -> None:
        """Refuse a text that is too long for the context under any tokenizer."""
        if size > self.config.prompt_bytes:
            most = self.config.max_model_len
            raise context_error(most, max(-(-size // 16), most + 1), param, f" (estimated from {size} bytes)")

    def _prompt(self, ids: np.ndarray, media: list[MediaRef], text: str | None, param: str) -> Prompt:
        slots = self.media.slots(ids, media, param)
        if len(ids) > self._max_len:
            raise context_error(self._max_len, len(ids), param)
        if self._is_oversized and int(ids.max(initial=0)) >= self.config.num_embeddings:
            token = int(ids.max())
            raise no_embedding(token, self.tokenizer.token_of(token), self.config.num_embeddings, param)
        return Prompt(ids, tuple(media), slots, text)

    def _checked_ids(self, ids: list[int], param: str) -> np.ndarray:
        limit = self.config.num_embeddings or self.tokenizer.vocab_size
        if len(ids) > self.config.prompt_bytes:
            raise context_error(self._max_len, len(ids), param)
        pieces = (ids[start : start + PIECE] for start in range(0, len(ids), PIECE))  # GIL: see id_array
        if all(set(map(type, piece)) == {int} for piece in pieces):
            with contextlib.suppress(OverflowError):
                found = id_array(ids)
                if found.view(np.uint32).max(initial=0) < limit:  # a negative id becomes a large unsigned number
                    return found
        index = next(at for at, token in enumerate(ids) if type(token) is not int or not 0 <= token < limit)
        raise RenderError(
            400,
            "token_id_out_of_range",
            f"{param}[{index}] is not a token id of this model; ids are integers from 0 to {limit - 1}.",
            f"{param}[{index}]",
        )

    # -- parts

    def _rules(
        self, content_format: ContentFormat, facts: TemplateFacts, form: Callable[[], IdForm] = lambda: "any"
    ) -> MessageRules:
        config = self.config
        return MessageRules(
            content_format,
            facts,
            self.media,
            config.max_media_items,
            config.limit_mm_per_prompt,
            config.max_messages,
            config.max_parts,
            config.takes_media_rows,
            form,
        )

    def _own_template(self, chat_template: str) -> ChatTemplate:
        """Compile the request's own template."""
        if not self.config.trust_request_chat_template:
            raise RenderError(
                403,
                "override_not_trusted",
                "A chat_template in the request is refused; the operator can allow it: --trust-request-chat-template.",
                "chat_template",
            )
        return ChatTemplate(chat_template, self.tokenizer.special_tokens, self.config.content_format)

    def _template_for(self, tools: list[dict[str, Any]] | None) -> ChatTemplate:
        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        template = self.templates.get(name)
        if template is None:
            raise missing(self.templates)
        return template
