"""Job: one prompt of a request in the form that the engine takes.

Owner: loop. In: a rendered Prompt and the checked parameters (Asked). Out: a Job with the engine's Request: media are
loaded and spliced into the prompt, lengths are checked, cache scope and priority are set. Every endpoint that calls the
engine makes its requests here, for any form of answer.

    Prompt -> media loaded -> placeholders expanded -> lengths checked -> Job
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from engine.base.errors import GrammarBusyError, GrammarError
from engine.base.grammar import GrammarSpec
from engine.base.request import IDLE, Flow, Modality, Request
from mm.item import MediaOptions
from mm.report import MediaReport
from mm.splice import Spliced, splice
from server.errors import ApiError, context_length, not_here
from server.http.exchange import Exchange
from server.jobs.media_preload import MediaPreload
from server.jobs.sampling import Asked
from server.jobs.turns import turn_starts
from server.output.parser import Parsing
from server.render.preambles import with_preambles
from server.render.prompt import Prompt
from server.state import AppState
from server.structure.structure import Structure
from server.structure.thinking import FREE, behind_thinking, in_harmony, with_budget

MAX_HEADER = 2048  # bytes of the header that lists replaced frames; the body of a chat completion lists all


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt, ready for the engine."""

    prompt: Prompt
    request: Request
    media_tokens: Mapping[Modality, int]  # prompt tokens per modality
    param: str  # the request's field with the prompt

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids)


async def prepare(
    exchange: Exchange,
    prompt: Prompt,
    asked: Asked,
    *,
    salt: str = "",
    priority: int = 0,
    param: str = "messages",
    preload: MediaPreload | None = None,
) -> Job:
    """Load the media, expand the placeholders and check the lengths of one prompt. Raises ApiError, RenderError,
    MediaError.
    """
    if prompt.media or prompt.rows:
        spliced = await with_media(exchange, prompt, preload or media_preload(exchange, salt))
    else:
        spliced = Spliced(prompt.token_ids)
    return job_of(exchange, prompt, spliced, asked, salt=salt, priority=priority, param=param)


def scope_of(exchange: Exchange, salt: str) -> bytes:
    """The scope of the caches that a request reads: its key's, narrowed by its salt."""
    if not exchange.key_name and not salt:
        return b""
    return hashlib.sha256(f"{exchange.key_name}\0{salt}".encode()).digest()


def media_preload(exchange: Exchange, salt: str, options: MediaOptions | None = None) -> MediaPreload:
    """The MediaPreload of a request; without a call of `begin`, `load` loads everything."""
    return MediaPreload(exchange.state.media, scope_of(exchange, salt), options)


def job_of(
    exchange: Exchange, prompt: Prompt, spliced: Spliced, asked: Asked, *, salt: str, priority: int, param: str
) -> Job:
    """The Job of a spliced prompt: checks the prompt's length and sets the answer's length."""
    state = exchange.state
    ids = spliced.prompt_token_ids
    if (state.engine.model.encoder_prefix or state.engine.model.adds_media) and not spliced.media:
        text = "this model only transcribes recordings; send them to /v1/audio/transcriptions"
        raise ApiError(400, "sound_required", text, param)
    if state.engine.model.adds_media and asked.beam:  # beams would continue after the end of the sound
        raise not_here(
            "use_beam_search",
            "use_beam_search: this model takes audio while it answers and has no beam search; leave the field out",
        )
    length, room = len(ids), state.engine.max_model_len - len(ids)
    if length == 0:
        raise ApiError(400, "empty_prompt", "the prompt has no tokens; send at least one", param)
    if room < 1 and asked.max_tokens != 0:
        raise context_length(state.engine.max_model_len, length, param)
    wanted = state.defaults.get("max_new_tokens", room) if asked.max_tokens is None else asked.max_tokens
    most = max(1, min(wanted, room))
    params, least = asked.params, min(asked.params.min_tokens, most)
    if prompt.rows and (params.repetition_penalty != 1.0 or params.dry_multiplier):
        # The checkpoint's defaults; the ids of rows mean nothing.
        params = replace(params, repetition_penalty=1.0, dry_multiplier=0.0)
    if params.max_tokens != most or params.min_tokens != least:
        params = replace(params, max_tokens=most, min_tokens=least)
    request = Request(
        prompt_token_ids=ids,
        sampling=params,
        media=spliced.media,
        positions=spliced.positions,
        position_delta=spliced.position_delta,
        n=asked.n,
        priority=IDLE if exchange.places.idle else priority,
        cache_salt=scope_of(exchange, salt),
        arrival=exchange.arrival,
        flow=Flow(exchange.client, state.keys.weight(exchange.key_name)),
        boundaries=turn_starts(ids, state.renderer.tokenizer.is_special),
        lora=exchange.adapter,
    )
    return Job(prompt, request, spliced.counts, param)


async def with_grammar(exchange: Exchange, asked: Asked, jobs: list[Job], parsing: Parsing | None) -> list[Job]:
    """The jobs with the grammar or thinking budget that the request asks for. Raises ApiError with the keyword or
    field.

    If the model writes reasoning first (`parsing`), the grammar applies after the reasoning.
    """
    state, budget = exchange.state, asked.thinking_budget
    structure = asked.structure or FREE
    if budget is not None and (parsing is None or not parsing.parsers.reads_any_reasoning):
        raise not_here(FREE.param, "thinking_token_budget: this model's reasoning is not known; see --reasoning-parser")
    if state.grammars is None:
        raise not_here(structure.param, f"{structure.param}: this server gives no structured output for this model")
    held = []
    for job in jobs:
        key, make = behind(state, structure, job.prompt, parsing)
        try:
            grammar = await state.grammars.get(key, make, structure.param, exchange.client)
        except GrammarBusyError as error:
            raise ApiError(429, error.reason, str(error), headers={"retry-after": str(error.retry_after)}) from None
        except GrammarError as error:
            raise ApiError(400, error.reason, f"{structure.param}: {error}", structure.param) from None
        given = grammar if budget is None else with_budget(grammar, budget)
        held.append(replace(job, request=replace(job.request, grammar=given)))
    if grammar.spec.relaxed:  # keywords of tools' schemas that the grammar does not enforce
        exchange.headers.append((b"x-structured-relaxed", ", ".join(grammar.spec.relaxed).encode()))
        state.metrics.relax(grammar.spec.relaxed)
    return held


def behind(
    state: AppState, structure: Structure, prompt: Prompt, parsing: Parsing | None
) -> tuple[bytes, Callable[[], GrammarSpec]]:
    """The structure's key and maker. If an answer begins with reasoning, its grammar begins after the reasoning."""
    if parsing is None:
        return structure.key, structure.make
    if parsing.parsers.harmony is not None:
        return structure.key + b"harmony", lambda: in_harmony(structure.make())
    form, (said, _) = parsing.parsers.written, parsing.reasoning_state(prompt)
    if form is None or said == "closed":
        return structure.key, structure.make
    ids = parsing.parsers.markers.ids
    key = structure.key + f"{parsing.parsers.reasoning_name} {said}".encode()
    return key, lambda: behind_thinking(structure.make(), form, said, ids)


def note_media(exchange: Exchange, report: MediaReport) -> None:
    """Report media times and counts to the log line and the metrics, and replaced frames to the client."""
    if not report.items:
        return
    exchange.state.metrics.media(report)
    exchange.details["media"] = report.items
    exchange.details["media_cached"] = report.cached
    for name in ("fetch", "decode", "prepare"):
        exchange.details[f"media_{name}_ms"] = round(getattr(report, f"{name}_s") * 1000, 1)
    if report.replaced:
        exchange.replaced_frames += report.replaced
        replaced = ";".join(f"{item}:" + ",".join(f"{k}={by}" for k, by in pairs) for item, pairs in report.replaced)
        exchange.headers.append((b"x-replaced-frames", replaced[:MAX_HEADER].encode()))


async def with_media(exchange: Exchange, prompt: Prompt, preload: MediaPreload) -> Spliced:
    """The prompt with its placeholders expanded to the loaded items."""
    if not prompt.media:
        rows = [(item.start, item.rows) for item in prompt.rows]
        return splice(prompt.token_ids, (), (), None, rows)
    state = exchange.state
    assert state.media is not None, "the renderer refuses media that the model does not take"
    processed = await preload.load(prompt.media)
    preambles = [item.preamble for item in processed]
    if any(preambles):
        loop = asyncio.get_running_loop()
        prompt = await loop.run_in_executor(state.pool, with_preambles, prompt, preambles, state.tokenizer)
    rows = [(item.start, item.rows) for item in prompt.rows]
    spliced = splice(prompt.token_ids, prompt.slots, processed, state.media.processor, rows)
    note_media(exchange, preload.report)
    return spliced
