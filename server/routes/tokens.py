"""/inference/v1/generate: token ids in, token ids (and text on request) out (API.md section 16).

Owner: loop. In: GenerateBody, usually from a render endpoint. Media are hashes of items that the same caller has
rendered on this server; spans and hashes are recomputed and compared. Out: one JSON body, or chunks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response

from engine.base.request import Progress
from mm.splice import splice
from server.answers import routed
from server.answers.answer import Answer
from server.answers.choice import Choice
from server.answers.respond import answer_with, json_body
from server.errors import ApiError, invalid
from server.http.body import read_json
from server.http.exchange import Exchange, exchange_of
from server.http.sse import DONE, SSE
from server.http.watch import preparing
from server.jobs.job import Job, job_of, scope_of
from server.jobs.sampling import Asked, priority_of, resolve, salt_of
from server.output.choices import progress_of
from server.output.logprobs import TokenNames
from server.render.prompt import Prompt
from server.render.widened import mismatch, narrowed
from server.routes.endpoint import gateway_priority, generating_route, names_of, response_id, served_model
from server.schema.generate import GenerateBody, TokenSampling
from server.state import AppState

PARAM = "token_ids"


async def create(request: Request) -> Response | None:
    exchange = exchange_of(request)
    state = exchange.state
    body = await read_json(request, GenerateBody, state.config.limits.max_text_request_bytes)
    await served_model(exchange, body.model)
    fields = sampling_of(body)
    asked = check(state, fields)
    if body.output_mode == "text":
        state.tokenizer.require_texts("output_mode")
    priority = priority_of(fields, state.config, gateway_priority(request))
    name = response_id("", body.request_id, exchange)
    names = names_of(state, fields)

    async def jobs() -> list[Job]:
        async with preparing(exchange):
            return [await prompt_of(exchange, body, fields, asked, priority)]

    def frames(answer: Answer) -> TokenChunks:
        return TokenChunks(answer, name, names, body.output_mode == "text")

    async def response(answer: Answer) -> Response:
        return await json_body(answer, partial(whole, answer, frames(answer)))

    skip_special_tokens = fields.skip_special_tokens is not False
    return await answer_with(request, asked, jobs, frames, response, name=name, skip_special_tokens=skip_special_tokens)


def sampling_of(body: GenerateBody) -> TokenSampling:
    """`sampling_params`, with the sampling fields that this body has outside of them."""
    fields = body.sampling_params or TokenSampling()
    routed = body.return_routed_experts
    return msgspec.structs.replace(
        fields,
        return_routed_experts=fields.return_routed_experts if routed is None else routed,
        stream=body.stream,
        stream_options=body.stream_options,
        cache_salt=body.cache_salt,
        priority=body.priority,
    )


def check(state: AppState, fields: TokenSampling) -> Asked:
    most = fields.max_tokens
    if most is not None and not 1 <= most < 2**31:
        raise invalid("sampling_params.max_tokens", f"sampling_params.max_tokens: got {most}; must be at least 1")
    return resolve(fields, fields.logprobs, most, state.defaults, state.config, state.vocabulary)


async def prompt_of(exchange: Exchange, body: GenerateBody, fields: TokenSampling, asked: Asked, priority: int) -> Job:
    """A job of token ids, which are checked like those of other prompts. Media are looked up by their hashes, compared
    with the request's places, and spliced into the prompt."""
    state, salt = exchange.state, salt_of(fields)
    if not body.token_ids:
        raise ApiError(400, "empty_prompt", "token_ids: is empty; send at least one", PARAM)
    if body.features is None:
        prompt = await state.renderer.completion(body.token_ids, False, param=PARAM)
        spliced = splice(prompt.token_ids, (), (), None)
        return job_of(exchange, prompt, spliced, asked, salt=salt, priority=priority, param=PARAM)
    if state.media is None:
        raise mismatch("this model reads text only")
    processor = state.media.processor
    assert processor is not None
    narrow = narrowed(body.token_ids, body.features, processor, state.media.cache, scope_of(exchange, salt))
    prompt = state.renderer.from_ids(narrow.token_ids, narrow.refs, PARAM)
    spliced = splice(prompt.token_ids, prompt.slots, narrow.processed, processor)
    if spliced.prompt_token_ids.tolist() != body.token_ids:
        raise mismatch("the prompt is not what the server renders for these media")
    widened = Prompt(spliced.prompt_token_ids, prompt.media, prompt.slots)
    return job_of(exchange, widened, spliced, asked, salt=salt, priority=priority, param=PARAM)


class TokenChunks:
    """Choices as token ids; one object per answer, whole or streamed."""

    form = SSE
    done = DONE

    def __init__(self, answer: Answer, name: str, names: TokenNames, with_text: bool) -> None:
        self.answer = answer
        self.name = name
        self.names = names
        self.with_text = with_text

    def choice(self, choice: Choice) -> dict[str, Any]:
        """The choice's output since the last call."""
        choice.started = True
        text, token_ids, entries = choice.drain()
        found: dict[str, Any] = {
            "index": choice.index,
            "token_ids": token_ids,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "logprobs": None,
        }
        if self.answer.asked.params.logprobs is not None:
            found["logprobs"] = self.names.chat(entries, -1)
        if self.with_text:
            found["text"] = text
        return found | routed.of_answer(choice)

    def frame(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return b"data: " + orjson.dumps({"request_id": self.name, "choices": choices, **more}) + b"\n\n"

    def chunks(self, choice: Choice) -> bytes:
        if not choice.num_held and choice.finish_reason is None:
            return b""
        more = routed.of_prompt(choice) if choice.index == 0 else {}
        return self.frame([self.choice(choice)], **more)

    def plain(self, choice: Choice) -> None:
        """No lane: each chunk has its own token ids."""

    def progress(self, choice: Choice, progress: Progress) -> bytes:
        return self.frame([], **progress_of(progress))

    def usage(self) -> bytes:
        if not self.answer.asked.include_usage:
            return b""
        return self.frame([], usage=self.answer.usage(), **self.answer.reported())

    def error(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n"


def whole(answer: Answer, frames: TokenChunks) -> dict[str, Any]:
    prompt_logprobs = answer.prompt_logprobs[0]
    most = answer.asked.params.prompt_logprobs
    return {
        "request_id": frames.name,
        "choices": [frames.choice(choice) for choice in answer.choices],
        "usage": answer.usage(),
        **answer.reported(),
        "prompt_logprobs": frames.names.prompt(prompt_logprobs, most) if most is not None and prompt_logprobs else None,
        **routed.of_prompt(answer.choices[0]),
    }


ROUTES = [generating_route("/inference/v1/generate", create)]
