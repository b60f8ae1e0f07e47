"""Realtime: a transcription session over a WebSocket: audio in as it is spoken, text deltas out.

Owner: loop, three tasks per session. In: client events (server/schema/realtime). Out: OpenAI's server events. Turns are
found by energy (server/speech/turns) or committed by the client. They are transcribed one after the other, as in
/v1/audio/transcriptions and with the same models. Samples outside turns are dropped; buffered bytes count as a request
body that is being uploaded. The session ends when the client disconnects or sends no event for long. In vLLM's form
(server/speech/realtime_events) the turns up to a final commit make one text.

    reader      append .. append | edges, commit | ...          waits while a turn is queued behind another
    worker                         turn 0 [decode, engine ....] turn 1 [...]        (realtime_turns)
    writer      created, started, stopped, committed, delta, delta, completed ...

A model that transcribes live (server/speech/live) gets a turn at its beginning: deltas come before `committed`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import orjson
from starlette.types import Message, Receive

from mm.errors import MediaError
from server.errors import ApiError, from_media, invalid, quoted
from server.http.exchange import Exchange, nothing
from server.schema.audio import TranscriptionForm
from server.schema.realtime import Append, Clear, Commit, Event, Input, Session, Update
from server.speech.growing import GrowingSound
from server.speech.realtime_events import PLAIN_RATE, SAMPLE_BYTES, described, new_id, opened, plain, vad_of
from server.speech.realtime_settings import LOGPROBS, Settings, form_with
from server.speech.realtime_turns import TaskOf, Turn, TurnWorker
from server.speech.sound_buffer import HeldBytes, SoundBuffer
from server.speech.turns import Edge, TurnFinder, Vad
from server.state import AppState

RATES = (8000, 48000)
IN_POOL = 32768  # longer events (characters) are parsed in the pool, longer samples (bytes) searched there
MIN_TURN_S = 0.1  # shortest turn that a client can commit
UNREAD_EVENTS = 256  # with more unsent events, the session stops reading from the client
GOING_AWAY = 1001


class RealtimeSession:
    """One client's session."""

    def __init__(
        self, exchange: Exchange, receive: Receive, form: TranscriptionForm, task_of: TaskOf, client: str
    ) -> None:
        """`task_of` makes a Task of a form, or raises ApiError. `client`: the client whose share of the body budget the
        buffered bytes take."""
        self._exchange, self._receive = exchange, receive
        self._task_of = task_of
        self._gone = False
        self._settings = Settings(form)
        self._sound = SoundBuffer()
        self._held = HeldBytes(exchange.state.body_budget, client)
        self._finder = TurnFinder(self._settings.rate, Vad())
        self._turn_start: int | None = None  # first sample of the open turn
        self._item_id = new_id("item")
        self._last_item_id: str | None = None
        self._plain = False  # whether the session has vLLM's form
        self._live: GrowingSound | None = None  # the open turn's samples, if the model transcribes live
        self._events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._worker = TurnWorker(exchange, self.emit, self._events.join, task_of, self._count_less)

    @property
    def _state(self) -> AppState:
        return self._exchange.state

    @property
    def _id(self) -> str:
        return f"sess_{self._exchange.request_id}"

    async def run(self) -> None:
        """Serve until the client has disconnected, or the session cannot continue."""
        arrival = self._exchange.arrival
        self.emit("session.created", id=self._id, created=int(time.time()), session=self._settings.described(self._id))
        tasks = [asyncio.ensure_future(part()) for part in (self._read, self._worker.run, self._write)]
        self._exchange.on_drain = self._leave
        try:
            await asyncio.wait(tasks, return_when="FIRST_COMPLETED")
        except asyncio.CancelledError:
            if self._state.phase != "draining":
                raise
        finally:
            self._exchange.on_drain = nothing
            for task in tasks:
                task.cancel()
            try:
                ended = await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                del self._worker  # breaks the reference cycle with the session
                self._held.become(0)
                self._exchange.arrival = arrival
        for result in ended:
            if isinstance(result, OSError):  # writing failed: the client has disconnected
                self._gone = True
            elif isinstance(result, Exception):
                raise result
        if not self._gone:
            with contextlib.suppress(OSError):  # the client has disconnected meanwhile
                await self._exchange.raw_send({"type": "websocket.close", "code": GOING_AWAY})

    def _leave(self) -> None:
        """End the session, because the server drains: an open turn ends here."""
        if self._live is not None:
            self._live.end()
        self._worker.leave()

    def emit(self, kind: str, **fields: Any) -> None:
        """Queues one server event."""
        event = plain(kind, fields) if self._plain else {"type": kind, "event_id": new_id("event"), **fields}
        if event is not None:
            self._events.put_nowait(event)

    # -- reader

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if self._events.qsize() > UNREAD_EVENTS:
                await self._events.join()
            await asyncio.sleep(0)  # thousands of tiny messages must not block other tasks
            message = await self._next()
            if message is None:
                return
            if message["type"] == "websocket.disconnect":
                self._gone = True
                return
            text: str | bytes = message.get("text") or message.get("bytes") or ""
            name: str | None = None
            try:
                if len(text) > IN_POOL:
                    event, pcm = await loop.run_in_executor(self._state.pool, opened, text)
                else:
                    event, pcm = opened(text)
                name = event.event_id
                await self._take(event, pcm)
            except (ApiError, MediaError) as error:
                told = from_media(error) if isinstance(error, MediaError) else error
                self.emit("error", error={**described(told), "event_id": name})

    async def _next(self) -> Message | None:
        """The next message; None if no message came for so long that the session ends. Answers to pings do not
        count.
        """
        seconds = self._state.config.limits.realtime_idle_timeout
        while True:
            try:
                async with asyncio.timeout(seconds):
                    return await self._receive()
            except TimeoutError:
                if self._worker.is_busy:
                    continue
            text = (
                f"no event came for {seconds:g} s; open another session when there is audio (--realtime-idle-timeout)"
            )
            self.emit("error", error={**described(ApiError(408, "session_idle", text)), "event_id": None})
            await self._events.join()
            return None

    async def _take(self, event: Event, pcm: bytes) -> None:
        if isinstance(event, Append):
            await self._append(pcm)
        elif isinstance(event, Commit):
            await self._commit_all(event.final)
        elif isinstance(event, Update) and event.model is not None:
            self._begin_plain(event.model)
        elif isinstance(event, Clear):
            self._forget_all()
            self.emit("input_audio_buffer.cleared")
        else:
            session = event.session or Session()
            self._update(session.input, session.include)

    def _begin_plain(self, model: str) -> None:
        """Switch to vLLM's form. Turns are found by energy, so that text comes before the audio has ended."""
        if not (self._plain or self._sound.is_untouched):
            raise invalid("model", "model: a session of this form begins with session.update, before the first audio")
        self._plain = True
        form = form_with(self._settings.form, model=model)
        self._task_of(form)  # raises if a turn would raise
        if self._settings.rate != PLAIN_RATE:
            self._settings = Settings(form, PLAIN_RATE)
            self._find_anew()

    def _update(self, given: Input, include: list[str] | None) -> None:
        settings = self._settings
        if include is not None:
            if set(include) - {LOGPROBS}:
                raise invalid("session.include", f"session.include: got {quoted(include)}; must be [], or {LOGPROBS}")
            settings = replace(settings, form=form_with(settings.form, include=["logprobs"] if include else None))
        rate = None if given.format is None else given.format.rate
        if rate is not None and rate != settings.rate:
            if not (RATES[0] <= rate <= RATES[1] and self._sound.is_untouched):
                text = f"rate: got {rate}; {RATES[0]} to {RATES[1]} are read, and it is set before the first audio"
                raise invalid("session.audio.input.format.rate", text)
            settings = replace(settings, rate=rate)
        if (wanted := given.transcription) is not None:
            form = form_with(
                settings.form,
                model=wanted.model or settings.form.model,
                language=wanted.language,
                prompt=wanted.prompt,
            )
            self._task_of(form)  # raises if a turn would raise
            settings = replace(settings, form=form)
        if given.turn_detection is not msgspec.UNSET:
            settings = replace(settings, vad=None if given.turn_detection is None else vad_of(given.turn_detection))
        found_anew = (settings.rate, settings.vad) != (self._settings.rate, self._settings.vad)
        self._settings = settings
        if found_anew:
            self._find_anew()
        self.emit("session.updated", session=self._settings.described(self._id))

    def _find_anew(self) -> None:
        """Restart the search for turns: an open turn continues; otherwise the buffered samples are searched again."""
        settings, speaking = self._settings, self._turn_start is not None
        if not speaking:
            self._sound.look_again()
        start, recent = self._sound.seen, self._finder.recent
        self._finder = TurnFinder(settings.rate, settings.vad or Vad(), start, speaking, recent)

    async def _append(self, pcm: bytes) -> None:
        if self._live is not None and self._live.late:  # its turn has failed; new samples belong to another turn
            self._forget_all()
        most = min(self._state.config.media.audio_max_bytes, self._longest())
        if self._size() + len(pcm) > most and self._settings.vad is None:
            raise invalid("audio", f"audio: the buffer holds {most} bytes at most; commit what is there, or clear it")
        sound = self._sound
        self._held.become(self._all_bytes() + len(pcm))
        sound.pcm += pcm
        if self._settings.vad is None:
            if self._live is not None:
                self._feed(self._live, sound.end)
            return
        fresh = sound.fresh()
        if len(fresh) > IN_POOL:
            loop = asyncio.get_running_loop()
            edges = await loop.run_in_executor(self._state.pool, edges_of, self._finder, fresh)
        else:
            edges = edges_of(self._finder, fresh)
        for edge in edges:
            if edge.begins:
                await self._begin_turn(max(edge.at, sound.origin))
            else:
                milliseconds = edge.at * 1000 // self._settings.rate
                self.emit("input_audio_buffer.speech_stopped", audio_end_ms=milliseconds, item_id=self._item_id)
                await self._commit(edge.at)
        now = sound.seen
        if self._turn_start is None:  # without an open turn only the padding is needed
            self._drop(now - self._finder.padding - self._settings.rate // 10)
        elif self._live is not None:
            self._feed(self._live, now)
        if self._turn_start is not None and self._size() > most:  # the turn is split: it continues as another turn
            await self._commit(now)
            await self._begin_turn(now)

    async def _begin_turn(self, start: int) -> None:
        """Begin a turn at sample `start`. A model that transcribes live gets the turn at once."""
        self._turn_start = start
        form, rate = self._settings.form, self._settings.rate
        self.emit("input_audio_buffer.speech_started", audio_start_ms=start * 1000 // rate, item_id=self._item_id)
        if self._worker.transcribes_live(form):
            self._live = GrowingSound(rate)
            await self._worker.put(Turn(self._item_id, self._live, form, rate, self._plain))

    def _feed(self, live: GrowingSound, end: int) -> None:
        """Move the open turn's samples before `end` from the buffer to `live`."""
        assert self._turn_start is not None, "a turn is open"
        live.feed(self._sound.between(self._turn_start, end))
        self._turn_start = end
        self._drop(end)

    def _forget_all(self) -> None:
        """Drop the open turn and all buffered samples."""
        if self._live is not None:
            self._live.drop()
        if self._turn_start is not None:
            self._item_id = new_id("item")  # events with the old id have been sent
        self._live = self._turn_start = None
        self._empty()

    def _empty(self) -> None:
        """Empty the buffer when no turn is open; the next bytes begin a new sample."""
        self._sound.clear()
        self._count_less()
        self._find_anew()

    def _longest(self) -> int:
        """Bytes of the longest allowed turn."""
        return int(self._state.config.media.audio_max_seconds * self._settings.rate) * SAMPLE_BYTES

    async def _commit_all(self, final: bool | None) -> None:
        """Make a turn of the buffered samples. In vLLM's form only a final commit does so; it also ends the text."""
        if not self._plain:
            await self._commit_now()
        elif final:
            if self._settings.vad is None and self._turn_start is None and len(self._sound) >= SAMPLE_BYTES:
                self._turn_start = self._sound.origin
            if self._turn_start is not None:
                await self._commit(self._sound.end)
            self._empty()
            await self._worker.turns.put(None)

    async def _commit_now(self) -> None:
        held = len(self._sound) // SAMPLE_BYTES / self._settings.rate
        held += self._live.seconds if self._live is not None else 0.0
        if held < MIN_TURN_S:
            text = f"the buffer holds {held * 1000:.0f} ms of audio; a turn has at least {MIN_TURN_S * 1000:.0f} ms"
            raise ApiError(400, "input_audio_buffer_commit_empty", text)
        if self._turn_start is None:
            self._turn_start = self._sound.origin
        await self._commit(self._sound.end)
        self._empty()

    async def _commit(self, end: int) -> None:
        """End the open turn at a sample and queue it; waits until the worker has taken the turn before."""
        assert self._turn_start is not None, "a turn is open"
        live, self._live = self._live, None
        pcm, item_id, settings = self._sound.between(self._turn_start, end), self._item_id, self._settings
        self.emit("input_audio_buffer.committed", item_id=item_id, previous_item_id=self._last_item_id)
        self._last_item_id, self._item_id, self._turn_start = item_id, new_id("item"), None
        if live is None:
            turn = Turn(item_id, pcm, settings.form, settings.rate, self._plain)
            self._worker.hold(turn)
            self._drop(end)
            await self._worker.turns.put(turn)
        else:
            live.feed(pcm)
            live.end()
            self._drop(end)

    def _size(self) -> int:
        """Bytes of the buffer and of the open live turn."""
        return len(self._sound) + (self._live.nbytes if self._live is not None else 0)

    def _all_bytes(self) -> int:
        """Bytes of the buffer and of turns that are not transcribed yet."""
        return len(self._sound) + self._worker.nbytes

    def _drop(self, sample: int) -> None:
        """Drop the buffered samples before `sample`."""
        self._sound.drop(sample)
        self._count_less()

    def _count_less(self) -> None:
        """Return the bytes that are no longer buffered to the budget."""
        self._held.become(min(self._held.count, self._all_bytes()))

    # -- writer

    async def _write(self) -> None:
        send = self._exchange.raw_send
        while True:
            event = await self._events.get()
            await send({"type": "websocket.send", "text": orjson.dumps(event).decode()})
            self._events.task_done()


def edges_of(finder: TurnFinder, pcm: bytes) -> list[Edge]:
    """The edges of turns in the next samples."""
    return finder.feed(np.frombuffer(pcm, "<i2").astype(np.float32) / 32768)
