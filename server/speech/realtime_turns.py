"""Transcribes the turns of a realtime session, one after the other.

Owner: loop, the session's worker. In: turns when they are committed, or when they begin if the model transcribes live.
Out: events with the deltas and ends of their texts. A turn is either a recording, transcribed as in
/v1/audio/transcriptions, or a GrowingSound. In vLLM's form the turns up to a final commit make one text.

    turns    turn 0 [decode, engine ....] turn 1 [...] | None: the text has ended
    events   delta, delta, completed ...               | transcription.done
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.base.request import TokenLogprob
from mm.errors import MediaError
from server.errors import ApiError, from_media, internal
from server.http.exchange import Exchange, fault
from server.jobs.job import scope_of
from server.schema.audio import TranscriptionForm
from server.speech.choose import transcriber_of
from server.speech.growing import GrowingSound
from server.speech.languages import separator
from server.speech.listening import Listening, OnText, all_logprobs, logprobs_of
from server.speech.live import LiveListening
from server.speech.realtime_events import described, wave
from server.speech.speech_stream import InOrder
from server.speech.transcriber import Task
from server.speech.voxtral_realtime import VoxtralRealtimeTranscriber

TaskOf = Callable[[TranscriptionForm], Task]


class EmitEvent(Protocol):
    def __call__(self, kind: str, **fields: Any) -> None:
        """Queues one event of the session."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Committed samples, or the growing samples of a turn in progress."""

    item_id: str
    sound: bytes | GrowingSound
    form: TranscriptionForm
    rate: int
    plain: bool  # whether the session has vLLM's form

    @property
    def nbytes(self) -> int:
        return len(self.sound) if isinstance(self.sound, bytes) else self.sound.nbytes


@dataclass(slots=True)
class Whole:
    """The turns of one text in vLLM's form."""

    order: InOrder
    prompt_tokens: int = 0
    generated_tokens: int = 0

    def usage(self) -> dict[str, int]:
        used = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.generated_tokens}
        return {**used, "total_tokens": self.prompt_tokens + self.generated_tokens}


class TurnWorker:
    """The worker of one session."""

    def __init__(
        self,
        exchange: Exchange,
        emit: EmitEvent,
        sent_all: Callable[[], Any],
        task_of: TaskOf,
        freed: Callable[[], None],
    ) -> None:
        """`sent_all` waits until all events have been sent. `task_of` makes a Task of a form, or raises ApiError.
        `freed` is called when a turn's samples are freed."""
        self.turns: asyncio.Queue[Turn | None] = asyncio.Queue(maxsize=1)  # None ends the text
        self._exchange, self._state = exchange, exchange.state
        self._emit, self._sent_all, self._task_of = emit, sent_all, task_of
        self._whole: Whole | None = None  # the text in progress, in vLLM's form
        self._leaving: asyncio.Future[None] | None = None
        self._waiting_turns: list[Turn] = []
        self._freed = freed

    @property
    def nbytes(self) -> int:
        """Bytes of the turns that are not transcribed yet."""
        return sum(turn.nbytes for turn in self._waiting_turns)

    @property
    def is_busy(self) -> bool:
        """Whether an ended turn is not transcribed yet."""
        return any(isinstance(turn.sound, bytes) or turn.sound.ended for turn in self._waiting_turns)

    def hold(self, turn: Turn) -> None:
        """Counts the bytes of a turn that will be queued."""
        self._waiting_turns.append(turn)

    async def put(self, turn: Turn) -> None:
        """Queues a turn; waits until the worker has taken the turn before."""
        self.hold(turn)
        await self.turns.put(turn)

    def leave(self) -> None:
        """End the session after the queued turns."""
        self._leaving = asyncio.ensure_future(self.turns.put(None))

    def transcribes_live(self, form: TranscriptionForm) -> bool:
        """Whether the served model transcribes a turn while it is spoken."""
        return isinstance(transcriber_of(self._exchange, self._task_of(form)), VoxtralRealtimeTranscriber)

    async def run(self) -> None:
        """Transcribe turns until the session ends, or the server drains."""
        turn: Turn | None = None
        try:
            while turn is not None or self._leaving is None:
                turn = await self.turns.get()
                if turn is not None:
                    await self._try(turn)
                elif self._whole is not None or self._leaving is None:
                    whole, self._whole = self._whole or Whole(InOrder(str)), None
                    self._emit("transcription.done", text=whole.order.text, usage=whole.usage())
                await self._sent_all()  # a client that does not read delays only its own session
        finally:
            if self._leaving is not None:
                self._leaving.cancel()

    async def _try(self, turn: Turn) -> None:
        """Transcribe a turn; an error ends only this turn and is sent as an event."""
        try:
            await self._transcribe(turn)
        except (ApiError, MediaError) as error:
            self._failed(turn, from_media(error) if isinstance(error, MediaError) else error)
        except Exception as error:
            fault.error("a turn failed: id=%s", self._exchange.request_id, exc_info=error)
            self._failed(turn, internal(self._exchange.request_id))
        finally:
            if isinstance(turn.sound, GrowingSound):
                turn.sound.drop()  # samples that come later are ignored
            self._waiting_turns.remove(turn)
            self._freed()

    def _failed(self, turn: Turn, error: ApiError) -> None:
        if self._whole is not None:
            self._whole.order.skip()
        kind = "conversation.item.input_audio_transcription.failed"
        self._emit(kind, item_id=turn.item_id, content_index=0, error=described(error))

    async def _transcribe(self, turn: Turn) -> None:
        exchange, state = self._exchange, self._state
        exchange.first_token, exchange.arrival = 0.0, time.monotonic()  # each turn has its own deadlines
        task = self._task_of(turn.form)
        transcriber = transcriber_of(exchange, task)
        order, first = InOrder(lambda: separator(transcriber.language)), 0
        if turn.plain:
            self._whole = self._whole or Whole(order)
            order, first = self._whole.order, self._whole.order.front
        on_text = self._text_sender(turn, order, first, task.with_logprobs)
        listening: Listening
        with exchange.hold(1, "speech"):
            if isinstance(turn.sound, GrowingSound):
                assert isinstance(transcriber, VoxtralRealtimeTranscriber), "other models transcribe what is committed"
                listening = live = LiveListening(exchange, task, transcriber)
                live.on_text = on_text
                said, seconds = await live.follow(turn.sound), turn.sound.seconds
            else:
                listening = Listening(exchange, task, transcriber)
                listening.on_text = on_text
                assert state.media is not None, "the route has looked for a model that takes audio"
                wav, scope = wave(turn.sound, turn.rate), scope_of(exchange, task.salt)
                async with state.media.recording(wav, transcriber.cutting(), scope) as recording:
                    said, seconds = await listening.run(recording), recording.seconds
        if self._whole is not None:
            self._whole.prompt_tokens += listening.prompt_tokens
            self._whole.generated_tokens += listening.generated_tokens
        if isinstance(turn.sound, GrowingSound) and turn.sound.dropped:  # the client has cleared the turn
            order.skip()
            return
        kind = "conversation.item.input_audio_transcription.completed"
        usage = {"type": "duration", "seconds": math.ceil(seconds)}
        more = {"logprobs": all_logprobs(state.tokenizer, said)} if task.with_logprobs else {}
        self._emit(kind, item_id=turn.item_id, content_index=0, transcript=order.text, usage=usage, **more)

    def _text_sender(self, turn: Turn, order: InOrder, first: int, with_logprobs: bool) -> OnText:
        kind, tokenizer = "conversation.item.input_audio_transcription.delta", self._state.tokenizer

        def on_text(window: int, text: str, tokens: Sequence[TokenLogprob]) -> None:
            if isinstance(turn.sound, GrowingSound) and turn.sound.dropped:
                return
            if new := order.add(first + window, text, tokens):
                more = {"logprobs": logprobs_of(tokenizer, order.take_tokens())} if with_logprobs else {}
                self._emit(kind, item_id=turn.item_id, content_index=0, delta=new, **more)

        return on_text
