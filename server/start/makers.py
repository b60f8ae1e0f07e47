"""Make the objects that a start makes once from model and flags: tokenizer, grammars, renderer, parsers, media loader.

Owner: loop; each object is made in the pool (load.py says when). In: AppState, complete up to that point. Out: the
object, or None if the model has no use for it. Modules that a text-only server never needs are imported in functions.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from engine.base.errors import ConfigError
from server.flags.config import ChatConfig
from server.output.parser import Parsers
from server.output.parser_choice import check_names, choose_parsers
from server.state import AppState

if TYPE_CHECKING:
    from engine.grammar.compile import GrammarCompiler
    from mm.load import MediaLoader
    from server.render.chat import Renderer
    from server.render.tokenizer import Tokenizer
    from server.render.whisper_tokens import WhisperTokens

log = logging.getLogger("omniloop")


def tokenizer_of(state: AppState) -> Tokenizer:
    """The tokenizer of --tokenizer, or of the model's folder."""
    from server.render.load_tokenizer import load_tokenizer

    return load_tokenizer(state.download.tokenizer, state.config.model.tokenizer_mode)


def fills_gaps(folder: str, mode: str) -> bool:
    """Whether the tokenizer in a folder has tokens for filling in the middle. Raises ConfigError if there is none."""
    from server.render.fim import FillIn
    from server.render.load_tokenizer import load_tokenizer

    return FillIn.of(load_tokenizer(folder, mode)) is not None


def no_tokenizer(state: AppState) -> Tokenizer:
    """A placeholder for a tokenizer: it has as many tokens as the model, none of which has a text."""
    from server.render.no_tokenizer import NoTokenizer

    return NoTokenizer(state.engine.model.text.vocab_size)


def make_grammars(state: AppState) -> GrammarCompiler | None:
    """The compiler of grammars; None if the grammar library reads tokens as other bytes than answers contain."""
    from engine.grammar.compile import GrammarCompiler
    from engine.grammar.vocabulary import GrammarVocabulary

    tokenizer, limits = state.tokenizer, state.config.limits
    try:
        # Answers spell no text with added tokens except white space: Gemma and GPT-NeoX add tokens for runs of it.
        markers = {number for number in tokenizer.added_tokens.values() if tokenizer.token_bytes(number).strip()}
        vocabulary = GrammarVocabulary(
            tokenizer.token_bytes,
            markers.__contains__,
            tokenizer.vocab_size,
            lambda text: tokenizer.encode_segments([(text, True)]),
            limits.grammar_memory_bytes,
        )
    except ValueError as error:
        log.warning("structured output is off for this model: %s", error)
        return None
    return GrammarCompiler(
        vocabulary, state.pool, limits.grammar_timeout, limits.grammar_cache_bytes, limits.grammar_max_bytes
    )


def check_chat(chat: ChatConfig) -> None:
    """Check the flags that name parsers and a template. Raises ConfigError."""
    check_names(chat.tool_call_parser, chat.reasoning_parser, plugins_of(chat))
    if chat.chat_template:
        from server.render.template_choice import check_given

        check_given(chat.chat_template)


def make_renderer(state: AppState) -> Renderer:
    """The renderer of prompts, with the media that the model reads and the operator's limits."""
    from server.render.chat import RenderConfig, Renderer

    config, engine = state.config, state.engine
    reads = state.media.processor if state.media is not None else None
    ids = dict(engine.model.media_token_ids)
    pooling = engine.model.pooling
    alone = pooling is not None and pooling.two_towers  # its prompts contain no pictures (server/pooling/pictures)
    if reads is not None and not alone:  # some models name their media tokens only in the tokenizer's files
        ids.update({name: reads.placeholder(name) for name in reads.modalities & {*engine.model.modalities}})
    settings = RenderConfig(
        max_model_len=engine.max_model_len,
        num_embeddings=engine.model.text.vocab_size,
        media_token_ids=ids,
        chat_template=config.chat.chat_template or None,
        content_format=config.chat.chat_template_content_format,
        default_template_kwargs=config.chat.default_chat_template_kwargs,
        trust_request_chat_template=config.chat.trust_request_chat_template,
        escape_special_tokens=config.chat.escape_special_tokens,
        max_prompt_bytes=config.limits.max_prompt_bytes,
        tokenize_offload_bytes=config.limits.tokenize_offload_bytes,
        template_timeout=config.limits.template_timeout,
        template_max_output_bytes=config.limits.template_max_output_bytes,
        template_max_kwargs=config.limits.template_max_kwargs,
        template_max_kwargs_bytes=config.limits.template_max_kwargs_bytes,
        max_media_items=config.media.media_max_items,
        limit_mm_per_prompt=config.media.limit_mm_per_prompt,
        takes_media_rows=config.rows.enable_mm_embeds,
        max_messages=config.limits.max_messages,
        max_parts=config.limits.max_content_parts,
        max_tools=config.limits.max_tools,
    )
    return Renderer(state.tokenizer, settings, state.pool)


def plugins_of(chat: ChatConfig) -> list[str]:
    """The operator's files with parsers."""
    return [path for path in (chat.tool_parser_plugin, chat.reasoning_parser_plugin) if path]


def make_parsers(state: AppState) -> Parsers:
    """Choose the parsers of answers, and log their names."""
    chat, tokenizer = state.config.chat, state.tokenizer
    parsers = choose_parsers(
        tokenizer,
        [template.source for template in state.renderer.templates.values()],
        str(state.engine.model.raw.get("model_type", "")),
        tools=chat.tool_call_parser,
        reasoning=chat.reasoning_parser,
        plugins=plugins_of(chat),
    )
    log.info("parsers of answers: tool calls %s, reasoning %s", parsers.tools_name, parsers.reasoning_name)
    return parsers


def whisper_tokens(state: AppState) -> WhisperTokens | None:
    """The marker tokens of a Whisper model; None for any other model, or without a tokenizer."""
    model = state.engine.model
    if not model.encoder_prefix or state.config.model.skip_tokenizer_init:
        return None
    from server.render.whisper_tokens import WhisperTokens
    from server.speech.languages import LANGUAGES

    try:
        return WhisperTokens.of(state.tokenizer, model.folder, model.raw, LANGUAGES)
    except ValueError as error:
        raise ConfigError(f"--model {model.folder}: {error}") from None


def make_loader(state: AppState) -> MediaLoader | None:
    """The loader of media; None for a model that takes text only."""
    if len(state.engine.model.modalities) < 2:
        return None
    from mm.load import MediaLoader
    from mm.processors.base import no_texts
    from mm.processors.registry import processor_for
    from server.jobs.media_options import colour, merged

    model = state.engine.model
    tokenizer = state.tokenizer

    def encode(text: str) -> list[int]:
        single = tokenizer.id_of(text)
        return tokenizer.encode(text) if single is None else [single]

    texts = no_texts if state.config.model.skip_tokenizer_init else encode
    try:
        processor = processor_for(model.processor, model.folder, model.raw, state.engine.limits.picture_bytes, texts)
    except ValueError as error:
        raise ConfigError(f"--model {model.folder}: {error}") from None
    with_sound = {"audio", "video"} <= set(model.modalities)  # whether a video's own sound track is used
    chat = state.config.chat
    standing = {"use_audio_in_video": with_sound, "background": colour(chat.image_background)}
    options = merged(chat.mm_processor_kwargs, chat.media_io_kwargs, **standing)
    limits = state.engine.limits
    return MediaLoader(
        state.config.media,
        processor,
        state.pool,
        options=options,
        row_widths=limits.row_widths,
        most_rows=limits.encoder_capacity,
    )
