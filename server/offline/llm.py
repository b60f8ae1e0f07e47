"""LLM: `generate`, `chat`, `embed` and `score` in vLLM's words, on the engine of this process.

Owner: the caller's thread; the app and its loop have a thread of their own (background.py), so a script and a notebook
whose loop runs use it alike. In: prompts, messages or texts. Out: outputs in their order. Each prompt takes the way of
a request from its checked fields on, with the same functions as over HTTP, and without a socket.

    caller   generate(prompts) ----------------------------------------> outputs
    loop         a window of prompts -> jobs -> Engine.submit -> Answer
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Scope

from mm.errors import MediaError
from server.answers.answer import Answer
from server.answers.respond import answer_with
from server.errors import ApiError, from_media, from_render
from server.hosted import hosted
from server.http.exchange import Exchange, exchange_of
from server.jobs.job import Job
from server.offline.background import Background
from server.offline.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    output_of,
)
from server.offline.prompts import Given, Messages, SamplingParams, asked_of, chat_job, checked, plain_job
from server.pooling.pairs import sides
from server.pooling.tokens import pooling_of
from server.pooling.vectors import check_dimensions, finished
from server.render.errors import RenderError
from server.routes import embeddings, rerank
from server.routes.endpoint import GENERATES, POOLS
from server.schema.pooling import ScoreBody, VectorsBody
from server.state import AppState

T = TypeVar("T")
FOREVER_S = 30 * 24 * 3600.0
# Flags with other defaults than a server's: the caller waits for its own prompts, and no client has to be refused.
FLAGS = {
    "trust_clients": True,
    "queue_timeout": FOREVER_S,
    "prepare_timeout": FOREVER_S,
    "max_queued_tokens": 2**40,
    "disable_log_stats": True,
}
PAIRS = 256  # pairs of one call of the scoring functions


class LLM:
    """A model in this process: a folder or a name on the hub; the model of the package if none is given.

    `flags`: those of the command line, with underscores. Raises UsageError, ConfigError.

    A context manager: at its end, and by `close`, the engine stops and the device is free. Ctrl-C during a call closes
    it too.
    """

    def __init__(self, model: str = "", **flags: Any) -> None:
        app = hosted(*([model] if model else []), *words_of({**FLAGS, **flags}))
        self.state: AppState = app.state
        self.background = Background(app)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the engine and its thread; later calls do nothing."""
        self.background.close()

    def generate(
        self,
        prompts: Given | Sequence[Given],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue texts, token ids (`{"prompt_token_ids": ids}`) or texts with media (`{"prompt": text,
        "multi_modal_data": {"image": picture}}`). Raises ValueError with the place of a prompt that cannot be answered.
        """
        listed: list[Any] = [prompts] if isinstance(prompts, str | Mapping) or _are_ids(prompts) else list(prompts)

        async def one(at: int, params: SamplingParams) -> RequestOutput:
            return await self._answer(params, lambda exchange, asked: plain_job(exchange, listed[at], params, asked))

        return self._each("prompts", len(listed), sampling_params, one)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several. The text of an output is the model's, with its reasoning and calls."""
        one_given = bool(messages) and isinstance(messages[0], Mapping)
        listed: list[Any] = [messages] if one_given else list(messages)
        options = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "template_kwargs": chat_template_kwargs,
        }

        async def one(at: int, params: SamplingParams) -> RequestOutput:
            def job(exchange: Exchange, asked: Any) -> Awaitable[Job]:
                return chat_job(exchange, listed[at], params, asked, options)

            return await self._answer(params, job)

        return self._each("messages", len(listed), sampling_params, one)

    def embed(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        *,
        dimensions: int | None = None,
        use_activation: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each text, or list of token ids, of a model that makes vectors."""
        self._require(True, GENERATES)
        listed: Any = [prompts] if isinstance(prompts, str) or _are_ids(prompts) else list(prompts)
        size = self.state.engine.limits.max_rows

        async def part(start: int) -> list[EmbeddingRequestOutput]:
            body = VectorsBody(
                input=listed[start : start + size],
                dimensions=dimensions,
                use_activation=use_activation,
                truncate_prompt_tokens=truncate_prompt_tokens,
                prompt_name=prompt_name,
            )
            with self._request() as request:
                return await embedded(request, body)

        return [output for outputs in self._parts("prompts", len(listed), size, part) for output in outputs]

    def score(
        self, text_1: str | Sequence[str], text_2: str | Sequence[str], *, truncate_prompt_tokens: int | None = None
    ) -> list[ScoringRequestOutput]:
        """A score for each pair: one text with each of `text_2`, or as many pairs as both have."""
        self._require(True, GENERATES)
        one, other = ([given] if isinstance(given, str) else list(given) for given in (text_1, text_2))
        body = ScoreBody(truncate_prompt_tokens=truncate_prompt_tokens)

        async def part(start: int) -> list[ScoringRequestOutput]:
            end = start + PAIRS
            left, right = one if len(one) == 1 < len(other) else one[start:end], other[start:end]
            with self._request() as request:
                sees = rerank.sees(self.state)
                pairs = sides(left, right, "text_1", "text_2", PAIRS, sees)
                _, scores = await rerank.scored(request, body, "score-", pairs, None, None)
            return [ScoringRequestOutput(ScoringOutput(score)) for score in scores]

        return [each for made in self._parts("text_2", len(other), PAIRS, part) for each in made]

    # -- on the loop

    async def _answer(self, params: SamplingParams, job: Callable[[Exchange, Any], Awaitable[Job]]) -> RequestOutput:
        """One prompt's output, made by the functions of the routes."""
        found: list[RequestOutput] = []
        asked = asked_of(self.state, params)
        with self._request() as request:
            exchange = exchange_of(request)

            async def jobs() -> list[Job]:
                return [await job(exchange, asked)]

            async def body(answer: Answer) -> Response:
                if any(choice.finish_reason == "abort" for choice in answer.choices):
                    raise ApiError(500, "aborted", "the engine stopped before the answer's end")
                found.append(output_of(answer, asked.params.logprobs, params.prompt_logprobs))
                return Response()

            skips = params.skip_special_tokens is not False
            await answer_with(request, asked, jobs, None, body, name=exchange.request_id, skip_special_tokens=skips)
        return found[0]

    @contextmanager
    def _request(self) -> Iterator[Request]:
        """A request without a connection, counted as open until it has ended."""
        scope: Scope = {"type": "http", "method": "POST", "path": "/offline", "headers": [], "client": None}
        exchange = scope["exchange"] = Exchange(scope, _dropped, self.state)
        self.state.open_exchanges.add(exchange)
        try:
            yield Request(scope)
        finally:
            self.state.open_exchanges.discard(exchange)
            if not self.state.open_exchanges:
                self.state.idle.set()
            del scope["exchange"]

    # -- on the caller's thread

    def _require(self, pools: bool, text: str) -> None:
        if self.state.engine.limits.pools is not pools:
            raise ValueError(text)

    def _each(
        self,
        name: str,
        count: int,
        params: SamplingParams | Sequence[SamplingParams] | None,
        one: Callable[[int, SamplingParams], Awaitable[RequestOutput]],
    ) -> list[RequestOutput]:
        """The outputs of `count` prompts with one or as many parameters."""
        self._require(False, POOLS)
        given = [params or SamplingParams()] * count if not isinstance(params, Sequence) else list(params)
        if len(given) != count:
            raise ValueError(f"sampling_params: got {len(given)} for {count} prompts; send one, or one for each")
        with _as_python(name):
            distinct = {id(each): checked(each) for each in given}
        listed = [distinct[id(each)] for each in given]
        most = max((each.n or 1 for each in listed), default=1)
        return self._run(name, count, 2 * self.state.engine.limits.max_rows // most, lambda at: one(at, listed[at]))

    def _parts(self, name: str, count: int, size: int, part: Callable[[int], Awaitable[T]]) -> list[T]:
        """The results of parts of `size` inputs, two at a time."""
        return self._run(name, -(-count // size), 2, lambda at: part(at * size))

    def _run(self, name: str, count: int, window: int, one: Callable[[int], Awaitable[T]]) -> list[T]:
        """The results of `one` for each number below `count`, of which `window` run at a time."""
        if not self.background.is_open:
            raise RuntimeError("this LLM is closed")
        found: list[Any] = [None] * count
        numbers = iter(range(count))

        async def work() -> None:
            for at in numbers:
                with _as_python(f"{name}[{at}]" if count > 1 else name):
                    found[at] = await one(at)

        async def together() -> None:
            tasks = [asyncio.ensure_future(work()) for _ in range(max(1, min(window, count)))]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        try:
            self.background.run(together())
        except KeyboardInterrupt:
            self.close()
            raise
        return found


async def embedded(request: Request, body: VectorsBody) -> list[EmbeddingRequestOutput]:
    """The vectors of a body of /v1/embeddings."""
    state = exchange_of(request).state
    embeddings.tasks_of(state, body)
    config = pooling_of(state)
    body.prompt_name = embeddings.role_of(body, config)
    check_dimensions(config, body.dimensions, state.engine.limits.pooled_width)
    found: list[EmbeddingRequestOutput] = []

    def answer(inputs: embeddings.Arrays, passes: list[embeddings.Arrays], about: dict[str, Any]) -> Response:
        dimensions = body.dimensions or config.usual_dimensions
        vectors = finished(np.stack(passes[0]), config.activation, body.use_activation, dimensions)
        found.extend(EmbeddingRequestOutput(EmbeddingOutput(v.tolist()), i.tolist()) for v, i in zip(vectors, inputs))
        return Response()

    await embeddings.answered(request, body, "embd-", [False], answer)
    return found


def words_of(flags: Mapping[str, Any]) -> list[str]:
    """The flags as on the command line; None leaves a flag out."""
    words: list[str] = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if value is True or value is False:
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list | tuple):
            words += [f"--{flag}", *map(str, value)]
        elif value is not None:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


@contextmanager
def _as_python(name: str) -> Iterator[None]:
    """A context in which refusals are ValueErrors that name the prompt, and other failures RuntimeErrors."""
    try:
        yield
    except (ApiError, RenderError, MediaError) as error:
        found = from_render(error) if isinstance(error, RenderError) else error
        found = from_media(found) if isinstance(found, MediaError) else found
        kind = ValueError if found.status < 500 or found.status == 501 else RuntimeError
        raise kind(f"{name}: {found.message}") from None


def _are_ids(prompts: Any) -> bool:
    return isinstance(prompts, Sequence) and bool(prompts) and all(isinstance(each, int) for each in prompts)


async def _dropped(message: Message) -> None:
    """The send of a request without a connection: outputs are not sent."""
