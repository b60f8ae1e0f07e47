"""LiveListening: transcribes a turn while it is spoken, by a model with a causal audio encoder (Voxtral Realtime).

Owner: loop, the session's worker; features are computed in the pool. In: a GrowingSound. Out: the text of each window,
and text deltas. Each request to the engine has the window's samples so far and its tokens so far: the prefix
cache holds all but the last tokens, and the audio encoder runs over the whole window again (30 s of sound are 1,500
encoder rows). Requests run one after the other: a busy engine gets fewer and longer requests.

    sound       ....|......|......|......| end
    requests    [prompt][prompt, tokens][prompt, tokens ..][.., silence]
"""

from __future__ import annotations

import asyncio
import secrets
import time

from mm.decode.audio import SAMPLE_RATE
from mm.item import MediaItem, MediaOptions, Processed
from mm.item_job import DIGEST_BYTES
from mm.transform.quiet import quiet_end
from server.errors import ApiError
from server.http.exchange import Exchange
from server.output.text import TextStream
from server.speech.growing import GrowingSound
from server.speech.listening import ENDED_BY_TOKEN, Listening
from server.speech.transcriber import Said, Task
from server.speech.voxtral_realtime import VoxtralRealtimeTranscriber

FRESH_ROWS = 3  # a request has at least so many more rows (of 80 ms) than the one before
SHARE = 64  # and at least this fraction of the window, whose rows the encoder computes again


class LiveListening(Listening):
    """The live transcription of one turn. Owner: loop."""

    def __init__(self, exchange: Exchange, task: Task, transcriber: VoxtralRealtimeTranscriber) -> None:
        super().__init__(exchange, task, transcriber)
        self._live = transcriber
        self._processor = transcriber.processor
        limits = self._state.engine.limits
        rows = min(limits.encoder_capacity, limits.max_model_len) - self._processor.before - self._processor.behind - 1
        longest = int(self._state.config.speech.transcription_window * SAMPLE_RATE)
        self._longest = max(self._processor.samples, min(longest, rows * self._processor.samples))

    async def follow(self, sound: GrowingSound) -> list[Said]:
        """Transcribe a growing sound; returns the text of each window. Raises the error that ended it early."""
        said: list[Said] = []
        await self._state.running.wait()  # an operator may have paused the server
        await self._come(sound, 1)
        self.exchange.arrival = time.monotonic()  # deadlines count from the first samples
        with self.opened():
            self._workers.append(asyncio.ensure_future(self._windows(sound, said)))
            await self._settled()
        return said

    async def _windows(self, sound: GrowingSound, said: list[Said]) -> None:
        while not self._aborted and not sound.dropped:
            if len(sound.samples):
                said.append(Said(temperature=self.task.asked.params.temperature))
                await self._window(sound, len(said) - 1, said[-1])
                self.on_text(len(said) - 1, "", ())
            elif sound.complete:
                return
            else:
                await self._come(sound, 1)

    async def _window(self, sound: GrowingSound, number: int, said: Said) -> None:
        """Transcribe one window: from the first sample to a quiet place, the sound's end or a stop token. Drop the
        window's samples at its end."""
        processor, digest = self._processor, secrets.token_bytes(DIGEST_BYTES)
        text = TextStream(self._state.tokenizer, at_start=True)
        done, tokens = 0, len(processor.tokens)
        while not self._aborted and not sound.dropped:
            end = await self._end(sound, done, tokens + max(FRESH_ROWS, tokens // SHARE))
            if sound.dropped:
                return
            done = len(sound.samples) if end is None else end
            job = self._live.question(await self._prepared(sound, end, digest), said.token_ids)
            if not said.token_ids:
                self._count_prompt(job)
            reason = await self._answer(job, said, text, number, goes_on=end is None)
            tokens = len(processor.tokens) + len(said.token_ids)
            if end is None and reason in ENDED_BY_TOKEN:
                end = min(done, (tokens + 1 - processor.before) * processor.samples)
            if end is not None:
                sound.forget(end)
                return

    async def _end(self, sound: GrowingSound, done: int, rows: int) -> int | None:
        """Wait for sound. Returns the window's end in samples; None if the window continues and `rows` of its rows are
        final."""
        longest, wanted = self._longest, (rows - self._processor.before) * self._processor.samples
        while True:
            await self._come(sound, min(wanted, longest))
            count, first = len(sound.samples), max(done, longest // 2)
            if count <= longest and sound.complete:
                return count
            if count > first:
                samples, full = sound.samples[:longest], count >= longest
                loop = asyncio.get_running_loop()
                end = await loop.run_in_executor(self._state.pool, quiet_end, samples, SAMPLE_RATE, first, full)
                if end is not None:
                    return end
            if self._processor.settled(count) >= rows:
                return None
            wanted = count + self._processor.samples

    async def _come(self, sound: GrowingSound, count: int) -> None:
        """Wait for about `count` samples, or the sound's end."""
        idle = self._state.config.limits.body_idle_timeout
        try:
            await sound.until(count, idle)
        except TimeoutError:
            sound.late = True
            text = f"no audio came for {idle:g} s within a turn; send silence too, or commit the turn"
            raise ApiError(408, "upload_timeout", text) from None
        await sound.grow(self._state.pool)

    async def _prepared(self, sound: GrowingSound, end: int | None, digest: bytes) -> Processed:
        """The processed window: its beginning so far, or the whole window up to `end`."""
        loop, samples = asyncio.get_running_loop(), sound.samples[:end]
        if end is None:
            return await loop.run_in_executor(self._state.pool, self._processor.process_beginning, samples, digest)
        item = MediaItem("audio", samples)
        return await loop.run_in_executor(self._state.pool, self._processor.process, item, digest, MediaOptions())
