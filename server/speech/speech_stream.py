"""SpeechStream: a streamed transcript; each event has the fields of OpenAI's and of vLLM's clients.

Owner: loop. In: text deltas of a Listening. Out: server-sent events. Windows are transcribed concurrently and emitted
in order: the text of a later window is buffered until the earlier windows have ended. Deltas for a client that does not
read are merged.

    data: {"type":"transcript.prompt_progress","window":0,"prompt_progress":{..},"choices":[],..}     if requested
    data: {"type":"transcript.text.delta","delta":"..","choices":[{"delta":{"content":".."},"finish_reason":null}],..}
    data: {"type":"transcript.text.done","text":"..","choices":[],"usage":{..},..}
    data: [DONE]
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from engine.base.request import Progress, TokenLogprob
from mm.recording import Recording
from server.errors import ApiError
from server.http.exchange import ClientGone
from server.http.sse import DONE, EventStream
from server.output.choices import progress_of
from server.schema.audio import SpeechForm
from server.speech.listening import Listening, all_logprobs, logprobs_of
from server.speech.transcriber import Said


class InOrder:
    """Joins the texts of windows: the text that can be emitted now, in the order of windows. Pure."""

    def __init__(self, space: Callable[[], str]) -> None:
        self.text = ""  # all emitted text
        self._space = space
        self._waiting: dict[int, str] = {}
        self._tokens: dict[int, list[TokenLogprob]] = {}  # tokens of windows whose text waits
        self._new_tokens: list[TokenLogprob] = []  # tokens of emitted text; see `take_tokens`
        self._ended: set[int] = set()
        self._front = 0
        self._held = ""  # held-back spaces at the end of the front window's text
        self._begun = False  # the front window has emitted text

    def add(self, window: int, text: str, tokens: Sequence[TokenLogprob]) -> str:
        """Adds a window's next text and its tokens; "" ends the window. Returns the text that is emitted now."""
        self._tokens.setdefault(window, []).extend(tokens)
        if text:
            self._waiting[window] = self._waiting.get(window, "") + text
        else:
            self._ended.add(window)
        before = len(self.text)
        self._take()
        while self._front in self._ended:
            self._front += 1
            self._held, self._begun = "", False
            self._take()
        return self.text[before:]

    @property
    def front(self) -> int:
        """The first window that has not ended."""
        return self._front

    def skip(self) -> None:
        """Drops the buffered text of all windows that have not ended; the next text begins a new window."""
        self._waiting.clear()
        self._tokens.clear()
        self._new_tokens.clear()
        self._ended.clear()
        self._held, self._begun = "", False

    def take_tokens(self) -> list[TokenLogprob]:
        """Tokens of the text emitted since the last call."""
        taken, self._new_tokens = self._new_tokens, []
        return taken

    def _take(self) -> None:
        """Emits the front window's text, without spaces at either end of the window."""
        self._new_tokens += self._tokens.pop(self._front, ())
        text = self._held + self._waiting.pop(self._front, "")
        if not self._begun:
            text = text.lstrip()
        stripped = text.rstrip()
        self._held = text[len(stripped) :]
        if stripped:
            self.text += stripped if self._begun or not self.text else self._space() + stripped
            self._begun = True


class SpeechStream:
    """One streamed transcript."""

    def __init__(self, listening: Listening, name: str, model: str, space: Callable[[], str], form: SpeechForm) -> None:
        self.listening = listening
        self.order = InOrder(space)
        self.events = EventStream(listening.exchange, self.flush)
        self._fields = {"id": name, "object": "transcription.chunk", "created": int(time.time()), "model": model}
        self._continuous = bool(form.stream_continuous_usage_stats)
        self._with_usage = form.stream_include_usage is not False
        self._tokenizer = listening.exchange.state.tokenizer
        self._new = ""
        self._last: bytes = b""
        listening.on_text, listening.on_progress = self._take, self._progress

    async def run(self, recording: Recording) -> None:
        """Runs until the last byte is written; raises ApiError while the response has not begun."""
        events = self.events
        listening = asyncio.ensure_future(self.listening.run(recording))
        try:
            await asyncio.wait((listening, events.ended), return_when="FIRST_COMPLETED")
            if listening.done():
                self._end(listening.exception(), listening)
                await events.ended
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            events.close()
            await events.settle()
        if events.lost:
            self.listening.exchange.abort()
            await asyncio.sleep(0)  # the connection handles the abort before the app returns
            raise ClientGone

    def _take(self, window: int, text: str, tokens: Sequence[TokenLogprob]) -> None:
        self._new += self.order.add(window, text, tokens)
        self.flush()

    def _progress(self, window: int, progress: Progress) -> None:
        """Reports the progress of a window's prompt, unless the reader is slow: later reports replace this one."""
        if self.events.takes_more:
            event = {"type": "transcript.prompt_progress", "window": window, "choices": [], **progress_of(progress)}
            self.events.write(self._framed(event))

    def _end(self, error: BaseException | None, listening: asyncio.Future[list[Said]]) -> None:
        if error is not None:
            if not isinstance(error, ApiError) or not self.events.opened:
                raise error
            self._last = b"data: " + error.body() + b"\n\n" + DONE
        else:
            done: dict[str, Any] = {"type": "transcript.text.done", "text": self.order.text, "choices": []}
            if self.listening.task.with_logprobs:
                done["logprobs"] = all_logprobs(self._tokenizer, listening.result())
            if self._with_usage:
                done["usage"] = self._usage()
            self._last = self._event({"delta": {}, "finish_reason": "stop"}, "") + self._framed(done) + DONE
        self.flush()

    def flush(self) -> None:
        """Writes the new text, unless the client does not read: `on_writable` then calls this again."""
        events = self.events
        if not events.takes_more:
            if len(self._new) > self.listening.exchange.state.config.limits.stream_buffer_bytes:
                events.give_up()
            return
        frames = b""
        if self._new:
            frames = self._event({"delta": {"content": self._new}, "finish_reason": None}, self._new)
            self._new = ""
        if frames or self._last:
            events.write(frames + self._last, more=not self._last)

    def _event(self, choice: dict[str, Any], delta: str) -> bytes:
        event: dict[str, Any] = {"type": "transcript.text.delta", "delta": delta, "choices": [{"index": 0, **choice}]}
        if self.listening.task.with_logprobs:
            event["logprobs"] = logprobs_of(self._tokenizer, self.order.take_tokens())
        if self._continuous:
            event["usage"] = self._usage()
        return self._framed(event)

    def _framed(self, event: dict[str, Any]) -> bytes:
        return b"data: " + orjson.dumps({**self._fields, **event}) + b"\n\n"

    def _usage(self) -> dict[str, Any]:
        listening = self.listening
        prompt, generated, audio = listening.prompt_tokens, listening.generated_tokens, listening.audio_tokens
        return {
            "type": "tokens",
            "prompt_tokens": prompt,
            "input_tokens": prompt,
            "completion_tokens": generated,
            "output_tokens": generated,
            "total_tokens": prompt + generated,
            "input_token_details": {"audio_tokens": audio, "text_tokens": prompt - audio},
        }
