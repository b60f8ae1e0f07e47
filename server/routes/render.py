"""/v1/chat/completions/render and /v1/completions/render: the request as token ids, without generating.

Owner: loop. In: the bodies of /v1/chat/completions and /v1/completions, checked by the same functions. Out: the body
for /inference/v1/generate.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.http.body import read_json
from server.http.exchange import exchange_of
from server.http.watch import client_present, preparing
from server.jobs.job import Job
from server.jobs.sampling import Asked
from server.render.widened import features_of
from server.routes import chat as chat_route
from server.routes import chat_fields
from server.routes import completion as completion_route
from server.routes.endpoint import check_model, generating_route, json_response, response_id
from server.schema.chat import ChatBody
from server.schema.common import SamplingFields
from server.schema.completion import CompletionBody

# Fields of a request that are no sampling parameters, or that rendering has already applied.
NOT_SAMPLING = {
    "model", "stream", "stream_options", "request_id", "priority", "cache_salt", "add_special_tokens",
    "truncate_prompt_tokens", "truncation_side",
}  # fmt: skip


async def chat(request: Request) -> Response:
    exchange = exchange_of(request)
    state = exchange.state
    body = await read_json(request, ChatBody, state.config.limits.max_request_bytes)
    model = check_model(state, body.model)
    asked, tools = chat_fields.check(state, body)
    name = response_id("chatcmpl-", body.request_id, exchange)
    async with client_present(request):
        with exchange.hold(1, "texts"):
            job = await chat_route.prepare_chat(exchange, body, asked, tools)
    return json_response(rendered(name, model, job, body, asked))


async def completion(request: Request) -> Response:
    exchange = exchange_of(request)
    state = exchange.state
    body = await read_json(request, CompletionBody, state.config.limits.max_text_request_bytes)
    model = check_model(state, body.model)
    prompts = completion_route.prompts_of(state, body)
    asked = completion_route.check(state, body, len(prompts))
    name = response_id("cmpl-", body.request_id, exchange)
    async with client_present(request):
        with exchange.hold(1, "texts"):
            async with preparing(exchange):
                jobs = await completion_route.render(exchange, body, prompts, asked)
    return json_response([rendered(name, model, job, body, asked) for job in jobs])


def rendered(name: str, model: str, job: Job, body: SamplingFields, asked: Asked) -> dict[str, Any]:
    """One prompt of a request as a body for /inference/v1/generate."""
    return {
        "request_id": name,
        "token_ids": job.request.prompt_token_ids.tolist(),
        "model": model,
        "sampling_params": sampling_of(job, body, asked),
        "features": features_of(job.request.media),
        "stream": asked.stream,
        "cache_salt": body.cache_salt,
        "priority": job.request.priority,
    }


def sampling_of(job: Job, body: SamplingFields, asked: Asked) -> dict[str, Any]:
    """The sampling fields that were sent, and the values of the defaults."""
    known = {field.name for field in msgspec.structs.fields(SamplingFields)} - NOT_SAMPLING
    sent = {name: msgspec.to_builtins(getattr(body, name)) for name in sorted(known)}
    params = job.request.sampling
    decided = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    return {
        **{name: value for name, value in sent.items() if value is not None},
        **{name: getattr(params, name) for name in decided},
        "n": asked.n,
        "max_tokens": params.max_tokens,
        **({} if params.logprobs is None else {"logprobs": params.logprobs}),
        **({} if params.prompt_logprobs is None else {"prompt_logprobs": params.prompt_logprobs}),
    }


ROUTES = [generating_route("/v1/chat/completions/render", chat), generating_route("/v1/completions/render", completion)]
