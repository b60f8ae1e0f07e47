"""Qwen3AsrTranscriber: requests to Qwen3-ASR, and the text inside its output.

Owner: loop. In: windows of a recording. Out: Said. The model writes the language before the text. If the client names
no language, a first request for each window ends at the marker after the language, and a second request continues from
there; the prefix cache holds the window's part of the first request.

    system: the client's prompt   user: [window]   assistant: | language German<asr_text>
    system: the client's prompt   user: [window]   assistant: language German<asr_text> | text
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from mm.item import Processed
from mm.recording import Window
from server.errors import invalid, not_here
from server.http.exchange import Exchange
from server.render.prompt import Prompt
from server.speech.languages import LANGUAGES, name_of
from server.speech.transcriber import SILENT_SOUND, Ask, ChatTranscriber, Said, Task

LANGUAGE, MARK, NONE = "language ", "<asr_text>", "None"  # "None": no speech
TRANSCRIBED = frozenset((
    "ar", "yue", "zh", "cs", "da", "nl", "en", "tl", "fi", "fr", "de", "el", "hi", "hu", "id", "it", "ja", "ko", "mk",
    "ms", "fa", "pl", "pt", "ro", "ru", "es", "sv", "th", "tr", "vi",
))  # fmt: skip
OTHER_NAMES = {"tl": "Filipino"}
MOST_TOKENS = 16  # tokens of a language's name


def spoken(code: str) -> str:
    """A language's name as the model writes it."""
    return OTHER_NAMES.get(code, name_of(code).capitalize())


CODES = {spoken(code): code for code in LANGUAGES}


class Qwen3AsrTranscriber(ChatTranscriber):
    """One transcription's requests to Qwen3-ASR."""

    def __init__(self, exchange: Exchange, task: Task) -> None:
        if task.name == "translate":
            raise not_here(None, "Qwen3-ASR transcribes and does not translate; use /v1/audio/transcriptions")
        if task.language and task.language not in TRANSCRIBED:
            text = f"language: got {task.language}; this model transcribes {', '.join(sorted(TRANSCRIBED))}"
            raise invalid("language", text)
        super().__init__(exchange, task)
        self._first = ""  # the first window's language

    @property
    def language(self) -> str:
        return self._task.language or self._first

    async def transcribe(self, ask: Ask, number: int, window: Window, processed: Processed) -> Said:
        language = spoken(self._task.language) if self._task.language else await self._listened(ask, processed)
        if number == 0:
            self._first = CODES.get(language, "")
        job = self._job(processed, self._with(f"{LANGUAGE}{language}{MARK}"), self._task.asked)
        return await ask(job, number)

    async def _listened(self, ask: Ask, processed: Processed) -> str:
        """The language of a window, as the model writes it."""
        mark, asked = self._state.tokenizer.id_of(MARK), self._task.asked
        params = replace(
            asked.params,
            max_tokens=MOST_TOKENS,
            temperature=0.0,
            logprobs=None,
            stop_token_ids=(*asked.params.stop_token_ids, *(() if mark is None else (mark,))),
        )
        said = await ask(self._job(processed, self._with(""), replace(asked, params=params, max_tokens=MOST_TOKENS)))
        return said.text.partition(MARK)[0].removeprefix(LANGUAGE).strip() or NONE

    def _with(self, begun: str) -> Prompt:
        """The prompt followed by the beginning of the answer."""
        assert self._prompt is not None, "begin comes first"
        ids = self._state.tokenizer.encode(begun) if begun else []
        return replace(self._prompt, token_ids=np.array([*self._prompt.token_ids, *ids], np.int32))

    async def _rendered(self) -> Prompt:
        sound = {"type": "input_audio", "input_audio": {"data": SILENT_SOUND, "format": "wav"}}
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": self._task.prompt},
            {"role": "user", "content": [sound]},
        ]
        return await self._state.renderer.chat(messages)
