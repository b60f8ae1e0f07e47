"""Helper: the server's side of a process that decodes (SECURITY S23).

Pool threads start, call and end a helper, one thread at a time: the thread of the job that has leased the helper
(helpers). The loop may kill the helper at any moment; the thread that waits for its answer then gets an error. In: an
encoded file. Out: Opened, as the openers of the pool return it, or the MediaError that refuses the file. A helper's
messages are checked like a client's, because a file may have taken over the decoder.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from engine.base.request import Modality
from mm.bounds.bounded import Bounded
from mm.decode.alarm import Alarm
from mm.decode.audio import SAMPLE_RATE, SoundFile
from mm.decode.frames import FilmPlan
from mm.decode.image import check_size
from mm.errors import MediaError, invalid
from mm.isolation import wire
from mm.isolation.mapped import array_in
from mm.isolation.wire import Link
from mm.item import MediaItem, MediaOptions
from mm.limits import MediaLimits
from mm.open import Encoded, Opened
from mm.processors.base import Processor
from mm.transform.image import Scale

log = logging.getLogger("omniloop.media")

START_S = 60.0
ENDED = "the media cannot be decoded: its decoder ended without an answer; send the file in another encoding"
_DTYPES: dict[Modality, np.dtype[Any]] = {
    "image": np.dtype(np.uint8),
    "video": np.dtype(np.uint8),
    "audio": np.dtype(np.float32),
}


class HelperFailed(Exception):
    """A helper does not start, or our own code inside it has failed."""


class Helper:
    """One process, from its start to its end; it is never restarted."""

    def __init__(self, limits: MediaLimits, processor: Processor) -> None:
        self.talks = False  # a thread waits for its answer
        self.ended = False  # the process is dead or dying
        self.filtered = False
        self.holds = False  # the process has read a header and holds the file in memory
        self._limits = limits
        self.processor = processor
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Link | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "it was started"
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self.ended and self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process; returns when it waits for files, after a third of a second (pool)."""
        self.talks = True
        try:
            self._start()
        finally:
            self._hush()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-P", "-m", "mm.isolation.decoder", str(theirs.fileno()), str(os.getpid())],
                env=environment(),
                cwd="/",
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.settimeout(START_S)
        self._link = Link(ours, wire.ANSWERED)
        takes_audio = "audio" in self.processor.modalities
        try:
            self._link.send(wire.Start(self._limits, self.processor.picture_bytes, takes_audio))
            ready = self._reply(wire.Ready)[0]
        except (wire.Ended, MediaError, HelperFailed):
            status = self.end()
            memory = self._limits.helper_memory_bytes
            raise HelperFailed(
                f"a helper that decodes media did not start (status {status}); it imports numpy, Pillow and PyAV "
                f"within --helper-memory-bytes {memory}, of which it needs about 500 MiB"
            ) from None
        self.filtered = ready.filtered
        ours.settimeout(None)

    def _hush(self) -> None:
        """End this thread's use of the helper, and end the helper if the loop has killed it meanwhile."""
        self.talks = False
        if self.ended:
            self.end()

    def kill(self) -> None:
        """Kill the process; a thread that waits for its answer gets an error (loop)."""
        self.ended = True
        if self._process is not None:
            self._process.kill()

    def end(self) -> int | None:
        """End and reap the process (pool); returns its exit status. Not while another thread uses it: that thread ends
        it.
        """
        self.kill()
        if self._link is not None:
            self._link.close()
        return None if self._process is None else self._process.wait()

    def forget(self) -> None:
        """Report that the opened file will not be decoded (loop): a short message to a process that waits for a
        message.
        """
        self.holds = False
        if self._link is not None:
            try:
                self._link.send(wire.Forget())
            except wire.Ended:
                self.ended = True

    def open(self, modality: Modality, encoded: Encoded, alarm: Alarm) -> Opened:
        """Open a file like the openers of mm/open. The alarm is unused: the job that leased the helper kills it
        instead.
        """
        task = _Task(modality, encoded)
        with self._talk():
            header = self._asked(encoded, task, wire.Header)
            if not all(0 <= size < 1 << 50 for size in (header.cost, header.size, header.faster_cost or 0)):
                raise wire.Ended
            self.holds = True
        # The decoded bytes are also in the helper, and the file is in both processes and in the file between them.
        more = header.size + 2 * len(encoded.data)

        def opened(cost: int, faster: bool) -> Opened:
            return Opened(cost + more, header.size, lambda _: self._decode(task, header, faster))

        plain = opened(header.cost, False)
        return plain if header.faster_cost is None else replace(plain, faster=opened(header.faster_cost, True))

    def promised_seconds(self, encoded: Encoded) -> float | None:
        """A sound's length in seconds according to its header."""
        with self._talk():
            return self._asked(encoded, _Task("audio", encoded), wire.Promised, promises=True).seconds

    def _asked(self, encoded: Encoded, task: _Task, answer: type[wire.M], promises: bool = False) -> wire.M:
        modality, limits = task.modality, encoded.limits
        seconds = limits.decode_timeout(modality)
        ask = wire.Open(modality, encoded.container, encoded.options, seconds, limits.audio_max_seconds, promises)
        file = wire.memory_file(encoded.data)
        try:
            self._send(ask, file)
        finally:
            os.close(file)
        return self._reply(answer, task)[0]

    def _decode(self, task: _Task, header: wire.Header, faster: bool) -> MediaItem:
        with self._talk():
            self.holds = False
            self._send(wire.Decode(faster))
            decoded, files = self._reply(wire.Decoded, task)
            try:
                item = task.item(decoded, files, header)
            finally:
                wire.close_all(files)
            if item is None:
                raise wire.Ended
            return item

    def _send(self, message: wire.Message, *files: int) -> None:
        assert self._link is not None, "it was started"
        self._link.send(message, files)

    def _reply(self, answer: type[wire.M], task: _Task | None = None) -> tuple[wire.M, list[int]]:
        """Wait for the answer of this type; serve the helper's own requests until it comes."""
        assert self._link is not None, "it was started"
        while True:
            message, files = self._link.receive()
            if isinstance(message, wire.Decoded) and isinstance(message, answer):
                return message, files
            wire.close_all(files)
            if isinstance(message, answer):
                return message, []
            if isinstance(message, wire.Refusal):
                self.ended = self.ended or message.last
                raise message.error()
            if isinstance(message, wire.Failure):
                raise HelperFailed(f"a helper that decodes media failed: {message.where[:200]!a}")
            if task is None:
                raise wire.Ended
            self._send(task.planned(message))

    @contextmanager
    def _talk(self) -> Iterator[None]:
        """The duration of an exchange with the helper, in a pool thread. If the exchange breaks off, the helper is
        ended before its place is free for another.
        """
        self.talks = True
        try:
            if self.ended:
                raise wire.Ended
            yield
        except MediaError:  # a complete answer: the helper waits for the next file
            raise
        except wire.Ended:
            killed, status = self.ended, self.end()
            if not killed:
                log.warning(
                    "a process that decodes media ended in its work (status %s): one request is refused", status
                )
            raise invalid(ENDED) from None
        except BaseException:
            self.end()
            raise
        finally:
            self._hush()


class _Task:
    """The file being decoded: the plans that the helper was sent, and the check of its answers against them."""

    def __init__(self, modality: Modality, encoded: Encoded) -> None:
        self.modality = modality
        self._encoded = encoded
        self._processor = encoded.processor
        self._scale: Scale | None = None
        self._film: FilmPlan | None = None

    def planned(self, question: wire.Message) -> wire.Message:
        """The processor's answer to a helper's request; raises Ended for any other message."""
        options, limits = self._encoded.options, self._encoded.limits
        try:
            if isinstance(question, wire.PlanImage) and self.modality == "image":
                check_size(question.width, question.height, limits)
                self._scale = self._processor.plan_image(question.height, question.width, options)
                return wire.PlannedImage(self._scale)
            if isinstance(question, wire.PlanFilm) and self._may_plan(question):
                asked = (question.num_frames, question.fps, question.height, question.width)
                self._film = plan = self._processor.plan_film(*asked, options, limits)
                seconds = None if plan.seconds is None else plan.seconds.tolist()
                return wire.PlannedFilm(
                    plan.indices.tolist(),
                    plan.scale,
                    plan.seconds_per_frame,
                    seconds,
                    plan.silent,
                    plan.total,
                    plan.fps,
                )
        except MediaError as error:
            return wire.Refusal.of(error)
        raise wire.Ended

    def _may_plan(self, film: wire.PlanFilm) -> bool:
        """Whether a film may have these sizes, and the helper asks for its plan for the first time."""
        limits, new = self._encoded.limits, self.modality == "video" and self._film is None
        sides = min(film.height, film.width) > 0 and film.height * film.width <= limits.video_max_frame_pixels
        frames = 0 < film.num_frames <= limits.video_max_decoded_frames
        return new and sides and frames and 0 < film.fps < math.inf

    def item(self, decoded: wire.Decoded, files: list[int], header: wire.Header) -> MediaItem | None:
        """The decoded item; None if it does not match the plan."""
        arrays = [
            self._array(place, described, file) for place, (described, file) in enumerate(zip(decoded.arrays, files))
        ]
        if not arrays or len(arrays) != len(decoded.arrays) or len(arrays) != len(files):
            return None
        data, sound = arrays[0], arrays[1] if len(arrays) > 1 else None
        if data is None or (len(arrays) > 1 and (sound is None or self.modality != "video")):
            return None
        if self.modality == "video":
            plan = self._film
            if plan is None or not _is_film(data, plan) or not _are_replaced(decoded.replaced, plan):
                return None
            seconds, replaced = plan.seconds, decoded.replaced
            return MediaItem("video", data, plan.seconds_per_frame, seconds, plan, sound=sound, replaced=replaced)
        if self.modality == "audio":
            return MediaItem("audio", data) if data.ndim == 1 and data.nbytes <= header.size else None
        return self._picture(data, decoded.unscaled)

    def _picture(self, data: np.ndarray, unscaled: bool) -> MediaItem | None:
        if data.ndim != 3 or data.shape[2] != 3 or self._scale is None:
            return None
        if not unscaled:
            return MediaItem("image", data) if data.shape[:2] == (self._scale.height, self._scale.width) else None
        if data.nbytes > self._processor.picture_bytes:
            return None
        height, width = data.shape[:2]
        check_size(width, height, self._encoded.limits)
        return MediaItem("image", data, scale=self._processor.plan_image(height, width, self._encoded.options))

    def _array(self, place: int, described: wire.Array, file: int) -> np.ndarray | None:
        """The array in a file; None if its type or shape is not allowed. Place 1 is a film's sound."""
        dtype = _DTYPES["audio" if place else self.modality]
        shape = described.shape
        if described.dtype != dtype.name or not shape or min(shape) < 1 or len(shape) > 4 or max(shape) >= 1 << 32:
            return None
        size = int(np.prod(shape, dtype=object)) * dtype.itemsize
        most = (self._encoded.limits.video_max_seconds + 1) * SAMPLE_RATE * 4
        if (place and (len(shape) > 1 or size > most)) or not wire.is_sealed(file, size):
            return None
        return array_in(file, dtype, shape, size)


def _is_film(data: np.ndarray, plan: FilmPlan) -> bool:
    """Whether the array has the planned shape, rotated by 90 degrees or not."""
    sides = (plan.scale.height, plan.scale.width)
    return data.ndim == 4 and data.shape in {(len(plan.indices), *pair, 3) for pair in (sides, sides[::-1])}


def _are_replaced(replaced: tuple[tuple[int, int], ...], plan: FilmPlan) -> bool:
    return len(replaced) <= len(plan.indices) and all(0 <= number < 1 << 31 for pair in replaced for number in pair)


class IsolatedTrack(SoundFile):
    """A recording that a helper decodes, with the memory cost of both processes."""

    def __init__(
        self, helper: Helper, file: Bounded, file_format: str, limits: MediaLimits, max_seconds: float
    ) -> None:
        super().__init__(file, file_format, limits, max_seconds)
        limits = replace(limits, audio_max_seconds=max_seconds)
        self._encoded = Encoded(file.data, file_format, limits, helper.processor, MediaOptions())
        self._helper = helper

    @property
    def cost(self) -> int:
        return super().cost + self.size + 2 * len(self._encoded.data)

    def promised_seconds(self, alarm: Alarm | None = None) -> float | None:
        return self._helper.promised_seconds(self._encoded)

    def decode(self, alarm: Alarm) -> np.ndarray:
        return self._helper.open("audio", self._encoded, alarm).decode(alarm).data


def environment() -> dict[str, str]:
    """The helper's environment: no variables of the server, which may hold keys; the same modules; few threads."""
    paths = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    return {
        "PYTHONPATH": paths,
        "PYTHONDONTWRITEBYTECODE": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "2",  # each arena takes 64 MiB of address space, which --helper-memory-bytes bounds
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
        "LC_ALL": "C.UTF-8",
    }
