"""GrowingSound: the samples of a turn in progress, for a model that transcribes the turn while it is spoken.

Owner: loop, the session's tasks; resampling runs in the pool. In: 16-bit samples as they arrive. Out: float32 samples
at 16 kHz, like those of a decoded recording.

    feed  ..|...|.|....|..  end          reader's side
    until ------>|  grow  samples        transcriber's side; `forget` drops samples that no later request needs
"""

from __future__ import annotations

import asyncio
import concurrent.futures

import numpy as np

from mm.decode.audio import SAMPLE_RATE, resampler_of
from server.speech.realtime_events import SAMPLE_BYTES


class GrowingSound:
    """The samples of one turn."""

    def __init__(self, rate: int) -> None:
        self.samples = np.zeros(0, np.float32)
        self.ended = False  # no more samples will come
        self.complete = False  # whether, after `ended`, `samples` holds all of them
        self.dropped = False  # no task reads the sound any more
        self.late = False  # whether no samples came for too long, so that the turn has failed
        self.seconds = 0.0  # seconds of all samples fed
        self._rate = rate
        self._fresh = bytearray()
        self._resampler = resampler_of(rate)
        self._news = asyncio.Event()

    @property
    def nbytes(self) -> int:
        return self.samples.nbytes + len(self._fresh)

    def feed(self, pcm: bytes) -> None:
        """Adds whole samples; after `end` they are ignored."""
        if self.ended:
            return
        self._fresh += pcm
        self.seconds += len(pcm) / SAMPLE_BYTES / self._rate
        self._news.set()

    def end(self) -> None:
        self.ended = True
        self._news.set()

    def drop(self) -> None:
        self.dropped = self.complete = True
        self._fresh.clear()
        self.samples = self.samples[:0].copy()
        self.end()

    async def until(self, count: int, idle: float) -> None:
        """Wait until there are about `count` samples, or the sound has ended. Raises TimeoutError if no samples come
        for `idle` seconds."""
        while not self.ended and len(self.samples) + self._coming() < count:
            self._news.clear()
            async with asyncio.timeout(idle):
                await self._news.wait()

    async def grow(self, pool: concurrent.futures.Executor) -> None:
        """Resamples what arrived before this call, and appends it to `samples`."""
        fresh, last = bytes(self._fresh), self.ended
        self._fresh.clear()
        made = await asyncio.get_running_loop().run_in_executor(pool, self._resampled, fresh, last)
        if len(made) and not self.dropped:
            self.samples = np.concatenate([self.samples, made])
        self.complete = self.complete or last  # samples that arrived during the resampling belong to the next call

    def forget(self, count: int) -> None:
        """Drops the first samples."""
        self.samples = self.samples[count:].copy()

    def _coming(self) -> int:
        return len(self._fresh) // SAMPLE_BYTES * SAMPLE_RATE // self._rate

    def _resampled(self, pcm: bytes, last: bool) -> np.ndarray:
        sound = np.frombuffer(pcm, "<i2").astype(np.float32) / 32768
        if self._resampler is None:
            return sound
        made = self._resampler.resample_chunk(sound, last=last)
        if last:
            self._resampler = None  # it has returned all its samples
        return made
