"""Listening: transcribes one recording, several windows at a time.

Owner: loop, the handler's task. In: a Recording and a Transcriber. Out: the text of each window, in order, and text
deltas while windows are decoded. A window's features are computed when a worker takes the window and freed after its
transcription, so a long recording uses little memory besides its samples. Leaving `run` aborts the engine's requests.

    windows   0 1 2 3 ...     workers take the next one
    engine    [0..][1....][2...]
    deltas    0000011111222   in order: the text of a later window waits until the earlier windows have ended
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from engine.base.errors import EngineError
from engine.base.request import Delta, FinishReason, Progress, TokenLogprob
from engine.base.stream import TokenStream
from mm.errors import MediaError
from mm.item import Processed
from mm.recording import Recording
from server.answers.answer_metrics import AnswerMetrics
from server.errors import ApiError, from_engine
from server.http.exchange import Exchange
from server.jobs.job import Job, note_media
from server.output.logprobs import TokenNames
from server.output.text import TextStream
from server.render.tokenizer import Tokenizer
from server.speech.transcriber import MAX_ID, Said, Task, Transcriber
from server.state import AppState

ENDED_BY_TOKEN = (FinishReason.STOP, FinishReason.STOP_TOKEN)


# (window, its next text, the tokens of that text if log-probabilities are requested); text "": the window has ended
OnText = Callable[[int, str, Sequence[TokenLogprob]], None]
OnProgress = Callable[[int, Progress], None]  # (window, how far its prompt is)


def logprobs_of(tokenizer: Tokenizer, entries: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """An entry per token of the text: `token`, `logprob`, `bytes`."""
    names = TokenNames(tokenizer)
    return [names.token(each.token_id, each.logprob) for each in entries if not tokenizer.is_special(each.token_id)]


def all_logprobs(tokenizer: Tokenizer, said: Iterable[Said]) -> list[dict[str, Any]]:
    """The entries of all windows, without the tokens that end them."""
    return logprobs_of(tokenizer, [entry for each in said for entry in each.logprobs[: len(each.token_ids)]])


def ignore_text(index: int, text: str, tokens: Sequence[TokenLogprob]) -> None:
    """Drop the text deltas of a response that is not streamed."""


def ignore_progress(index: int, progress: Progress) -> None:
    """Drop the progress of prompts."""


class Listening:
    """The transcription of one recording. Owner: loop. An OpenAnswer for operators and a draining server."""

    def __init__(self, exchange: Exchange, task: Task, transcriber: Transcriber) -> None:
        self.exchange = exchange
        self.task = task
        self.on_text: OnText = ignore_text
        self.on_progress: OnProgress = ignore_progress
        self.error: ApiError | None = None
        self.prompt_tokens = 0
        self.audio_tokens = 0
        self.generated_tokens = 0
        self._state: AppState = exchange.state
        self._transcriber = transcriber
        self._metrics = AnswerMetrics(exchange, task.asked)
        self._workers: list[asyncio.Task[None]] = []
        self._streams: set[TokenStream] = set()
        self._aborted = False
        self._begun = asyncio.Event()  # set when `Transcriber.begin` has returned

    async def run(self, recording: Recording) -> list[Said]:
        """The text of each window. Raises the error that ended the transcription early."""
        count = len(recording.windows)
        said = [Said() for _ in range(count)]
        await self._state.running.wait()  # an operator may have paused the server
        with self.opened(), ExitStack() as held:
            numbers = iter(range(count))
            self._workers += [
                asyncio.ensure_future(self._work(recording, numbers, said)) for _ in range(self._hold(held, count))
            ]
            try:
                await self._settled()
            finally:
                note_media(self.exchange, recording.report)
        return said

    @contextmanager
    def opened(self) -> Iterator[None]:
        """The exchange's open answer with its deadlines, for a `with` block; counted at its end."""
        limits, loop = self._state.config.limits, asyncio.get_running_loop()
        self.exchange.answer_open = self
        timers = [loop.call_later(limits.queue_timeout, self._first_is_late)]
        if limits.request_timeout:
            left = limits.request_timeout - (time.monotonic() - self.exchange.arrival)
            timers.append(loop.call_later(max(0.0, left), self._whole_is_late))
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()
            self.exchange.answer_open = None
            self._describe()

    @property
    def done(self) -> bool:
        return self.error is not None

    def fail(self, error: ApiError) -> None:
        """Ends the transcription with an error."""
        if self.error is None:
            self.error = error
            self.exchange.reason = error.reason
        for worker in self._workers:
            worker.cancel()

    def abort(self) -> None:
        """End the transcription; its answer is the text so far."""
        self._aborted = True
        for stream in tuple(self._streams):
            stream.abort()

    def _hold(self, held: ExitStack, count: int) -> int:
        """The number of workers: the request already has a place, and takes more places if they are free."""
        places, caller = self._state.places, self.exchange.client
        most = min(count, self._state.config.speech.transcription_windows_at_once)
        more = max(0, min(most - 1, places.spare(caller)))
        held.enter_context(places.hold_more(more, caller, "speech"))
        return min(count, 1 + more)

    async def _settled(self) -> None:
        """Wait until all workers have ended; the first failure cancels the others."""
        try:
            if self._workers:
                await asyncio.wait(self._workers, return_when="FIRST_EXCEPTION")
        finally:
            for worker in self._workers:
                worker.cancel()
            ended = await asyncio.gather(*self._workers, return_exceptions=True)
            self._workers.clear()
        if self.error is not None:
            raise self.error
        for result in ended:
            if isinstance(result, EngineError):
                raise from_engine(result, self._state.places.retry_after())
            if isinstance(result, BaseException):
                raise result

    async def _work(self, recording: Recording, numbers: Iterator[int], said: list[Said]) -> None:
        for number in numbers:
            if self._aborted:
                break
            processed = await self._processed(recording, number)
            if number == 0:
                await self._transcriber.begin(self.ask, processed)
                self._begun.set()
            await self._begun.wait()
            said[number] = await self._transcriber.transcribe(self.ask, number, recording.windows[number], processed)
            self.on_text(number, "", ())

    async def _processed(self, recording: Recording, number: int) -> Processed:
        """One processed window."""
        try:
            async with asyncio.timeout(self._state.config.limits.prepare_timeout or None):
                return await recording.processed(number)
        except TimeoutError:
            raise ApiError(504, "deadline", "a window took longer than --prepare-timeout") from None
        except MediaError as error:
            error.param = "file"
            raise

    async def ask(self, job: Job, window: int | None = None, text_below: int = MAX_ID) -> Said:
        """The engine's output for a job; see `Ask`."""
        said = Said(temperature=job.request.sampling.temperature)
        self._count_prompt(job)
        await self._answer(job, said, TextStream(self._state.tokenizer, at_start=True), window, text_below)
        return said

    def _count_prompt(self, job: Job) -> None:
        self.prompt_tokens += job.num_tokens
        self.audio_tokens += job.media_tokens.get("audio", 0)

    async def _answer(
        self,
        job: Job,
        said: Said,
        text: TextStream,
        window: int | None,
        text_below: int = MAX_ID,
        goes_on: bool = False,
    ) -> FinishReason:
        """Run one request and add its output to `said`; returns why it ended. `goes_on`: the next request continues the
        text, unless a token ended it."""
        places, reason = self._state.places, FinishReason.NONE
        places.take_tokens(job.num_tokens)
        try:
            stream = self._state.engine.submit(job.request)
            self._streams.add(stream)
            try:
                async with stream:
                    async for delta in stream:
                        reason = delta.finish_reason
                        if delta.extras and (progress := delta.progress) is not None and window is not None:
                            self.on_progress(window, progress)
                        new = self._take(delta, text, said, text_below, goes_on)
                        said.text += new
                        if new and window is not None:
                            self.on_text(window, new, said.logprobs[said.num_reported : len(said.token_ids)])
                            said.num_reported = len(said.token_ids)
            finally:
                self._streams.discard(stream)
        finally:
            places.give_tokens(job.num_tokens)
        return reason

    def _take(self, delta: Delta, text: TextStream, said: Said, text_below: int, goes_on: bool) -> str:
        """Add a delta; returns its new text."""
        if delta.error is not None:
            raise from_engine(delta.error)
        if delta.queued is not None:
            self.exchange.begin()
            self._metrics.queued(delta.queued)
            if delta.encode_s:
                self._metrics.encoded(delta.encode_s)
        ids = delta.token_ids
        if ids:
            self._metrics.first_token(time.monotonic())
            self.generated_tokens += len(ids)
        said.logprobs += delta.logprobs or ()
        if delta.finish_reason in ENDED_BY_TOKEN:
            ids = ids[:-1]
        said.token_ids += ids
        new = text.feed([token for token in ids if token < text_below])
        if delta.finish_reason and not (goes_on and delta.finish_reason is FinishReason.LENGTH):
            new += text.finish()
            self._state.metrics.finished[delta.finish_reason.wire or "stop"] += 1
        return new

    def _first_is_late(self) -> None:
        if not self.exchange.first_token:
            self.fail(ApiError(504, "deadline", "no token within --queue-timeout"))

    def _whole_is_late(self) -> None:
        self.fail(ApiError(504, "deadline", "the request took longer than --request-timeout"))

    def _describe(self) -> None:
        """Set the counts for metrics and the log line."""
        exchange, metrics = self.exchange, self._state.metrics
        metrics.observe("e2e_request_latency_seconds", time.monotonic() - exchange.arrival)
        metrics.observe("request_prompt_tokens", self.prompt_tokens)
        metrics.observe("request_generation_tokens", self.generated_tokens)
        exchange.details |= {"prompt": self.prompt_tokens, "generated": self.generated_tokens}
        if exchange.first_token:
            exchange.details["first_ms"] = round((exchange.first_token - exchange.arrival) * 1000, 1)
