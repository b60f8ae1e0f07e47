"""/infill: the text in a gap, for editors.

Owner: loop; the prompt is made in the pool. In: LlamaInfillBody. Out: one object, or events. A prompt that is too long
is shortened, as editors expect: other files first, then the text that is farthest from the gap.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from server.dialects.llama_cpp.answering import answer, checked
from server.dialects.llama_cpp.schema import LlamaInfillBody
from server.errors import not_here
from server.http.body import read_json
from server.http.exchange import exchange_of
from server.http.watch import preparing
from server.jobs.job import Job, prepare
from server.jobs.sampling import in_range, with_ends
from server.output.line_limit import LineLimitedStream
from server.render.fim import NO_TOKENS, File, FillIn
from server.render.prompt import encoded_size
from server.routes.endpoint import generating_route
from server.state import AppState

ANSWER = 256  # tokens of the context that the prompt leaves free where n_predict is absent


async def infill(request: Request) -> Response | None:
    exchange = exchange_of(request)
    state = exchange.state
    body = await read_json(request, LlamaInfillBody, state.config.limits.max_request_bytes, any_type=True)
    fill_in = state.renderer.fill_in
    if fill_in is None:
        raise not_here(None, f"{NO_TOKENS}; send prompts to /completion")
    asking = await checked(request, body)
    asked = with_ends(asking.asked, fill_in.ends, state.vocabulary)
    if body.t_max_predict_ms:
        in_range("t_max_predict_ms", body.t_max_predict_ms, 0, 2**31 - 1)
        asked = replace(asked, choice=partial(LineLimitedStream, seconds=body.t_max_predict_ms / 1000))

    async def jobs() -> list[Job]:
        async with preparing(exchange):
            ids = await asyncio.get_running_loop().run_in_executor(state.pool, ids_of, state, fill_in, body)
            prompt = await state.renderer.completion(ids, param="input_prefix")
            param = "input_prefix"
            return [await prepare(exchange, prompt, asked, priority=asking.priority, param=param)]

    return await answer(request, replace(asking, asked=asked), jobs)


def ids_of(state: AppState, fill_in: FillIn, body: LlamaInfillBody) -> list[int]:
    """The prompt, short enough for the context (pool). Texts are cut before they are tokenized, too."""
    most = state.renderer.config.prompt_bytes
    fields = {"input_prefix": body.input_prefix, "input_suffix": body.input_suffix, "prompt": body.prompt or ""}
    for name, text in fields.items():
        encoded_size(text, name)
    files: list[File] = []
    left = most
    for at, file in reversed(list(enumerate(body.input_extra or ()))):
        left -= encoded_size(file.filename, f"input_extra[{at}].filename")
        left -= encoded_size(file.text, f"input_extra[{at}].text")
        if left < 0:
            break
        files.append(File(file.filename, file.text))
    length = state.engine.max_model_len
    reserved = ANSWER if body.n_predict is None or body.n_predict < 0 else max(body.n_predict, 1)
    room = length - min(reserved, length // 2)
    before, after = body.input_prefix[-most:], body.input_suffix[:most]
    return fill_in.around(before, after, (body.prompt or "")[:most], files[::-1], room)


ROUTES = [generating_route("/infill", infill)]
