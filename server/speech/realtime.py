"""Realtime: a transcription session over a WebSocket; sound in as it is spoken, texts out while they grow.

Owner: loop, three tasks per session. In: client events (server/schema/realtime). Out: OpenAI's server events. Turns are
found by energy (server/speech/turns) or committed by the client, and go one after the other through what serves
/v1/audio/transcriptions: whatever model hears there hears here. Sound that no turn needs is dropped; what is held
counts as a body that is being uploaded. A client that leaves ends everything. In vLLM's form (server/speech/
realtime_events) the turns up to a final commit make one text.

    reader      append .. append | edges, commit | ...          waits while a turn is queued behind another
    worker                         turn 0 [decode, engine ....] turn 1 [...]
    writer      created, started, stopped, committed, delta, delta, completed ...
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import orjson
from starlette.types import Receive

from engine.request import TokenLogprob
from mm.errors import MediaError
from server.errors import ApiError, from_media, internal, invalid, shown
from server.http.exchange import Exchange, fault
from server.job import scope_of
from server.schema.audio import TranscriptionForm
from server.schema.realtime import Append, Clear, Commit, Event, Input, Update
from server.speech.choose import hearer_of
from server.speech.hearer import Task
from server.speech.languages import separator
from server.speech.listening import Listening, Tell, all_logprobs, logprobs_of
from server.speech.realtime_events import PLAIN_RATE, SAMPLE_BYTES, described, new_id, opened, plain, vad_of, wave
from server.speech.stream import InOrder
from server.speech.turns import TurnFinder, Vad

RATES = (8000, 48000)
IN_POOL = 32768  # characters of an event that are read in the pool
MIN_TURN_S = 0.1  # of a turn that a client commits
UNREAD_EVENTS = 256  # behind which a client that does not read is not heard either
GOING_AWAY = 1001
LOGPROBS = "item.input_audio_transcription.logprobs"  # of a session's `include`
TaskOf = Callable[[TranscriptionForm], Task]


@dataclass(frozen=True, slots=True)
class Settings:
    """What a session is told, checked."""

    form: TranscriptionForm
    rate: int = 24000
    vad: Vad | None = field(default_factory=Vad)  # None: the client commits


@dataclass(frozen=True, slots=True)
class Turn:
    """Committed sound."""

    item_id: str
    pcm: bytes
    settings: Settings


@dataclass(slots=True)
class Whole:
    """The turns of one text, in vLLM's form."""

    order: InOrder
    prompt_tokens: int = 0
    generated_tokens: int = 0

    def usage(self) -> dict[str, int]:
        used = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.generated_tokens}
        return {**used, "total_tokens": self.prompt_tokens + self.generated_tokens}


class RealtimeSession:
    """One client."""

    def __init__(self, exchange: Exchange, receive: Receive, form: TranscriptionForm, task_of: TaskOf) -> None:
        """`task_of` checks what a client asks of its turns; raises ApiError."""
        self._exchange, self._state, self._receive = exchange, exchange.state, receive
        self._task_of = task_of
        self._gone = False
        self._settings = Settings(form)
        self._pcm = bytearray()
        self._origin = 0  # samples that came before `_pcm`
        self._heard = 0  # bytes of `_pcm` that the finder has seen
        self._held = 0  # bytes counted in the body budget
        self._finder = self._new_finder()
        self._turn_start: int | None = None  # sample at which the open turn begins
        self._item_id = new_id("item")
        self._last_item_id: str | None = None
        self._plain = False  # vLLM's form
        self._whole: Whole | None = None  # the text that grows, in that form
        self._turns: asyncio.Queue[Turn | None] = asyncio.Queue(maxsize=1)  # None: the text has ended
        self._events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def run(self) -> None:
        """Until the client has left, or the session cannot go on."""
        arrival = self._exchange.arrival
        created = {"id": f"sess_{self._exchange.request_id}", "created": int(time.time())}
        self.tell("session.created", **created, session=self._described())
        tasks = [asyncio.ensure_future(part()) for part in (self._read, self._work, self._write)]
        try:
            await asyncio.wait(tasks, return_when="FIRST_COMPLETED")
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            self._count(0)
            self._exchange.arrival = arrival
        for result in ended:
            if isinstance(result, OSError):  # written to a client that has left
                self._gone = True
            elif isinstance(result, Exception):
                raise result
        if not self._gone:
            with contextlib.suppress(OSError):  # it has left meanwhile
                await self._exchange.raw_send({"type": "websocket.close", "code": GOING_AWAY})

    def tell(self, kind: str, **fields: Any) -> None:
        """One event, in order."""
        event = plain(kind, fields) if self._plain else {"type": kind, "event_id": new_id("event"), **fields}
        if event is not None:
            self._events.put_nowait(event)

    # -- reader

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if self._events.qsize() > UNREAD_EVENTS:
                await self._events.join()
            await asyncio.sleep(0)  # others have their turn between two of thousands of tiny messages
            message = await self._receive()
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
                self.tell("error", error={**described(told), "event_id": name})

    async def _take(self, event: Event, pcm: bytes) -> None:
        if isinstance(event, Append):
            await self._append(pcm)
        elif isinstance(event, Commit):
            await self._commit_all(event.final)
        elif isinstance(event, Update) and event.model is not None:
            self._begin_plain(event.model)
        elif isinstance(event, Clear):
            self._drop(len(self._pcm))
            self._turn_start, self._finder = None, self._new_finder()
            self.tell("input_audio_buffer.cleared")
        else:
            given = event.session.input if hasattr(event.session, "input") else event.session.audio.input
            self._update(given, event.session.include)

    def _begin_plain(self, model: str) -> None:
        """vLLM's form from here on. Turns are found by their energy, so a text grows before its sound has ended."""
        if not self._plain and (self._origin or self._pcm):
            raise invalid("model", "model: a session of this form begins with session.update, before the first sound")
        self._plain = True
        form = form_with(self._settings.form, model=model)
        self._task_of(form)  # raises where a turn would
        if self._settings.rate != PLAIN_RATE:
            self._settings = Settings(form, PLAIN_RATE)
            self._finder = self._new_finder()

    def _update(self, given: Input, include: list[str] | None) -> None:
        settings = self._settings
        if include is not None:
            if set(include) - {LOGPROBS}:
                raise invalid("session.include", f"session.include: got {shown(include)}; must be [], or {LOGPROBS}")
            settings = replace(settings, form=form_with(settings.form, include=["logprobs"] if include else None))
        if given.format is not msgspec.UNSET and given.format.rate != settings.rate:
            rate = given.format.rate
            if not RATES[0] <= rate <= RATES[1] or self._origin or self._pcm:
                text = f"rate: got {rate}; {RATES[0]} to {RATES[1]} are read, and it is set before the first sound"
                raise invalid("session.audio.input.format.rate", text)
            settings = replace(settings, rate=rate)
        if given.transcription is not msgspec.UNSET and given.transcription is not None:
            wanted = given.transcription
            form = form_with(
                settings.form,
                model=wanted.model or settings.form.model,
                language=wanted.language,
                prompt=wanted.prompt,
            )
            self._task_of(form)  # raises where a turn would
            settings = replace(settings, form=form)
        if given.turn_detection is not msgspec.UNSET:
            settings = replace(settings, vad=None if given.turn_detection is None else vad_of(given.turn_detection))
        found_anew = (settings.rate, settings.vad) != (self._settings.rate, self._settings.vad)
        self._settings = settings
        if found_anew:
            self._finder, self._turn_start = self._new_finder(), None
        self.tell("session.updated", session=self._described())

    def _new_finder(self) -> TurnFinder:
        settings = self._settings
        self._heard = len(self._pcm) // SAMPLE_BYTES * SAMPLE_BYTES
        return TurnFinder(settings.rate, settings.vad or Vad(), self._origin + self._heard // SAMPLE_BYTES)

    async def _append(self, pcm: bytes) -> None:
        most = min(self._state.config.media.audio_max_bytes, self._longest())
        if len(self._pcm) + len(pcm) > most and self._settings.vad is None:
            raise invalid("audio", f"audio: the buffer holds {most} bytes at most; commit what is there, or clear it")
        self._count(len(self._pcm) + len(pcm))
        self._pcm += pcm
        if self._settings.vad is None:
            return
        end = len(self._pcm) // SAMPLE_BYTES * SAMPLE_BYTES
        fresh = np.frombuffer(bytes(self._pcm[self._heard : end]), "<i2").astype(np.float32) / 32768
        self._heard = end
        for edge in self._finder.feed(fresh):
            milliseconds = edge.at * 1000 // self._settings.rate
            if edge.begins:
                self._turn_start = max(edge.at, self._origin)
                self.tell("input_audio_buffer.speech_started", audio_start_ms=milliseconds, item_id=self._item_id)
            else:
                self.tell("input_audio_buffer.speech_stopped", audio_end_ms=milliseconds, item_id=self._item_id)
                await self._commit(edge.at)
        if self._turn_start is None:  # before a turn nothing is needed but its padding
            kept = (self._finder.padding + self._settings.rate // 10) * SAMPLE_BYTES
            self._drop(max(0, self._heard - kept))
        elif len(self._pcm) > most:
            await self._commit(self._origin + self._heard // SAMPLE_BYTES)

    def _longest(self) -> int:
        """Bytes of the longest turn."""
        return int(self._state.config.media.audio_max_seconds * self._settings.rate) * SAMPLE_BYTES

    async def _commit_all(self, final: bool | None) -> None:
        """What the buffer holds is a turn; in vLLM's form `final` ends the text, else sound is heard as it comes."""
        if not self._plain:
            await self._commit_now()
        elif final:
            if self._turn_start is not None:
                await self._commit(self._origin + len(self._pcm) // SAMPLE_BYTES)
            self._drop(len(self._pcm))
            self._finder = self._new_finder()
            await self._turns.put(None)

    async def _commit_now(self) -> None:
        if len(self._pcm) < MIN_TURN_S * self._settings.rate * SAMPLE_BYTES:
            held = len(self._pcm) * 1000 // SAMPLE_BYTES // self._settings.rate
            text = f"the buffer holds {held} ms of sound; a turn has at least {MIN_TURN_S * 1000:.0f} ms"
            raise ApiError(400, "input_audio_buffer_commit_empty", text)
        if self._turn_start is None:
            self._turn_start = self._origin
        await self._commit(self._origin + len(self._pcm) // SAMPLE_BYTES)
        self._finder = self._new_finder()

    async def _commit(self, end: int) -> None:
        """The open turn ends at a sample; it waits until the turn before has its place in the worker."""
        assert self._turn_start is not None, "a turn is open"
        first, last = ((at - self._origin) * SAMPLE_BYTES for at in (self._turn_start, end))
        turn = Turn(self._item_id, bytes(self._pcm[first:last]), self._settings)
        self.tell("input_audio_buffer.committed", item_id=turn.item_id, previous_item_id=self._last_item_id)
        self._last_item_id, self._item_id, self._turn_start = turn.item_id, new_id("item"), None
        self._drop(last)
        await self._turns.put(turn)

    def _drop(self, size: int) -> None:
        """Forgets the beginning of the buffer: whole samples."""
        size -= size % SAMPLE_BYTES
        del self._pcm[:size]
        self._origin += size // SAMPLE_BYTES
        self._heard = max(0, self._heard - size)
        self._count(len(self._pcm))

    def _count(self, size: int) -> None:
        """The buffer has so many bytes now. Raises where the server holds too many."""
        if size > self._held:
            self._state.body_budget.take(size - self._held)
        else:
            self._state.body_budget.give(self._held - size)
        self._held = size

    # -- worker

    async def _work(self) -> None:
        while True:
            turn = await self._turns.get()
            if turn is None:
                whole, self._whole = self._whole or Whole(InOrder(str)), None
                self.tell("transcription.done", text=whole.order.text, usage=whole.usage())
                continue
            try:
                await self._hear(turn)
            except (ApiError, MediaError) as error:
                told = from_media(error) if isinstance(error, MediaError) else error
                self._failed(turn, told)
                if self._state.phase == "draining":
                    await self._events.join()
                    return
            except Exception as error:
                fault.error("a turn failed: id=%s", self._exchange.request_id, exc_info=error)
                self._failed(turn, internal(self._exchange.request_id))
            await self._events.join()  # a reader that is away holds its own session only

    def _failed(self, turn: Turn, error: ApiError) -> None:
        kind = "conversation.item.input_audio_transcription.failed"
        self.tell(kind, item_id=turn.item_id, content_index=0, error=described(error))

    async def _hear(self, turn: Turn) -> None:
        """One turn, as a recording."""
        exchange, state, settings = self._exchange, self._state, turn.settings
        exchange.first_token, exchange.arrival = 0.0, time.monotonic()  # each turn has its own deadlines
        task = self._task_of(settings.form)
        hearer = hearer_of(exchange, task)
        listening = Listening(exchange, task, hearer)
        order, first = InOrder(lambda: separator(hearer.language)), 0
        if self._plain:
            self._whole = self._whole or Whole(order)
            order, first = self._whole.order, self._whole.order.front
        listening.told = self._teller(turn, order, first, task.with_logprobs)
        assert state.media is not None, "the route has looked for a model that hears"
        with state.places.hold(1, exchange.key_name):
            wav = wave(turn.pcm, settings.rate)
            async with state.media.recording(wav, hearer.cutting(), scope_of(exchange, task.salt)) as recording:
                said = await listening.run(recording)
                usage = {"type": "duration", "seconds": math.ceil(recording.seconds)}
        if self._whole is not None:
            self._whole.prompt_tokens += listening.prompt_tokens
            self._whole.generated_tokens += listening.generated_tokens
        kind = "conversation.item.input_audio_transcription.completed"
        more = {"logprobs": all_logprobs(state.tokenizer, said)} if task.with_logprobs else {}
        self.tell(kind, item_id=turn.item_id, content_index=0, transcript=order.text, usage=usage, **more)

    def _teller(self, turn: Turn, order: InOrder, first: int, with_logprobs: bool) -> Tell:
        kind, tokenizer = "conversation.item.input_audio_transcription.delta", self._exchange.state.tokenizer

        def told(window: int, text: str, tokens: Sequence[TokenLogprob]) -> None:
            if new := order.add(first + window, text, tokens):
                more = {"logprobs": logprobs_of(tokenizer, order.take_tokens())} if with_logprobs else {}
                self.tell(kind, item_id=turn.item_id, content_index=0, delta=new, **more)

        return told

    # -- writer

    async def _write(self) -> None:
        send = self._exchange.raw_send
        while True:
            event = await self._events.get()
            await send({"type": "websocket.send", "text": orjson.dumps(event).decode()})
            self._events.task_done()

    def _described(self) -> dict[str, Any]:
        """The session as clients see it."""
        settings = self._settings
        detection = None
        if settings.vad is not None:
            detection = {"type": "server_vad", **msgspec.to_builtins(settings.vad)}
        form = settings.form
        heard = {"model": form.model, "language": form.language, "prompt": form.prompt}
        audio = {
            "format": {"type": "audio/pcm", "rate": settings.rate},
            "transcription": heard,
            "turn_detection": detection,
            "noise_reduction": None,
        }
        name = f"sess_{self._exchange.request_id}"
        include = [LOGPROBS] if form.include else []
        told = {"object": "realtime.session", "type": "transcription", "include": include}
        return {"id": name, **told, "audio": {"input": audio}}


def form_with(form: TranscriptionForm, **changes: Any) -> TranscriptionForm:
    return msgspec.structs.replace(form, **changes)
