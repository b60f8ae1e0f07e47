"""/generate: texts or token ids with media, several answers each, whole or as a stream of growing answers.

Owner: loop, the handler's task. In: SglangBody. Out: an object, a list of objects, or events. All prompts of a body
are one Answer; each has its own options.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from server.answers.answer import SLICE, Answer
from server.answers.respond import answer_with
from server.dialects.names import client_names, item_paths
from server.dialects.sglang.asking import NAMES, One, ones_of, whole_asked
from server.dialects.sglang.frames import SglangEvents
from server.dialects.sglang.prompts import Given, ids_of, parts_of, prompts_of
from server.dialects.sglang.schema import SglangBody
from server.errors import invalid
from server.http.body import read_json
from server.http.exchange import Exchange, exchange_of
from server.http.watch import preparing
from server.jobs.job import Job, prepare, with_grammar
from server.jobs.sampling import priority_of, salt_of
from server.routes.endpoint import gateway_priority, generating_route, served_model
from server.schema.common import SamplingFields


async def generate(request: Request) -> Response | None:
    exchange = exchange_of(request)
    state = exchange.state
    body = await read_json(request, SglangBody, state.config.limits.max_request_bytes, any_type=True)
    prompts, is_list = prompts_of(body, state.config.limits)
    with client_names({"model": "lora_path"} if body.lora_path else {}):
        await served_model(exchange, adapter_of(body))
    ones = ones_of(exchange, body, len(prompts))
    asked = whole_asked(ones)
    ids = ids_of(body.rid, len(prompts))
    outer = SamplingFields(priority=body.priority, cache_salt=body.cache_salt)
    salt, priority = salt_of(outer), priority_of(outer, state.config, gateway_priority(request))
    several = is_list or asked.n > 1

    async def jobs() -> list[Job]:
        async with preparing(exchange, "prompts"):
            made = []
            for at, (given, one) in enumerate(zip(prompts, ones)):
                if at % SLICE == SLICE - 1:  # let other tasks of the loop run
                    await asyncio.sleep(0)
                made.append(await job_of(exchange, given, one, salt, priority, asked.structure is None))
            return made

    def frames(answer: Answer) -> SglangEvents:
        return SglangEvents(answer, ones, names_of(exchange, ids, len(prompts), asked.n), texts, several)

    async def whole(answer: Answer) -> Response:
        data = await answer.in_pool_if_large(frames(answer).whole)
        return Response(data, media_type="application/json")

    texts = bool(body.return_text_in_logprobs)
    with client_names(NAMES | ones[0].names):
        return await answer_with(
            request,
            asked,
            jobs,
            frames,
            whole,
            name=ids[0] if ids else exchange.request_id,
            num_prompts=len(prompts),
            skip_special_tokens=ones[0].skips_special,
        )


def adapter_of(body: SglangBody) -> str | None:
    """The name that chooses the weights: the adapter's, or the model's."""
    if not isinstance(body.lora_path, list):
        return body.lora_path or body.model
    names = {name or "" for name in body.lora_path}
    if len(names) > 1:
        text = "lora_path: names several adapters; send prompts of each adapter as a request of their own"
        raise invalid("lora_path", text)
    return next(iter(names), "") or body.model


async def job_of(exchange: Exchange, given: Given, one: One, salt: str, priority: int, with_form: bool) -> Job:
    """One prompt with its media and, with `with_form`, its grammar."""
    renderer, param = exchange.state.renderer, given.param
    if given.has_media:
        parts, paths = parts_of(given, renderer.media)
        with item_paths(paths):
            prompt = await renderer.with_media(given.prompt, parts, param=param)
            job = await prepare(exchange, prompt, one.asked, salt=salt, priority=priority, param=param)
    else:
        prompt = await renderer.completion(given.prompt, param=param)
        job = await prepare(exchange, prompt, one.asked, salt=salt, priority=priority, param=param)
    if one.start >= job.num_tokens:
        text = f"logprob_start_len: got {one.start}; {param} has {job.num_tokens} tokens, so at most "
        raise invalid("logprob_start_len", f"{text}{job.num_tokens - 1}")
    if with_form and one.asked.structure is not None:
        with client_names(one.names):
            (job,) = await with_grammar(exchange, one.asked, [job], None)
    return job


def names_of(exchange: Exchange, ids: list[str] | None, count: int, n: int) -> list[str]:
    """The id of each choice: the client's, or the exchange's, with numbers where there are several."""
    base = ids or ([exchange.request_id] if count == 1 else [f"{exchange.request_id}-{at}" for at in range(count)])
    return base if n == 1 else [f"{name}-{number}" for name in base for number in range(n)]


ROUTES = [generating_route("/generate", generate)]
