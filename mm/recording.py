"""Recording: a long sound, decoded and cut into windows; each window is processed when it is needed.

Owner: loop; decoding, cutting and processing run in the pool. In: an uploaded file. Out: the windows' times, and the
processed item of each window. The samples count against the budget of decoded media until the recording is closed
(MediaLoader.recording).

    loop   | slot          | reserve         | reserve                  |  window 0 ..  window 1 ..
    pool           tables             header            decode, digest, cut  process        process
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from mm.bounds.bounded import Bounded
from mm.bounds.check import bound_media
from mm.decode.alarm import Alarm
from mm.decode.audio import SAMPLE_RATE, SoundFile
from mm.decode.magic import as_audio, sniff
from mm.decode.whole import check_whole
from mm.errors import MediaError, too_large, unsupported
from mm.isolation.helper import Helper, IsolatedTrack
from mm.item import MediaItem, Processed
from mm.item_job import DIGEST_BYTES, Shared, in_pool
from mm.permits import DecodePermit, MediaRequest
from mm.report import MediaReport
from mm.transform.quiet import Cutting, windows

T = TypeVar("T")
SPARE = 1.02  # lengths in headers are rounded


@dataclass(frozen=True, slots=True)
class Window:
    """A window of a recording, in seconds from the recording's start."""

    start: float
    end: float


class Recording:
    """A decoded recording and its windows. Owner: loop."""

    def __init__(
        self, shared: Shared, request: MediaRequest, digest: bytes, samples: np.ndarray, cut: list[tuple[int, int]]
    ) -> None:
        self.seconds = len(samples) / SAMPLE_RATE
        self.windows = [Window(start / SAMPLE_RATE, end / SAMPLE_RATE) for start, end in cut]
        self._cut = cut
        self._samples = samples
        self._shared = shared
        self._request = request
        self._digest = digest

    @property
    def report(self) -> MediaReport:
        """Counts and times of decoding and processing so far."""
        return self._request.report

    async def processed(self, index: int) -> Processed:
        """Process one window for the model; the features are not stored here."""
        alarm = Alarm(self._shared.limits.decode_timeout("audio"))
        processed, seconds = await in_pool(self._shared.pool, alarm, timed, self._process, index)
        self.report.prepare_s += seconds
        return processed

    def _process(self, index: int) -> Processed:
        start, end = self._cut[index]
        digest = hashlib.sha256(self._digest + start.to_bytes(8, "little") + end.to_bytes(8, "little")).digest()
        item = MediaItem("audio", self._samples[start:end])
        return self._shared.processor.process(item, digest[:DIGEST_BYTES], self._request.options)


async def record(shared: Shared, request: MediaRequest, data: bytes, cutting: Cutting) -> Recording:
    """Decode a file and find its windows. Raises MediaError."""
    request.receive(len(data))
    if not shared.limits.isolates("audio"):
        return await _record(shared, request, data, cutting, None)
    async with shared.helpers.lease(shared.processor) as helper:
        return await _record(shared, request, data, cutting, helper)


async def _record(
    shared: Shared, request: MediaRequest, data: bytes, cutting: Cutting, helper: Helper | None
) -> Recording:
    """`helper`: decodes in place of the pool; None: the pool decodes."""
    permit = await shared.permits.take(request)
    try:
        opened = _Opened(shared, data, helper)
        opening = await opened.work(opened.bound, permit=permit)
        await permit.reserve(opening, shared.limits.audio_decode_timeout)
        alarm = Alarm(shared.limits.audio_decode_timeout)
        promised = await opened.work(opened.promised_seconds, alarm, alarm=alarm, permit=permit)
        permit.give_back()
        samples = await _decoded(shared, permit, opened, promised)
        permit.keep(samples.nbytes)
        digest, cut = await opened.work(opened.digest_and_cut, request, samples, cutting)
        request.report.items, request.report.encoded_bytes = 1, len(data)
        request.report.decode_s = opened.seconds
        return Recording(shared, request, digest, samples, cut)
    finally:
        permit.leave()


async def _decoded(shared: Shared, permit: DecodePermit, opened: _Opened, promised: float | None) -> np.ndarray:
    """Decode the samples. Reserve memory for the length in the header, or for the longest sound if the header was
    wrong.
    """
    limits = shared.limits
    bounds = [limits.transcription_max_seconds]
    if promised is not None and promised * SPARE + 1 < bounds[0]:
        bounds.insert(0, promised * SPARE + 1)
    for bound in bounds:
        track = opened.track(bound)
        await permit.reserve(track.cost, limits.audio_decode_timeout)
        try:
            alarm = Alarm(limits.audio_decode_timeout)
            return await opened.work(track.decode, alarm, alarm=alarm, permit=permit)
        except MediaError as error:
            if error.reason != "media_too_large" or bound == bounds[-1]:
                raise
            permit.give_back()
    raise AssertionError("the last bound returns or raises")


def timed(work: Callable[..., T], *args: Any) -> tuple[T, float]:
    """The result of `work`, and the seconds that it took (pool)."""
    begun = time.perf_counter()
    return work(*args), time.perf_counter() - begun


class _Opened:
    """A file and its decoder."""

    def __init__(self, shared: Shared, data: bytes, helper: Helper | None) -> None:
        limits = shared.limits
        self._shared = shared
        self._data = data
        self._helper = helper
        self._file: Bounded | None = None
        self.seconds = 0.0  # time of the work in the pool
        container = as_audio(sniff(data))
        if container is None or container not in limits.audio_formats:
            got = container or "in an unknown format"
            raise unsupported(f"the audio is {got}; send {', '.join(limits.audio_formats)}")
        self._container = container
        if len(data) > limits.audio_max_bytes:
            raise too_large(f"the audio has {len(data)} bytes; at most {limits.audio_max_bytes} are allowed", 413)

    async def work(
        self, work: Callable[..., T], *args: Any, alarm: Alarm | None = None, permit: DecodePermit | None = None
    ) -> T:
        """The result of `work` in the pool; adds its time to `seconds`."""
        alarm = alarm or Alarm(self._shared.limits.audio_decode_timeout)
        result, seconds = await in_pool(self._shared.pool, alarm, timed, work, *args, permit=permit)
        self.seconds += seconds
        return result

    def bound(self) -> int:
        """The most bytes that opening the file takes (pool)."""
        check_whole(self._data, self._container)
        self._file = bound_media(self._data, self._container, is_film=False)
        return self._file.opening

    def track(self, seconds: float) -> SoundFile:
        """The sound, limited to `seconds`."""
        assert self._file is not None, "bound comes first"
        if self._helper is not None:
            return IsolatedTrack(self._helper, self._file, self._container, self._shared.limits, seconds)
        return SoundFile(self._file, self._container, self._shared.limits, seconds)

    def promised_seconds(self, alarm: Alarm) -> float | None:
        return self.track(self._shared.limits.transcription_max_seconds).promised_seconds(alarm)

    def digest_and_cut(
        self, request: MediaRequest, samples: np.ndarray, cutting: Cutting
    ) -> tuple[bytes, list[tuple[int, int]]]:
        """The digest of content, caller and processor's settings, and the windows."""
        settings = self._shared.processor.settings("audio", request.options)
        found = hashlib.sha256(self._shared.key)
        for piece in (b"recording", request.scope, settings, self._data):
            found.update(len(piece).to_bytes(8, "little"))
            found.update(piece)
        return found.digest(), windows(samples, SAMPLE_RATE, cutting)
