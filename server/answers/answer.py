"""Answer: one HTTP request inside the engine; Jobs in, growing choices out.

Owner: loop. In: Jobs (server/jobs/job.py) and the checked parameters. Out: Choice objects that grow by each step's
Delta, and `changed` calls for a stream, or `finished` for a complete body. All prompts and choices of the request share
one Answer; closing the Answer aborts what still runs. Times and counts go to server/answers/answer_metrics.py.

    Jobs -> Answer.submit -> Delta ... Delta -> Choice -> changed() / finished
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from _fast.lane import Lane
from engine.base.errors import EngineError
from engine.base.request import Delta, FinishReason, Progress, TokenLogprob
from engine.base.stream import TokenStream
from server.answers import drafted
from server.answers.answer_metrics import AnswerMetrics
from server.answers.choice import Choice
from server.errors import ApiError, from_engine, internal
from server.http.exchange import Exchange
from server.jobs.job import Job
from server.jobs.sampling import Asked
from server.ops import logs
from server.output.choices import ChoiceStream, usage
from server.output.parser import Parsing
from server.output.text import StopStrings
from server.state import AppState

T = TypeVar("T")
SLICE = 32  # prompts submitted in one turn of the loop
fault = logging.getLogger("omniloop.fault")


def ignore_change(choice: Choice | None) -> None:
    """The `changed` callback of an answer that is not streamed: it needs no call per step."""


def ignore_progress(choice: Choice, progress: Progress) -> None:
    """The `progressed` callback of an answer whose stream reports no progress."""


class Answer:
    """All prompts and choices of one request. Owner: loop. `close` aborts running choices and releases what the answer
    holds.
    """

    def __init__(
        self,
        exchange: Exchange,
        asked: Asked,
        jobs: list[Job],
        skip_special_tokens: bool = True,
        parsing: Parsing | None = None,
    ) -> None:
        self.state: AppState = exchange.state
        self.exchange = exchange
        self.asked = asked
        self.jobs = jobs
        self.metrics = AnswerMetrics(exchange, asked)
        self.error: ApiError | None = None
        self.aborted = False
        self.created = int(time.time())
        self.cached_tokens = [0] * len(jobs)
        self.prompt_logprobs: list[list[TokenLogprob | None] | None] = [None] * len(jobs)
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.changed: Callable[[Choice | None], None] = ignore_change
        self.progressed: Callable[[Choice, Progress], None] = ignore_progress
        stops = StopStrings(asked.stop, None if parsing is None else parsing.parsers.markers.chars)
        stream_of = partial(self._choice_stream, stops, skip_special_tokens, parsing)
        self.choices = [
            Choice(at * asked.n + k, job, stream_of(at * asked.n + k, job))
            for at, job in enumerate(jobs)
            for k in range(asked.n)
        ]
        self._open = len(self.choices)
        level = self.state.config.scheduler.per_request_spec_decode_metrics
        counts = level != "none" and len(self.choices) == 1 and not asked.beam
        self._drafted = drafted.DraftedSteps(level == "detailed") if counts else None
        self._scores_only = asked.max_tokens == 0  # the engine generates one token, which is never sent
        self._streams: list[TokenStream] = []
        self._on_close: list[Callable[[], object]] = []  # each call releases one thing that the answer holds

    def _choice_stream(
        self, stops: StopStrings, skip_special_tokens: bool, parsing: Parsing | None, index: int, job: Job
    ) -> ChoiceStream:
        parser = None if parsing is None else parsing.parser(job.prompt)
        return self.asked.choice(
            self.state.tokenizer,
            index,
            stops,
            include_stop=self.asked.include_stop,
            skip_special_tokens=skip_special_tokens,
            min_tokens=self.asked.params.min_tokens,
            repetition=self.asked.repetition,
            parser=parser,
            table=None if parser is None or parsing is None else parsing.parsers.markers.table,
        )

    @property
    def _reads_prompt(self) -> bool:
        """Whether the answer reports data about the prompt itself."""
        params = self.asked.params
        return params.prompt_logprobs is not None or params.return_routed_experts

    @property
    def form_param(self) -> str | None:
        """The field that defines the grammar of the answers; an error while a row runs names this field."""
        return None if self.asked.structure is None else self.asked.structure.param

    @property
    def done(self) -> bool:
        return self._open == 0 or self.error is not None

    # -- into the engine

    async def submit(self, *names: str) -> None:
        """Submit every prompt to the engine; /abort_requests finds the answer by any of `names`."""
        limits, places = self.state.config.limits, self.exchange.places
        patience, whole = (math.inf, 0.0) if places.idle else (limits.queue_timeout, limits.request_timeout)
        if self._scores_only and not self._reads_prompt:  # the engine has nothing to compute
            asyncio.get_running_loop().call_soon(self._end_unscored)
            return
        await self.state.running.wait()  # an operator may have paused the server
        self.exchange.submitted = time.monotonic()
        count = sum(job.num_tokens for job in self.jobs) * self.asked.n
        places.take_tokens(count)  # from the server-wide budget
        self._on_close.append(partial(places.give_tokens, count))
        if self.state.config.server.enable_log_requests or self.state.config.server.enable_log_outputs:
            self._log_prompts()
        try:
            for at, job in enumerate(() if self.asked.beam else self.jobs):
                if at % SLICE == SLICE - 1:  # let other tasks of the loop run
                    await asyncio.sleep(0)
                request = replace(job.request, deadline=self.exchange.submitted + patience)
                self.follow(self.state.engine.submit(request), partial(self.take, at))
        except EngineError as error:
            self.close()
            raise from_engine(error, places.retry_after(), job.param) from None
        for name in names:
            self.state.live.setdefault((self.exchange.key_name, name), set()).add(self)
            self._on_close.append(partial(self._unregister, self.exchange.key_name, name))
        self.exchange.answer_open = self
        if patience < math.inf:
            self._fail_later(patience, "no token within --queue-timeout", only_first=True)
        if whole:
            left = whole - (time.monotonic() - self.exchange.arrival)
            self._fail_later(max(0.0, left), "the request took longer than --request-timeout")

    def follow(self, stream: TokenStream, take: Callable[[Delta], None]) -> None:
        """Add a stream of the engine to this answer."""
        self._streams.append(stream)
        if self.state.trace is not None:
            self.state.trace.label(stream.first_id, stream.request.n, self.exchange.request_id)
        stream.drafted = self._drafted
        stream.subscribe(take)

    def unfollow(self) -> None:
        """Close the streams followed so far; beam search then follows others."""
        for stream in self._streams:
            stream.close()
        self._streams.clear()

    def use_lane(self, choice: Choice, lane: Lane) -> None:
        """Make the engine pass plain tokens of the only choice to the lane from now on."""
        choice.lane = self._streams[0].lane = lane

    def _unregister(self, key: str, name: str) -> None:
        named = self.state.live.get((key, name))
        if named is not None:
            named.discard(self)
            if not named:
                del self.state.live[key, name]

    def _fail_later(self, seconds: float, text: str, only_first: bool = False) -> None:
        def expire() -> None:
            if not (only_first and self.exchange.first_token):
                self.fail(ApiError(504, "deadline", text))

        self._on_close.append(asyncio.get_running_loop().call_later(seconds, expire).cancel)

    def _log_prompts(self) -> None:
        """If the operator enabled it, log the prompts now and collect the answers' texts for the log."""
        server = self.state.config.server
        if server.enable_log_requests:
            for job in self.jobs:
                logs.log_prompt(self.exchange.request_id, job.prompt.text, job.request, server.max_log_len)
        if server.enable_log_outputs:
            for choice in self.choices:
                choice.said = []

    # -- growth

    def take(self, at: int, delta: Delta) -> None:
        """Process a Delta of prompt `at`, called from the step. An error here ends only this answer, not others of the
        step.
        """
        if self.error is not None:
            return
        try:
            choice = self.choices[at * self.asked.n + delta.index]
            if delta.extras and (progress := delta.progress) is not None:
                self.progressed(choice, progress)
                if not delta.token_ids and not delta.finish_reason:
                    return
            if choice.owed is not None:
                self._grow_owed(choice, delta)
            elif choice.finish_reason is None:
                if delta.queued is not None or delta.cached_tokens is not None or delta.error is not None:
                    self._take_first(at, delta)
                self._grow(at, choice, delta)
        except Exception as error:
            self.broken(error)

    def _take_first(self, at: int, delta: Delta) -> None:
        """Handle the fields that come once per prompt: the waiting time, the cached tokens, the error."""
        if delta.error is not None:
            self.fail(from_engine(delta.error, param=self.form_param))
            return
        if delta.queued is not None:
            self.exchange.begin()
            self.metrics.queued(delta.queued)
        if delta.cached_tokens is not None:
            self.cached_tokens[at] = delta.cached_tokens
            self.prompt_logprobs[at] = delta.prompt_logprobs
            if delta.encode_s:
                self.metrics.encoded(delta.encode_s)

    def _grow(self, at: int, choice: Choice, delta: Delta) -> None:
        if self.error is not None:
            return
        choice.routed_experts = delta.routed_experts
        if self._scores_only:
            choice.finish_reason, stops = "length", True
        else:
            if delta.token_ids:
                self.metrics.tokens(choice, len(delta.token_ids))
            stops = choice.take(delta)
        if stops and self.asked.params.return_routed_experts and delta.routed_experts is None:
            choice.wait_for_experts()
            self._streams[at].conclude(delta.index)
        elif stops:
            self._streams[at].stop_choice(delta.index)
        self._note_change(choice)

    def _grow_owed(self, choice: Choice, delta: Delta) -> None:
        """Attach the experts of its tokens to a choice that has ended by its text, or end the choice without them."""
        if delta.error is not None:
            self.fail(from_engine(delta.error, param=self.form_param))
        elif delta.finish_reason is not FinishReason.NONE:
            choice.routed_experts = delta.routed_experts
            choice.settle()
            self._note_change(choice)

    def _note_change(self, choice: Choice) -> None:
        if choice.finish_reason is not None:
            self._open -= 1
            self.metrics.choice_ended(choice)
        self.changed(choice)
        if self._open == 0:
            self._finish()

    def _end_unscored(self) -> None:
        """End every choice at once: there is no token to generate and no prompt to score."""
        for choice in self.choices:
            choice.finish_reason = "length"
            self._open -= 1
            self.changed(choice)
        self._finish()

    def _finish(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)

    # -- the end

    def broken(self, error: Exception) -> None:
        """Fail the answer after an error in our own code."""
        fault.error("answer failed: id=%s", self.exchange.request_id, exc_info=error)
        self.changed = ignore_change
        self.fail(internal(self.exchange.request_id))

    def fail(self, error: ApiError) -> None:
        """End every choice with an error, before or after the first byte of the answer."""
        if self.done:
            return
        self.error = error
        self.exchange.reason = error.reason
        self.metrics.unfinished("error", self._open)
        for stream in self._streams:
            stream.close()
        self.changed(None)
        self._finish()

    def abort(self) -> None:
        """End every choice with finish_reason abort."""
        self.aborted = True
        for stream in self._streams:
            stream.abort()

    async def wait(self) -> None:
        """Wait until every choice has ended; raises the error that ended the answer early."""
        await self.finished
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Close all streams and release everything; idempotent."""
        self.metrics.describe(self.jobs, self.choices, sum(self.cached_tokens))
        if self.state.config.server.enable_log_outputs:
            self._log_texts()
        for give_back in self._on_close:
            give_back()
        self._on_close.clear()
        if not self.done:
            self.metrics.unfinished("abort", self._open)
        for stream in self._streams:
            stream.close()
        self.exchange.answer_open = None
        self.changed, self.progressed = ignore_change, ignore_progress  # breaks reference cycles with a stream

    def _log_texts(self) -> None:
        most = self.state.config.server.max_log_len
        for choice in self.choices:
            if choice.said is not None:
                text = "".join(choice.said)[:most]
                logs.log_text(self.exchange.request_id, text, choice.num_tokens, choice.finish_reason)
                choice.said = None

    # -- the body

    async def in_pool_if_large(self, work: Callable[[], T]) -> T:
        """The result of `work`, which formats the answer: in the pool if the answer is large, otherwise at once."""
        if not self._is_large:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.state.pool, work)

    @property
    def _is_large(self) -> bool:
        """Whether formatting would block the loop for more than some milliseconds."""
        params = self.asked.params
        counted = params.logprobs is not None or params.return_routed_experts
        tokens = sum(choice.num_tokens for choice in self.choices) if counted else 0
        if self._reads_prompt:
            tokens += sum(job.num_tokens for job in self.jobs)
        return tokens > 100 or len(self.choices) > 200

    def reported(self) -> dict[str, Any]:
        """The field `metrics`, which is next to `usage`; {} if the server does not report drafts."""
        level = self.state.config.scheduler.per_request_spec_decode_metrics
        return drafted.metrics_of(level, self._drafted, self.state.engine.limits.num_drafts)

    def usage(self) -> dict[str, Any]:
        """`usage` of all prompts and choices so far; a prompt counts once, for any number of choices."""
        media: dict[str, int] = {}  # tokens by modality
        for job in self.jobs:
            for modality, count in job.media_tokens.items():
                media[modality] = media.get(modality, 0) + count
        return usage(
            sum(job.num_tokens for job in self.jobs),
            sum(choice.num_tokens for choice in self.choices),
            cached_tokens=sum(self.cached_tokens),
            multimodal_tokens=media,
            reasoning_tokens=sum(choice.reasoning_tokens for choice in self.choices),
        )
