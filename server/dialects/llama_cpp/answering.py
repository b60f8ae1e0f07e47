"""The steps that /completion and /infill share: fields in our names, the answer in llama.cpp's form. Owner: loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from server.answers.answer import Answer
from server.answers.respond import Jobs, answer_with
from server.dialects.llama_cpp.frames import LlamaEvents, Wanted
from server.dialects.llama_cpp.sampling import NAMES, limit_of, sampling_of
from server.dialects.llama_cpp.schema import LlamaFields
from server.dialects.names import client_names
from server.http.exchange import exchange_of
from server.jobs.sampling import Asked, priority_of, resolve
from server.routes.endpoint import gateway_priority, served_model


@dataclass(frozen=True, slots=True)
class Asking:
    """A checked request."""

    asked: Asked
    wanted: Wanted
    priority: int


async def checked(request: Request, body: LlamaFields, num_prompts: int = 1) -> Asking:
    """Check everything that can be checked before the prompts are read. Raises ApiError with the client's names."""
    exchange = exchange_of(request)
    state = exchange.state
    model = await served_model(exchange, body.model)
    with client_names(NAMES):
        fields = sampling_of(body, state.tokenizer)
        top = body.n_probs or None
        asked = resolve(fields, top, limit_of(body), state.defaults, state.config, state.vocabulary)
    wanted = Wanted(
        model,
        settings_of(asked, body),
        top,
        bool(body.return_tokens),
        tuple(body.response_fields or ()),
        body.n_predict == 0,
    )
    return Asking(asked, wanted, priority_of(fields, state.config, gateway_priority(request)))


def settings_of(asked: Asked, body: LlamaFields) -> dict[str, Any]:
    """`generation_settings`: the options that are in effect."""
    params = asked.params
    return {
        "n_predict": -1 if body.n_predict is None else body.n_predict,
        "seed": -1 if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": list(asked.stop),
        "ignore_eos": params.ignore_eos,
        "n_probs": body.n_probs or 0,
        "stream": asked.stream,
    }


async def answer(
    request: Request, asking: Asking, jobs: Jobs, num_prompts: int = 1, *, as_list: bool = False
) -> Response | None:
    """The answer as events, as one object, or as a list of objects."""

    def events(answer: Answer) -> LlamaEvents:
        return LlamaEvents(answer, asking.wanted)

    async def whole(answer: Answer) -> Response:
        data = await answer.in_pool_if_large(lambda: orjson.dumps(events(answer).whole(as_list)))
        return Response(data, media_type="application/json")

    name = exchange_of(request).request_id
    with client_names(NAMES):
        return await answer_with(request, asking.asked, jobs, events, whole, name=name, num_prompts=num_prompts)
