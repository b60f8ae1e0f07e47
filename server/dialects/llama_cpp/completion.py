"""/completion and /completions: llama.cpp's bodies over the steps of /v1/completions.

Owner: loop. In: LlamaCompletionBody. Out: one object, a list of objects for a list of prompts, or events.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from server.answers.answer import SLICE
from server.dialects.llama_cpp.answering import Asking, answer, checked
from server.dialects.llama_cpp.media import Marked, marked_of, with_placeholders
from server.dialects.llama_cpp.schema import LlamaCompletionBody
from server.dialects.names import item_paths
from server.errors import invalid
from server.http.body import read_json
from server.http.exchange import Exchange, exchange_of
from server.http.watch import preparing
from server.jobs.job import Job, prepare
from server.render.prompt import Prompt, context_error
from server.routes.endpoint import generating_route
from server.state import AppState

Pieces = list[str | int]  # a prompt: texts and token ids


async def completion(request: Request) -> Response | None:
    exchange = exchange_of(request)
    state = exchange.state
    body = await read_json(request, LlamaCompletionBody, state.config.limits.max_request_bytes, any_type=True)
    prompts = prompts_of(state, body.prompt)
    asking = await checked(request, body, len(prompts))

    async def jobs() -> list[Job]:
        async with preparing(exchange, "prompts"):
            made = []
            for at, pieces in enumerate(prompts):
                if at % SLICE == SLICE - 1:  # let other tasks of the loop run
                    await asyncio.sleep(0)
                param = "prompt" if len(prompts) == 1 else f"prompt[{at}]"
                made.append(await job_from(exchange, pieces, asking, param))
            return made

    return await answer(request, asking, jobs, len(prompts), as_list=is_list(body.prompt))


def is_list(prompt: Any) -> bool:
    """Whether the client sent a list of prompts: a list with an id is one prompt."""
    return isinstance(prompt, list) and not any(type(entry) is int for entry in prompt)


def prompts_of(state: AppState, prompt: Any) -> list[Pieces | Marked]:
    """The prompts, checked."""
    most = min(state.config.limits.max_prompts, state.config.limits.max_choices)
    if not is_list(prompt):
        return [pieces_of(prompt, "prompt")]
    if not 0 < len(prompt) <= most:
        raise invalid("prompt", f"prompt: got {len(prompt)} prompts; 1 to {most} are allowed")
    return [pieces_of(entry, f"prompt[{at}]") for at, entry in enumerate(prompt)]


def pieces_of(given: Any, path: str) -> Pieces | Marked:
    """The pieces of one prompt."""
    if isinstance(given, dict):
        if given.get("multimodal_data"):
            return marked_of(given, path)
        given, path = given.get("prompt_string"), f"{path}.prompt_string"
    pieces = [given] if isinstance(given, str) else given
    if not isinstance(pieces, list) or any(type(piece) not in (str, int) for piece in pieces):
        raise invalid(path, f"{path}: must be a text, a list of texts and token ids, or an object with prompt_string")
    return pieces


async def job_from(exchange: Exchange, given: Pieces | Marked, asking: Asking, param: str) -> Job:
    """The Job of a prompt, with its media."""
    renderer = exchange.state.renderer
    if not isinstance(given, Marked):
        prompt = await prompt_from(exchange.state, given, param)
        return await prepare(exchange, prompt, asking.asked, priority=asking.priority, param=param)
    text, parts, paths = with_placeholders(given, renderer.media)
    with item_paths(paths):
        prompt = await renderer.with_media(text, parts, param=f"{given.path}.prompt_string")
        return await prepare(exchange, prompt, asking.asked, priority=asking.priority, param=param)


async def prompt_from(state: AppState, pieces: Pieces, param: str) -> Prompt:
    """The prompt of its pieces; the tokenizer's special tokens are added around a text in front only."""
    renderer = state.renderer
    if len(pieces) == 1 and isinstance(pieces[0], str):
        return await renderer.completion(pieces[0], param=param)
    if len(pieces) > state.engine.max_model_len:
        raise context_error(state.engine.max_model_len, len(pieces), param)
    ids: list[int] = []
    for at, piece in enumerate(pieces):
        if at % SLICE == SLICE - 1:
            await asyncio.sleep(0)
        if isinstance(piece, int):
            ids.append(piece)
        else:
            ids += (await renderer.completion(piece, at == 0, param=param)).token_ids.tolist()
    return await renderer.completion(ids, param=param)


ROUTES = [generating_route("/completion", completion), generating_route("/completions", completion)]
