"""Transcriber: builds the requests to the engine that transcribe one window of a recording.

Owner: loop. ChatTranscriber is for models that take audio in chat messages: the window is an audio part of a message,
and an instruction follows it. In: a request's Task, and windows. Out: Jobs for the engine, and Segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.base.request import TokenLogprob
from mm.item import Processed
from mm.recording import Window
from mm.splice import splice
from mm.transform.quiet import Cutting
from server.flags.config import SpeechConfig
from server.http.exchange import Exchange
from server.jobs.job import Job, job_of
from server.jobs.sampling import Asked
from server.render.prompt import Prompt
from server.speech.languages import name_of
from server.speech.segments import Segment, Word, average_logprob, compression_ratio
from server.state import AppState

MAX_ID = 1 << 31
# The prompts that models were trained with, by model_type; used if --transcription-prompt has its default.
TRANSCRIPTION_PROMPTS = {
    "audioflamingo3": "Transcribe the input speech.",
    "glmasr": "Please transcribe this audio into text",
    "phi4mm": "Transcribe the audio clip into text.",
    "granite_speech": "can you transcribe the speech into a written format?",
}
SILENT_SOUND = "AAAA"  # base64 in place of a window while the prompt is rendered


@dataclass(frozen=True, slots=True)
class Task:
    """The options of one transcription request."""

    name: str  # transcribe | translate
    language: str  # code of the recording's language; "": unknown
    to_language: str  # language of the text, if the task is translate
    prompt: str
    with_times: bool  # the model writes timestamps, if it can
    with_segments: bool  # the response has the times of segments
    with_words: bool  # the response has the times of words
    with_logprobs: bool  # the response has each token's log-probability
    asked: Asked
    salt: str
    priority: int


@dataclass(slots=True)
class Said:
    """The engine's output for one window."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # without the stop token
    logprobs: list[TokenLogprob] = field(default_factory=list)  # with the stop token's
    temperature: float = 0.0
    no_speech_prob: float | None = None
    words: Sequence[Word] = ()  # times count from the window's start
    num_reported: int = 0  # tokens whose text was emitted before the output ended


class Ask(Protocol):
    """Sends one request to the engine."""

    async def __call__(self, job: Job, window: int | None = None, text_below: int = MAX_ID) -> Said:
        """The engine's output. If `window` is given, its text is also emitted as that window's, delta by delta. Token
        ids at or above `text_below` are left out of the text."""


class Transcriber(Protocol):
    """Builds and sends one transcription's requests to the engine."""

    @property
    def language(self) -> str:
        """The code of the text's language; "" while it is unknown."""

    def cutting(self) -> Cutting:
        """The rules by which the recording is cut into windows."""

    async def begin(self, ask: Ask, first: Processed) -> None:
        """Called once, with the first window, before any window is transcribed."""

    async def transcribe(self, ask: Ask, number: int, window: Window, processed: Processed) -> Said:
        """Transcribes one window."""

    def segments(self, window: Window, said: Said) -> Sequence[Segment]:
        """The window's text as segments with start and end times."""


class ChatTranscriber:
    """Transcribes with a model that takes audio as a part of a chat message."""

    def __init__(self, exchange: Exchange, task: Task) -> None:
        self._exchange = exchange
        self._state: AppState = exchange.state
        self._task = task
        self._prompt: Prompt | None = None

    def cutting(self) -> Cutting:
        speech, media = self._state.config.speech, self._state.media
        assert media is not None, "the model takes audio"
        assert media.processor is not None, "with a processor"
        longest = min(speech.transcription_window, media.processor.longest_sound)
        return Cutting(longest, speech.transcription_pause)

    @property
    def language(self) -> str:
        return self._task.to_language or self._task.language

    async def begin(self, ask: Ask, first: Processed) -> None:
        self._prompt = await self._rendered()

    async def transcribe(self, ask: Ask, number: int, window: Window, processed: Processed) -> Said:
        assert self._prompt is not None, "begin comes first"
        return await ask(self._job(processed, self._prompt, self._task.asked), number)

    def _job(self, processed: Processed, prompt: Prompt, asked: Asked) -> Job:
        """One request about a window."""
        task, media = self._task, self._state.media
        assert media is not None, "the model takes audio"
        spliced = splice(prompt.token_ids, prompt.slots, [processed], media.processor)
        return job_of(self._exchange, prompt, spliced, asked, salt=task.salt, priority=task.priority, param="prompt")

    async def _rendered(self) -> Prompt:
        """The prompt of every window: a message with an audio part and the instruction."""
        content = [
            {"type": "input_audio", "input_audio": {"data": SILENT_SOUND, "format": "wav"}},
            {"type": "text", "text": self.instruction()},
        ]
        return await self._state.renderer.chat([{"role": "user", "content": content}])

    def instruction(self) -> str:
        """The operator's instruction, followed by the client's prompt."""
        task, speech = self._task, self._state.config.speech
        translates = task.name == "translate"
        text = speech.translation_prompt if translates else speech.transcription_prompt
        if text == SpeechConfig().transcription_prompt:
            text = TRANSCRIPTION_PROMPTS.get(str(self._state.engine.model.raw.get("model_type")), text)
        language = task.to_language if translates else task.language
        text = text.replace("{language}", name_of(language).capitalize() if language else "the language spoken")
        return f"{text}\n{task.prompt}" if task.prompt else text

    def segments(self, window: Window, said: Said) -> Sequence[Segment]:
        """One segment for the whole window: the model writes no timestamps."""
        text = said.text.strip()
        if not text:
            return ()
        return (
            Segment(
                start=window.start,
                end=window.end,
                text=text,
                token_ids=said.token_ids,
                seek=round(window.start * 100),
                temperature=said.temperature,
                avg_logprob=average_logprob([entry.logprob for entry in said.logprobs], len(said.token_ids)),
                compression_ratio=compression_ratio(text),
            ),
        )
