"""The steps that /api/chat and /api/generate share: fields in our names, the answer in Ollama's form. Owner: loop."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from server.answers.answer import Answer
from server.answers.respond import Jobs, answer_with, json_body
from server.dialects.names import client_names
from server.dialects.ollama.frames import OllamaLines, Shape, moment
from server.dialects.ollama.names import served_of
from server.dialects.ollama.options import NAMES, OURS, Read, read_options
from server.dialects.ollama.schema import OllamaFields
from server.errors import ApiError, invalid, not_here, quoted
from server.http.exchange import Exchange, exchange_of
from server.http.foreign_body import report
from server.jobs.job import Job
from server.jobs.sampling import Asked
from server.output.logprobs import TokenNames
from server.output.parser import Parsing
from server.routes.endpoint import json_response
from server.state import AppState

EFFORTS = ("low", "medium", "high", "max")


@dataclass(frozen=True, slots=True)
class Asking:
    """The fields that both routes share, read."""

    model: str
    options: Read
    sampling: dict[str, Any]  # arguments for SamplingFields
    thinking: dict[str, Any]  # further arguments for ChatBody
    top: int | None  # likeliest tokens at each place; None: no log-probabilities

    @classmethod
    async def of(cls, exchange: Exchange, body: OllamaFields) -> Asking:
        """Raises ApiError."""
        state = exchange.state
        options = read_options(body.options)
        if options.ignored:
            report(exchange, options.ignored, OURS)
        sampling = {**options.fields, "stream": body.stream is not False, "max_tokens": options.max_tokens}
        sampling["return_progress"] = body.return_progress
        if body.format:
            sampling["response_format"] = format_of(body.format)
        if body.top_logprobs and not body.logprobs:
            raise invalid("top_logprobs", "top_logprobs: needs logprobs: true")
        top = body.top_logprobs or 0 if body.logprobs else None
        return cls(await served_of(exchange, body.model), options, sampling, thinking_of(state, body.think), top)

    @property
    def chat(self) -> dict[str, Any]:
        """Arguments for ChatBody."""
        logprobs = {} if self.top is None else {"logprobs": True, "top_logprobs": self.top}
        return {**self.sampling, **self.thinking, **logprobs}

    def within(self, job: Job, param: str) -> Job:
        """The job; 400 if its prompt is longer than the client's own context."""
        most = self.options.num_ctx
        if most is not None and job.num_tokens > most:
            text = f"{param}: has {job.num_tokens} tokens, more than options.num_ctx={most}; "
            raise ApiError(400, "context_length_exceeded", text + "shorten the prompt or leave num_ctx out", param)
        return job

    def loaded(self, shape: Shape) -> Response:
        """The answer to a request without a prompt."""
        head = {"model": self.model, "created_at": moment(time.time())}
        return json_response({**head, **shape(), "done": True, "done_reason": "load"})


def format_of(asked: str | dict[str, Any]) -> dict[str, Any]:
    """`format` as our response_format."""
    if isinstance(asked, dict):
        return {"type": "json_schema", "json_schema": {"name": "format", "schema": asked}}
    if asked != "json":
        raise invalid("format", f"format: got {quoted(asked)}; must be json or a JSON schema")
    return {"type": "json_object"}


def thinking_of(state: AppState, think: bool | str | None) -> dict[str, Any]:
    """`think` as arguments for ChatBody."""
    if think is None:
        return {}
    if isinstance(think, str) and think not in EFFORTS:
        raise invalid("think", f"think: got {quoted(think)}; must be true, false, {', '.join(EFFORTS)}")
    if think and not state.parsers.reads_any_reasoning:
        raise not_here("think", "think: this model does not think, or its format is unknown; leave the field out")
    return (
        {"reasoning_effort": think} if isinstance(think, str) else {"chat_template_kwargs": {"enable_thinking": think}}
    )


async def answer(
    request: Request, asking: Asking, asked: Asked, jobs: Jobs, shape: Shape, parsing: Parsing | None
) -> Response | None:
    """The answer as lines or as one object; refusals name the client's fields."""
    exchange = exchange_of(request)
    names, top = TokenNames(exchange.state.tokenizer), asking.top or 0

    def lines(answer: Answer) -> OllamaLines:
        return OllamaLines(answer, asking.model, shape, names, top)

    async def whole(answer: Answer) -> Response:
        return await json_body(answer, lines(answer).whole)

    with client_names(NAMES):
        return await answer_with(request, asked, jobs, lines, whole, name=exchange.request_id, parsing=parsing)
