"""Loading: what is on the hub first; then engine, text and media side by side, as long as the longest of them takes.

Owner: loop; the work is on the device thread and in the pool. In: AppState in phase starting. Out: the same, complete.

    device thread | torch, config, weights, warm-up ................ | ready
    pool          | tokenizer | grammars' vocabulary |      template, media |
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from engine.base.errors import ConfigError
from server.flags.config import ChatConfig, Config
from server.http.websocket import import_sockets
from server.jobs.sampling import check_defaults, defaults_from
from server.ops.expert_watch import ExpertWatch
from server.ops.metrics import exposition
from server.ops.planted import into_decoders
from server.output.parser import Parsers
from server.output.parser_choice import check_names, choose_parsers
from server.render.frames import Frames
from server.render.vocabulary import Vocabulary
from server.start.gguf import as_folder, is_gguf
from server.start.joined import is_split, join
from server.state import AppState

if TYPE_CHECKING:
    from engine.grammar.compile import GrammarCompiler
    from engine.weights.files import Shard
    from mm.load import MediaLoader
    from server.render.chat import Renderer
    from server.render.tokenizer import Tokenizer
    from server.render.whisper_tokens import WhisperTokens
    from server.start.hub import Hub

T = TypeVar("T")
MORE_IDS = 128  # that a tokenizer may have beyond the model's logits, for structured output
log = logging.getLogger("omniloop")

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def is_hub_name(name: str) -> bool:
    """Whether a --model or --tokenizer is looked up on the hub; a folder of that name comes first."""
    return HUB_NAME.fullmatch(name) is not None and not Path(name).exists()


async def fetch(state: AppState) -> None:
    """Brings a model and a tokenizer that are named ORG/NAME, or a GGUF file, into folders. Raises ConfigError.

    Flags that name parsers and a template are looked at first: a model may take long to come.
    """
    chat = state.config.chat
    await in_pool(state, "template file", lambda: check_chat(chat)) if chat.chat_template else check_chat(chat)
    if not is_hub_name(state.folder) and not is_gguf(state.folder):
        check_folder(state.folder)
    named = is_hub_name(state.folder) or is_hub_name(state.tokenizer_source)
    if named or is_gguf(state.folder) or is_split(state.folder):
        begun = time.perf_counter()
        state.fetching = state.pool.submit(fetched, state.config, state.stop_fetching)
        state.folder, state.tokenizer_source = await asyncio.wrap_future(state.fetching)
        state.startup["fetch"] = time.perf_counter() - begun
    else:
        refuse_revision(state.config.model.revision, state.folder)


def refuse_revision(revision: str, folder: str) -> None:
    """A folder is what it is."""
    if revision:
        raise ConfigError(f"--revision {revision}: {folder} is a folder, which has one revision; leave the flag out")


def fetched(config: Config, stopped: threading.Event) -> tuple[str, str]:
    """Folders of model and tokenizer, when both are here."""
    hub = hub_of(config, stopped)
    model = whole(config, hub)
    return model, tokenizer_folder(config, model, hub)


def tokenizer_folder(config: Config, model: str, hub: Hub) -> str:
    """The model's folder, or what --tokenizer names."""
    named = config.model.tokenizer
    return located(config, named, replace(hub, revision="", flag="--tokenizer"), weights=False) if named else model


def whole(config: Config, hub: Hub) -> str:
    """The folder of the model, joined of its parts where these lie in several repositories."""
    weights = config.model.load_format != "dummy"
    folder = located(config, config.folder, hub, weights)
    if not is_split(folder):
        return folder

    from engine.weights.files import open_checkpoint
    from server.start.hub import fetch

    def part(name: str, wanted: bool) -> tuple[Path, list[Shard]]:
        if is_hub_name(name):
            found = fetch(name, replace(hub, revision="", flag="text_model_id, audio_model_id:"), wanted)
        else:
            check_folder(name)
            found = Path(name)
        return found, open_checkpoint(found) if wanted else []

    own = open_checkpoint(folder) if weights else []
    return str(join(Path(folder), own, part, config.model.download_dir, weights)[0])


def located(config: Config, name: str, hub: Hub, weights: bool) -> str:
    """The folder of a model or a tokenizer; `weights`: fetched from the hub too, if the configuration can be served."""
    if not is_hub_name(name):
        refuse_revision(hub.revision, name)
        return as_folder(name, tokenizer=not config.model.tokenizer) if is_gguf(name) else name
    from engine.models.registry import load_model_config
    from server.start.hub import fetch

    def check(folder: Path) -> None:
        if is_split(folder):  # looked at when it has been joined
            return
        model, flags = config.model, config.pooling
        load_model_config(
            folder, model.hf_overrides, config.without_media, model.model_impl, flags.runner, flags.pooler_config
        )

    return str(fetch(name, hub, weights, check if weights else None))


def hub_of(config: Config, stopped: threading.Event | None = None) -> Hub:
    """How the operator wants the hub to be asked."""
    from server.start.hub import Hub

    model = config.model
    return Hub(model.revision, model.download_dir, model.hf_token, stopped=stopped or threading.Event())


async def load(state: AppState) -> None:
    """Raises ConfigError when the model cannot be served."""
    begun = time.perf_counter()
    text = asyncio.ensure_future(load_text(state))
    try:
        await state.engine.start()
        state.startup["engine"] = time.perf_counter() - begun
        await text
    finally:
        text.cancel()
    if state.config.model.skip_tokenizer_init:
        state.tokenizer = no_tokenizer(state)
    if state.engine.limits.pools and not state.config.model.skip_tokenizer_init:
        state.frames = await in_pool(state, "frames", lambda: Frames.of(state.tokenizer))
    state.media = await in_pool(state, "media", lambda: make_loader(state))
    state.renderer = await in_pool(state, "template", lambda: make_renderer(state))
    state.parsers = await in_pool(state, "parsers", lambda: make_parsers(state))
    state.whisper = await in_pool(state, "speech", lambda: whisper_tokens(state))
    complete(state)
    await in_pool(state, "metrics", lambda: exposition(state.metrics))  # the first scrape would import on the loop


async def load_text(state: AppState) -> None:
    """The tokenizer, and what grammars know of it; nothing with --skip-tokenizer-init."""
    model = state.config.model
    if model.skip_tokenizer_init:
        return
    state.tokenizer = await in_pool(state, "tokenizer", lambda: tokenizer_of(state))
    if model.structured_outputs_backend != "none":
        state.grammars = await in_pool(state, "grammars", lambda: make_grammars(state))


def check_folder(folder: str) -> None:
    """The model folder is there."""
    if Path(folder).is_file():
        raise ConfigError(f"--model {folder}: is a file; name the folder that holds config.json, or a file NAME.gguf")
    if not Path(folder).is_dir():
        raise ConfigError(f"--model {folder}: there is no such folder; a model on the hub is named ORG/NAME")


async def in_pool(state: AppState, name: str, work: Callable[[], T]) -> T:
    begun = time.perf_counter()
    value = await asyncio.get_running_loop().run_in_executor(state.pool, work)
    state.startup[name] = time.perf_counter() - begun
    return value


def complete(state: AppState) -> None:
    """What follows from model and engine."""
    config, engine = state.config, state.engine
    generation = engine.model.generation if config.model.generation_config == "auto" else {}
    state.defaults = defaults_from(generation, config.model.override_generation_config)
    tell_defaults(state.defaults)
    tell_vocabularies(state.tokenizer.vocab_size, engine.model.text.vocab_size)
    tokenizer, width = state.tokenizer, engine.model.text.vocab_size
    ends = (*engine.model.eos_token_ids, *(token for token in tokenizer.ends if token < width))
    state.vocabulary = Vocabulary(width, tuple(dict.fromkeys(ends)), tokenizer.encode, tokenizer.require_texts)
    if tokenizer.vocab_size > engine.model.text.vocab_size + MORE_IDS:
        log.warning("structured output is off: the tokenizer has many more ids than the model has logits")
        state.grammars = None
    if not engine.limits.pools:
        check_defaults(state.defaults, config, state.vocabulary)
    state.places.size(engine.limits.max_open, engine.limits.max_rows, config.pool_threads)
    metrics = state.metrics
    metrics.model_name = state.names[0]
    metrics.resize(engine.max_model_len)
    metrics.engine = lambda: engine.stats
    metrics.cache_info = {
        "block_size": str(engine.block_size),
        "num_gpu_blocks": str(engine.num_blocks),
        "cache_dtype": config.cache.kv_cache_dtype,
        "num_gpu_blocks_override": str(config.cache.num_gpu_blocks_override or None),
        "kv_cache_memory_bytes": str(config.cache.kv_cache_memory_bytes or None),
        "max_model_len": str(engine.max_model_len),
        "enable_prefix_caching": str(config.cache.enable_prefix_caching),
        "gpu_memory_utilization": str(config.cache.gpu_memory_utilization),
    }
    engine.on_step = metrics.step
    if engine.model.text.routings:
        experts = state.experts = ExpertWatch(engine)
        metrics.experts = lambda: experts.layers
    if state.media is not None:
        if engine.config.faults is not None:
            into_decoders(state.media, engine.config.faults)
        if "audio" in engine.model.modalities:
            state.pool.submit(import_sockets)  # while nobody waits for them
        cache = state.media.cache
        metrics.mm_cache = lambda: (cache.queries, cache.hits)
        if config.media.media_isolation != "none":
            metrics.helpers = state.media.helpers.counts


def tell_defaults(defaults: Mapping[str, Any]) -> None:
    """One line: a checkpoint's own defaults change what clients get that ask for nothing."""
    if defaults:
        told = ", ".join(f"{name}={value}" for name, value in defaults.items())
        log.info("sampling defaults of the checkpoint and --override-generation-config: %s; "
                 "--generation-config vllm ignores the checkpoint's", told)  # fmt: skip


def tell_vocabularies(tokens: int, rows: int) -> None:
    """One line where texts may hold tokens that the model does not have; prompts with them are refused one by one."""
    if tokens > rows:
        log.warning("the tokenizer has ids up to %d and the model has %d tokens: prompts with other ids are "
                    "refused; --tokenizer selects another tokenizer", tokens - 1, rows)  # fmt: skip


def tokenizer_of(state: AppState) -> Tokenizer:
    from server.render.load_tokenizer import load_tokenizer

    return load_tokenizer(state.tokenizer_source, state.config.model.tokenizer_mode)


def no_tokenizer(state: AppState) -> Tokenizer:
    """Stands in a tokenizer's place: as many tokens as the model has, none with a text."""
    from server.render.no_tokenizer import NoTokenizer

    return NoTokenizer(state.engine.model.text.vocab_size)


def make_grammars(state: AppState) -> GrammarCompiler | None:
    """None where the grammar library reads other bytes than answers are written with."""
    from engine.grammar.compile import GrammarCompiler
    from engine.grammar.vocabulary import GrammarVocabulary

    tokenizer, limits = state.tokenizer, state.config.limits
    try:
        # No text of an answer's is spelled with added tokens, but for white space: Gemma and GPT-NeoX add runs of that.
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
    """Flags that name parsers and a template. Raises ConfigError."""
    check_names(chat.tool_call_parser, chat.reasoning_parser, plugins_of(chat))
    if chat.chat_template:
        from server.render.template_choice import check_given

        check_given(chat.chat_template)


def make_renderer(state: AppState) -> Renderer:
    from server.render.chat import RenderConfig, Renderer

    config, engine = state.config, state.engine
    reads = state.media.processor if state.media is not None else None
    ids = dict(engine.model.media_token_ids)
    pooling = engine.model.pooling
    alone = pooling is not None and pooling.two_towers  # pictures stand in no prompt (server/pooling/pictures)
    if reads is not None and not alone:  # some name their tokens in the tokenizer's files alone
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
    """The operator's files of parsers."""
    return [path for path in (chat.tool_parser_plugin, chat.reasoning_parser_plugin) if path]


def make_parsers(state: AppState) -> Parsers:
    """The parsers of answers, and one line that names them."""
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
    """The markers of a Whisper; None for any other model, and without a tokenizer."""
    model = state.engine.model
    if not model.lead or state.config.model.skip_tokenizer_init:
        return None
    from server.render.whisper_tokens import WhisperTokens
    from server.speech.languages import LANGUAGES

    try:
        return WhisperTokens.of(state.tokenizer, model.folder, model.raw, LANGUAGES)
    except ValueError as error:
        raise ConfigError(f"--model {model.folder}: {error}") from None


def make_loader(state: AppState) -> MediaLoader | None:
    """None for a model that takes text only."""
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
    heard = {"audio", "video"} <= set(model.modalities)  # a film's own sound track
    chat = state.config.chat
    standing = {"use_audio_in_video": heard, "background": colour(chat.image_background)}
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
