"""Answer: one HTTP request's way through the engine; prompts in, growing choices out.

Owner: loop. In: prompts (rendered), what was asked (checked). Out: Choice objects that grow by each step's Delta, and
`changed` calls for a stream, or `finished` for a whole answer. All prompts and choices of the request share one Answer;
leaving it aborts what still runs.

    prepare (media, splice, lengths) -> Answer.submit -> Delta ... Delta -> Choice -> changed() / finished
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self

from _fast.lane import Lane
from engine.errors import EngineError
from engine.request import Delta, Modality, Request, TokenLogprob
from engine.stream import TokenStream
from mm.item import MediaOptions, Processed
from mm.splice import Spliced, splice
from server import beam, logs
from server.choice import Choice
from server.errors import ApiError, context_length, from_engine, internal
from server.http.exchange import Exchange
from server.media_ahead import MediaAhead
from server.output.choices import ChoiceStream, usage
from server.output.text import StopStrings
from server.render.prompt import Prompt
from server.sampling import Asked
from server.state import AppState

SLICE = 32  # prompts handled in one turn of the loop
fault = logging.getLogger("omniloop.fault")


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt, ready for the engine."""

    prompt: Prompt
    request: Request
    media_tokens: Mapping[Modality, int]  # prompt tokens per modality

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
    ahead: MediaAhead | None = None,
) -> Job:
    """Media, placeholders and lengths of one prompt. Raises ApiError, RenderError or MediaError."""
    ahead = ahead or media_ahead(exchange, salt)
    foretold = ahead.foretold(prompt.media)
    spliced = await with_media(exchange.state, prompt, ahead, foretold)
    job = job_of(exchange, prompt, spliced, asked, salt=salt, priority=priority, param=param)
    if foretold is not None:
        await ahead.load(prompt.media)
    return job


def scope_of(exchange: Exchange, salt: str) -> bytes:
    """Whose caches a request reads: its key's, narrowed by its salt."""
    if not exchange.key_name and not salt:
        return b""
    return hashlib.sha256(f"{exchange.key_name}\0{salt}".encode()).digest()


def media_ahead(exchange: Exchange, salt: str, options: MediaOptions | None = None) -> MediaAhead:
    """Of a request; one that was told nothing loads what it is asked for, when it is asked."""
    return MediaAhead(exchange.state.media, scope_of(exchange, salt), options)


def job_of(
    exchange: Exchange, prompt: Prompt, spliced: Spliced, asked: Asked, *, salt: str, priority: int, param: str
) -> Job:
    """Lengths settled: how many tokens the prompt has and leaves."""
    state = exchange.state
    ids = spliced.prompt_token_ids
    length, room = len(ids), state.engine.max_model_len - len(ids)
    if length == 0:
        raise ApiError(400, "empty_prompt", "the prompt has no tokens; send at least one", param)
    if room < 1 and asked.max_tokens != 0:
        raise context_length(state.engine.max_model_len, length, param)
    wanted = state.defaults.get("max_new_tokens", room) if asked.max_tokens is None else asked.max_tokens
    most = max(1, min(wanted, room))
    params, least = asked.params, min(asked.params.min_tokens, most)
    if params.max_tokens != most or params.min_tokens != least:
        params = replace(params, max_tokens=most, min_tokens=least)
    request = Request(
        prompt_token_ids=ids,
        sampling=params,
        media=spliced.media,
        positions=spliced.positions,
        position_delta=spliced.position_delta,
        n=asked.n,
        priority=priority,
        cache_salt=scope_of(exchange, salt),
        label=exchange.request_id,
        arrival=exchange.arrival,
    )
    return Job(prompt, request, spliced.counts)


async def with_media(
    state: AppState, prompt: Prompt, ahead: MediaAhead, foretold: list[Processed] | None = None
) -> Spliced:
    """The prompt with its placeholders widened, to what is loaded or `foretold`; unchanged when it has none."""
    if not prompt.media:
        return Spliced(prompt.token_ids, (), None, 0, {})
    assert state.media is not None, "the renderer refuses media that the model does not take"
    processed = await ahead.load(prompt.media) if foretold is None else foretold
    return splice(prompt.token_ids, prompt.slots, processed, state.media.processor)


def nobody(choice: Choice | None) -> None:
    """A whole answer needs no word of progress."""


class Answer:
    """Owner: loop. Leaving it (`async with`) aborts what still runs and gives its places back."""

    def __init__(self, exchange: Exchange, asked: Asked, jobs: list[Job], skip_special_tokens: bool = True) -> None:
        self.state: AppState = exchange.state
        self.exchange = exchange
        self.asked = asked
        self.jobs = jobs
        self._n = asked.n
        self._observe_gap = self.state.metrics.gaps.observe
        self.error: ApiError | None = None
        self.aborted = False
        self.created = int(time.time())
        self.cached_tokens = [0] * len(jobs)
        self.prompt_logprobs: list[list[TokenLogprob | None] | None] = [None] * len(jobs)
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.changed: Callable[[Choice | None], None] = nobody
        stops = StopStrings(asked.stop)
        self.choices = [
            Choice(at * asked.n + k, job, self._choice_stream(at * asked.n + k, stops, skip_special_tokens))
            for at, job in enumerate(jobs)
            for k in range(asked.n)
        ]
        self._open = len(self.choices)
        self._scores_only = asked.max_tokens == 0  # the engine makes one token, and nobody hears of it
        self._streams: list[TokenStream] = []
        self._timers: list[asyncio.TimerHandle] = []
        self._tokens_held = 0  # of the server-wide budget
        self._labels: list[tuple[str, str]] = []

    def _choice_stream(self, index: int, stops: StopStrings, skip_special_tokens: bool) -> ChoiceStream:
        return ChoiceStream(
            self.state.tokenizer,
            index,
            stops,
            include_stop=self.asked.include_stop,
            skip_special_tokens=skip_special_tokens,
            min_tokens=self.asked.params.min_tokens,
            repetition=self.asked.repetition,
        )

    @property
    def done(self) -> bool:
        return self._open == 0 or self.error is not None

    async def submit(self, *labels: str) -> None:
        """Hands every prompt to the engine; `labels` are what /abort_requests may call it."""
        limits = self.state.config.limits
        if self._scores_only and self.asked.params.prompt_logprobs is None:  # nothing to compute
            asyncio.get_running_loop().call_soon(self._scored_all)
            return
        await self.state.running.wait()  # an operator has paused the server
        self._take_tokens()
        if self.state.config.server.enable_log_requests:
            logs.asked(self)
        if self.state.config.server.enable_log_outputs:
            for choice in self.choices:
                choice.said = []
        try:
            for at, job in enumerate(() if self.asked.beam else self.jobs):
                if at % SLICE == SLICE - 1:  # others may have the loop in between
                    await asyncio.sleep(0)
                self.follow(self.state.engine.submit(job.request), partial(self.take, at))
        except EngineError as error:
            self.close()
            raise from_engine(error, self.state.places.retry_after()) from None
        for label in labels:
            self._labels.append((self.exchange.key_name, label))
            self.state.live.setdefault(self._labels[-1], set()).add(self)
        self.exchange.answer_open = self
        self._later(limits.queue_timeout, "no token within --queue-timeout", only_first=True)
        if limits.request_timeout:
            left = limits.request_timeout - (time.monotonic() - self.exchange.arrival)
            self._later(max(0.0, left), "the request took longer than --request-timeout")

    def follow(self, stream: TokenStream, take: Callable[[Delta], None]) -> None:
        """Another stream of the engine that belongs to this answer."""
        self._streams.append(stream)
        stream.subscribe(take)

    def shorten(self, choice: Choice, lane: Lane) -> None:
        """From now on the lane is asked first, where this is the only choice."""
        choice.lane = self._streams[0].lane = lane

    def unfollow(self) -> None:
        """Leaves the streams followed so far; beam search follows others next."""
        for stream in self._streams:
            stream.close()
        self._streams.clear()

    def _take_tokens(self) -> None:
        count = sum(job.num_tokens for job in self.jobs) * self.asked.n
        self.state.places.take_tokens(count)
        self._tokens_held = count

    def _later(self, seconds: float, text: str, only_first: bool = False) -> None:
        def expire() -> None:
            if not (only_first and self.exchange.first_token):
                self.fail(ApiError(504, "deadline", text))

        self._timers.append(asyncio.get_running_loop().call_later(seconds, expire))

    def take(self, at: int, delta: Delta) -> None:
        """A Delta of prompt `at`, straight from the step; a fault here ends this answer, never the step's others."""
        if self.error is not None:
            return
        try:
            choice = self.choices[at * self._n + delta.index]
            if choice.finish_reason is None:
                if delta.queued is not None or delta.cached_tokens is not None or delta.error is not None:
                    self._first(at, delta)
                self._grow(at, choice, delta)
        except Exception as error:
            self.broken(error)

    def broken(self, error: Exception) -> None:
        """A fault of our own, while the answer grew."""
        fault.error("answer failed: id=%s", self.exchange.request_id, exc_info=error)
        self.changed = nobody
        self.fail(internal(self.exchange.request_id))

    def _first(self, at: int, delta: Delta) -> None:
        """What comes once: how long the request waited, what the cache had, what failed."""
        if delta.error is not None:
            self.fail(from_engine(delta.error))
            return
        if delta.queued is not None:
            self.state.metrics.observe("request_queue_time_seconds", delta.queued)
        if delta.cached_tokens is not None:
            self.cached_tokens[at] = delta.cached_tokens
            self.prompt_logprobs[at] = delta.prompt_logprobs

    def _grow(self, at: int, choice: Choice, delta: Delta) -> None:
        if self.error is not None:
            return
        if self._scores_only:
            self._streams[at].stop_choice(delta.index)
            choice.finish_reason = "length"
            self._ended(choice)
        else:
            if delta.token_ids:
                self._clock(choice, len(delta.token_ids))
            if choice.take(delta):
                self._streams[at].stop_choice(delta.index)
            if choice.finish_reason is not None:
                self._ended(choice)
        self.changed(choice)
        if self._open == 0 and not self.finished.done():
            self.finished.set_result(None)

    def _scored_all(self) -> None:
        for choice in self.choices:
            choice.finish_reason = "length"
            self._open -= 1
            self.changed(choice)
        if not self.finished.done():
            self.finished.set_result(None)

    def _clock(self, choice: Choice, count: int) -> None:
        """Times of first and later tokens."""
        now = time.monotonic()
        if choice.first_at:
            self._observe_gap((now - choice.last_at) / count)
        else:
            choice.first_at = now
            self.began(now)
        choice.last_at = now

    def began(self, now: float) -> None:
        """The engine has made a token for this answer."""
        if not self.exchange.first_token:
            self.exchange.first_token = now
            self.state.metrics.observe("time_to_first_token_seconds", now - self.exchange.arrival)

    def _ended(self, choice: Choice) -> None:
        self._open -= 1
        metrics, arrival, count = self.state.metrics, self.exchange.arrival, choice.num_tokens
        metrics.finished[choice.finish_reason or "stop"] += 1
        metrics.observe("e2e_request_latency_seconds", time.monotonic() - arrival)
        metrics.observe("request_generation_tokens", count)
        metrics.observe("request_prompt_tokens", choice.job.num_tokens)
        metrics.observe("request_max_num_generation_tokens", count)
        metrics.observe("request_params_max_tokens", choice.job.request.sampling.max_tokens)
        metrics.observe("request_params_n", self.asked.n)
        if choice.first_at:
            decode = choice.last_at - choice.first_at
            metrics.observe("request_prefill_time_seconds", choice.first_at - arrival)
            metrics.observe("request_decode_time_seconds", decode)
            metrics.observe("request_inference_time_seconds", choice.last_at - arrival)
            if count > 1:
                metrics.observe("request_time_per_output_token_seconds", decode / (count - 1))

    def fail(self, error: ApiError) -> None:
        """Ends the whole answer with an error, before or after its first byte."""
        if self.done:
            return
        self.error = error
        self.exchange.reason = error.reason
        self.state.metrics.finished["error"] += self._open
        for stream in self._streams:
            stream.close()
        self.changed(None)
        if not self.finished.done():
            self.finished.set_result(None)

    def abort(self) -> None:
        """Ends every choice with finish_reason abort."""
        self.aborted = True
        for stream in self._streams:
            stream.abort()

    def close(self) -> None:
        """Leaves the engine; idempotent."""
        self.describe()
        if self.choices[0].said is not None:
            logs.answered(self)
            for choice in self.choices:
                choice.said = None
        for timer in self._timers:
            timer.cancel()
        self.state.places.give_tokens(self._tokens_held)
        self._tokens_held = 0
        if not self.done:
            self.state.metrics.finished["abort"] += self._open
        for stream in self._streams:
            stream.close()
        for label in self._labels:
            named = self.state.live.get(label)
            if named is not None:
                named.discard(self)
                if not named:
                    del self.state.live[label]
        self._labels.clear()
        self.exchange.answer_open = None
        self.changed = nobody  # else a stream and its answer would hold each other

    @property
    def is_large(self) -> bool:
        """Whether writing it down would hold the loop: more than some milliseconds of formatting."""
        params = self.asked.params
        tokens = sum(choice.num_tokens for choice in self.choices) if params.logprobs is not None else 0
        if params.prompt_logprobs is not None:
            tokens += sum(job.num_tokens for job in self.jobs)
        return tokens > 100 or len(self.choices) > 200

    def usage(self) -> dict[str, Any]:
        """`usage` of all prompts and choices so far; a prompt counts once, however many choices it has."""
        media: dict[str, int] = {}  # tokens by modality
        for job in self.jobs:
            for modality, count in job.media_tokens.items():
                media[modality] = media.get(modality, 0) + count
        return usage(
            sum(job.num_tokens for job in self.jobs),
            sum(choice.num_tokens for choice in self.choices),
            cached_tokens=sum(self.cached_tokens),
            multimodal_tokens=media,
        )

    def describe(self) -> None:
        """Counts for the log line."""
        details = self.exchange.details
        details["prompt"] = sum(job.num_tokens for job in self.jobs)
        details["generated"] = sum(choice.num_tokens for choice in self.choices)
        if self.exchange.first_token:
            details["first_ms"] = round((self.exchange.first_token - self.exchange.arrival) * 1000, 1)

    async def wait(self) -> None:
        """Until every choice has ended; raises what ended it early."""
        if self.asked.beam:
            await beam.search(self)
        await self.finished
        if self.error is not None:
            raise self.error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
