"""PushedStream: an Answer framed and written as it grows; one write per step for all choices together.

Owner: loop. In: `changed` calls of an Answer, straight from the engine's step. Out: frames into an EventStream. While
the reader is slow, nothing is framed: the choices merge their output, within --stream-buffer-bytes. The status 200 is
sent with the first token, so an earlier error can still send its own status.

    step -> Answer.changed -> flush -> frames -> EventStream.write
    step -> lane -> socket                plain tokens of a single choice, once the answer has begun (_fast/lane)
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from _fast.lane import Lane
from engine.base.request import Progress
from server.answers.answer import Answer
from server.answers.choice import Choice
from server.errors import ApiError
from server.http.exchange import ClientGone
from server.http.sse import EventStream, StreamForm


class Frames(Protocol):
    """How one endpoint writes its chunks; constant parts are encoded once per stream."""

    form: StreamForm
    done: bytes  # the end of every stream of this protocol

    def chunks(self, choice: Choice) -> bytes:
        """The choice's unsent output: its opening chunk if it is new, its text, its end. b"" if there is none."""

    def plain(self, choice: Choice) -> tuple[bytes, bytes] | None:
        """The bytes before and after the text's JSON string while only the text grows; None if other fields
        change too.
        """

    def progress(self, choice: Choice, progress: Progress) -> bytes:
        """The chunk that reports how far the computation of the choice's prompt is."""

    def usage(self) -> bytes:
        """The chunk before the end of the stream, or b""."""

    def error(self, error: ApiError) -> bytes:
        """The frames of an error after the first byte."""


class PushedStream:
    """One streamed answer from submit to its last byte. Owner: loop."""

    def __init__(self, answer: Answer, frames: Frames) -> None:
        self.answer = answer
        self.frames = frames
        self.events = EventStream(answer.exchange, self.flush, frames.form)
        self._moved: dict[Choice, None] = {}  # in the order of their changes
        self._scheduled = False
        self._interval = answer.asked.interval
        self._limit = answer.state.config.limits.stream_buffer_bytes
        alone = len(answer.choices) == 1 and self._interval == 1
        answer.changed = self.on_only_choice if alone else self.note
        answer.progressed = self.on_progress
        self._may_use_lane = alone and not answer.asked.beam and not answer.asked.params.return_routed_experts

    async def run(self) -> None:
        """Wait until the last byte is written; raises ApiError while the answer can still send a status."""
        events, answer = self.events, self.answer
        answer.finished.add_done_callback(self._over)
        try:
            await events.ended
            if not events.opened and answer.error is not None:
                raise answer.error
        finally:
            answer.finished.remove_done_callback(self._over)
            events.close()
            await events.settle()
        if events.lost:
            answer.exchange.abort()
            await asyncio.sleep(0)  # let connection_lost run before the app returns
            raise ClientGone

    def _over(self, finished: asyncio.Future[None]) -> None:
        """Close the stream of an answer that failed before its first byte; `run` raises the error."""
        if self.answer.error is not None and not self.events.opened:
            self.events.close()

    def note(self, choice: Choice | None) -> None:
        """Note that a choice changed, or (None) that the answer failed."""
        if choice is not None:
            self._moved[choice] = None
        if not self._scheduled:  # other choices of the same step follow in this turn of the loop
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self.flush)

    def on_only_choice(self, choice: Choice | None) -> None:
        """Frame and write a change of the only choice at once, which costs less per token than `flush`.

        Streams without a lane come here for every token: TLS, log-probabilities, token ids, stop strings.
        """
        events = self.events
        if choice is not None and choice.finish_reason is None and events.takes_more:
            try:
                data = self.frames.chunks(choice)
                if data:
                    events.write(data)
                    if self._may_use_lane:
                        self._open_lane(choice)
            except Exception as error:
                self._broken(error)
            return
        if choice is not None:
            self._moved[choice] = None
        self.flush()

    def on_progress(self, choice: Choice, progress: Progress) -> None:
        """Report the progress of a prompt, unless the reader is slow: later reports replace this one."""
        if self.events.takes_more:
            try:
                self.events.write(self.frames.progress(choice, progress))
            except Exception as error:
                self._broken(error)

    def _open_lane(self, choice: Choice) -> None:
        """Make a lane for the next tokens.

        The lane opens after the next ordinary write, which proves that the transport's buffer is empty.
        """
        parts = self.frames.plain(choice)
        if parts is None:  # the first chunks of an answer may not be plain
            return
        self._may_use_lane = False
        line = self.answer.exchange.line()
        if line is None or not choice.is_plain:
            return
        text, gaps = choice.stream.text, self.answer.state.metrics.gaps
        lane = Lane(text.machine, gaps, *parts, line.transport, line.fd, self._broken, choice.last_at)
        self.events.lane = lane
        self.answer.use_lane(choice, lane)

    def flush(self) -> None:
        """Frame all changed choices and send them in one write."""
        try:
            self._scheduled = False
            events, answer = self.events, self.answer
            if events.ended.done():
                return
            if events.paused:
                self._bound()
                return
            if answer.error is not None:
                if events.opened:
                    events.write(self.frames.error(answer.error) + self.frames.done, more=False)
                return
            parts = []
            for choice in list(self._moved):
                if choice.finish_reason is None and choice.started and choice.num_held < self._interval:
                    continue
                del self._moved[choice]
                parts.append(self.frames.chunks(choice))
            if answer.done:
                parts += (self.frames.usage(), self.frames.done)
            data = parts[0] if len(parts) == 1 else b"".join(parts)
            if data:
                events.write(data, more=not answer.done)
        except Exception as error:
            self._broken(error)

    def _broken(self, error: Exception) -> None:
        """End the stream after an error in our own code; the engine's step and the loop continue."""
        self.events.give_up()
        self.answer.broken(error)

    def _bound(self) -> None:
        """End the stream if a slow reader has too much unsent output."""
        if sum(choice.held_bytes() for choice in self._moved) > self._limit:
            self.events.give_up()
