"""WhisperTranscriber: requests to Whisper: prompts of marker tokens, language detection, temperature fallback.

Owner: loop. In: windows of a recording. Out: Said, by the rules of OpenAI's whisper: a text that repeats itself or has
a low log-probability is sampled again at a higher temperature; a window with a high no-speech probability and a low
log-probability has no text. The first request about a window, one token after <|startoftranscript|>, detects the
language and the no-speech probability; the requests that follow find its encoder output in the prefix cache.

    [window] (<|startofprev|> prompt) <|startoftranscript|> | language, no_speech_prob
    [window] (<|startofprev|> prompt) <|startoftranscript|> <|de|> <|transcribe|> <|notimestamps|> | text
    [window] (<|startofprev|> prompt) <|startoftranscript|> <|de|> <|transcribe|> | <|0.00|> text <|1.20|>
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from engine.base.request import TimestampRules
from mm.item import Processed
from mm.processors.whisper import Whisper
from mm.recording import Window
from mm.splice import splice
from mm.transform.quiet import Cutting
from server.errors import invalid, not_here
from server.http.exchange import Exchange
from server.jobs.job import Job, job_of
from server.jobs.sampling import Asked
from server.render.prompt import Prompt
from server.render.whisper_tokens import WhisperTokens
from server.speech.segments import Segment, Word, average_logprob, compression_ratio
from server.speech.timed import text_of, timed
from server.speech.transcriber import Ask, Said, Task
from server.speech.words import FRAME_S, words_of

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
MAX_COMPRESSION_RATIO = 2.4
LEAST_AVG_LOGPROB = -1.0
MAX_NO_SPEECH_PROB = 0.6


class WhisperTranscriber:
    """Builds and sends one transcription's requests to Whisper."""

    def __init__(self, exchange: Exchange, task: Task, tokens: WhisperTokens) -> None:
        if task.name == "translate" and (tokens.translate is None or task.to_language != "en"):
            raise not_here(
                "to_language",
                "to_language: Whisper translates into English only, and only models with many languages translate",
            )
        if task.language and tokens.languages and task.language not in tokens.languages:
            raise invalid("language", f"language: {task.language} is not among the model's languages")
        if not tokens.languages and task.language not in ("", "en"):
            raise invalid("language", f"language: got {task.language}; this model transcribes English only")
        self._exchange = exchange
        self._task = task
        self._tokens = tokens
        self._language = task.language or ("" if tokens.languages else "en")
        self._previous = self._previous_ids()

    @property
    def language(self) -> str:
        return self._task.to_language or self._language

    def cutting(self) -> Cutting:
        state = self._exchange.state
        assert state.media is not None
        processor = state.media.processor
        assert isinstance(processor, Whisper), "the family names its processor"
        return Cutting(min(state.config.speech.transcription_window, processor.seconds))

    def _previous_ids(self) -> list[int]:
        """The client's prompt as the text before the window; a long prompt is truncated to its end."""
        tokens, state, text = self._tokens, self._exchange.state, self._task.prompt
        if not text or tokens.previous is None:
            return []
        most = (state.engine.model.max_position - state.engine.model.encoder_prefix) // 2 - 1
        ids = [token for token in state.tokenizer.encode(" " + text) if token < tokens.first_marker]
        return [tokens.previous, *ids[-most:]]

    async def begin(self, ask: Ask, first: Processed) -> None:
        """Detect the language of the first window and use it for all windows."""
        if not self._language:
            self._language, _ = await self._listened(ask, first)

    async def transcribe(self, ask: Ask, number: int, window: Window, processed: Processed) -> Said:
        task = self._task
        if task.asked.stream:  # emitted text cannot be taken back
            return await ask(self._job(processed, task.asked.params.temperature), number, self._tokens.first_marker)
        _, no_speech = await self._listened(ask, processed)
        said = Said()
        temperatures = (task.asked.params.temperature,) if task.asked.params.temperature else TEMPERATURES
        for temperature in temperatures:
            said = await ask(self._job(processed, temperature), None, self._tokens.first_marker)
            said.no_speech_prob = no_speech
            if not self._is_poor(said) or self._is_silent(said):
                break
        if self._is_silent(said):
            return replace(said, text="", token_ids=[])
        return replace(said, words=await self._words(window, processed, said)) if task.with_words else said

    async def _words(self, window: Window, processed: Processed, said: Said) -> Sequence[Word]:
        """The words of a window with their times, from the decoder's attention to the sound."""
        tokens, state = self._tokens, self._exchange.state
        text = [token for token in said.token_ids if token < tokens.first_marker]
        if not text:
            return ()
        prompt = [*self._start(), tokens.no_timestamps]
        weights = await state.engine.sound_attention(
            processed.parts[0].features, [*prompt, *text], tokens.alignment_heads
        )
        rows = int((window.end - window.start) / FRAME_S + 1e-6)
        work = partial(
            words_of,
            text,
            weights[:, len(prompt) - 1 :, :rows],
            state.tokenizer.decode,
            self.language,
            tokens.median_width,
        )
        return await asyncio.get_running_loop().run_in_executor(state.pool, work)

    def _is_poor(self, said: Said) -> bool:
        """Whether the text is repetitive or has a low log-probability."""
        text = said.text.strip()
        repeats = bool(text) and compression_ratio(text) > MAX_COMPRESSION_RATIO
        return repeats or self._average(said) < LEAST_AVG_LOGPROB

    def _is_silent(self, said: Said) -> bool:
        """Whether the no-speech probability is high and the text's log-probability low."""
        assert said.no_speech_prob is not None
        return said.no_speech_prob > MAX_NO_SPEECH_PROB and self._average(said) < LEAST_AVG_LOGPROB

    def _average(self, said: Said) -> float:
        return average_logprob([entry.logprob for entry in said.logprobs], len(said.token_ids))

    async def _listened(self, ask: Ask, processed: Processed) -> tuple[str, float]:
        """The detected language of a window, and its no-speech probability."""
        tokens = self._tokens
        params = replace(
            self._task.asked.params,
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            logprobs=0,
            logprob_token_ids=(tokens.no_speech,),
            allowed_token_ids=tuple(tokens.languages.values()) or None,
        )
        asked = replace(self._task.asked, params=params, max_tokens=1)
        said = await ask(self._made(processed, [*self._previous, tokens.start], asked))
        if not said.logprobs:  # aborted
            return self._language, 0.0
        entry = said.logprobs[0]
        found = dict(zip(entry.top_ids, entry.top_logprobs)).get(tokens.no_speech, -math.inf)
        codes = {token: code for code, token in tokens.languages.items()}
        return codes.get(entry.token_id, self._language), math.exp(found)

    def _job(self, processed: Processed, temperature: float) -> Job:
        """The request for the text of a window."""
        task, tokens = self._task, self._tokens
        prompt = [*self._previous, *self._start()]
        params = replace(
            task.asked.params,
            temperature=temperature,
            logprobs=task.asked.params.logprobs if task.asked.stream else 0,
            bad_words=tuple((token,) for token in tokens.suppressed),
            not_first_token_ids=tokens.not_first,
        )
        if task.with_times:
            times = TimestampRules(tokens.first_time, tokens.first_marker, tokens.latest_start)
            params = replace(params, timestamps=times)
        else:
            prompt.append(tokens.no_timestamps)
        return self._made(processed, prompt, replace(task.asked, params=params))

    def _start(self) -> list[int]:
        """The markers that begin a text."""
        tokens = self._tokens
        if not tokens.languages:
            return [tokens.start]
        wanted = tokens.translate if self._task.name == "translate" else tokens.transcribe
        assert wanted is not None
        return [tokens.start, tokens.languages[self._language], wanted]

    def _made(self, processed: Processed, ids: list[int], asked: Asked) -> Job:
        task, state = self._task, self._exchange.state
        assert state.media is not None
        processor = state.media.processor
        assert processor is not None
        prompt = Prompt(np.array([processor.placeholder("audio"), *ids], np.int32), (), (0,), None)
        spliced = splice(prompt.token_ids, prompt.slots, [processed], processor)
        return job_of(self._exchange, prompt, spliced, asked, salt=task.salt, priority=task.priority, param="prompt")

    def segments(self, window: Window, said: Said) -> Sequence[Segment]:
        """Segments by the timestamps that the model wrote; their other numbers are the window's."""
        if not said.text.strip():
            return ()
        tokens, decode = self._tokens, self._exchange.state.tokenizer.decode
        return [
            Segment(
                window.start + piece.start,
                window.start + piece.end,
                text_of(piece, tokens.first_marker, decode),
                piece.token_ids,
                round(window.start * 100),
                said.temperature,
                self._average(said),
                compression_ratio(said.text.strip()),
                said.no_speech_prob,
            )
            for piece in timed(said.token_ids, tokens.first_time, window.end - window.start)
        ]
