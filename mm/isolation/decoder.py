"""The helper process: reads headers of files and decodes them, one file at a time, until its server ends.

`python -m mm.isolation.decoder SOCKET PARENT`, started by `helper`. The openers are those of the pool (mm/open), so the
decoded items are equal bit for bit. The processor stays in the server: the helper requests the size of a picture and
the frames of a film from it. Every error other than MediaError ends the process, so no later file is decoded with the
state that the error left.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np

from mm.decode import import_codecs
from mm.decode.alarm import Alarm
from mm.decode.audio import SoundFile
from mm.decode.frames import FilmPlan
from mm.errors import MediaError, invalid
from mm.isolation import fence, wire
from mm.isolation.wire import Link
from mm.item import MediaItem, MediaOptions
from mm.limits import MediaLimits
from mm.open import OPENERS, Encoded, Opened
from mm.processors.base import Processor
from mm.transform.image import Scale

OUT_OF_MEMORY = "decoding this media takes more memory than the server allows"


class AskedProcessor:
    """The methods of the server's processor that openers use, as requests to the server."""

    def __init__(self, link: Link, start: wire.Start) -> None:
        self.picture_bytes = start.picture_bytes
        self.modalities = frozenset({"audio"} if start.takes_audio else ())
        self._link = link

    def plan_image(self, height: int, width: int, options: MediaOptions) -> Scale:
        return self._ask(wire.PlanImage(height, width), wire.PlannedImage).scale

    def plan_film(
        self, num_frames: int, fps: float, height: int, width: int, options: MediaOptions, limits: MediaLimits
    ) -> FilmPlan:
        plan = self._ask(wire.PlanFilm(num_frames, fps, height, width), wire.PlannedFilm)
        seconds = None if plan.seconds is None else np.array(plan.seconds, np.float64)
        indices = np.array(plan.indices, np.int64)
        return FilmPlan(indices, plan.scale, plan.seconds_per_frame, seconds, plan.silent, plan.total, plan.fps)

    def _ask(self, question: wire.Message, answer: type[wire.M]) -> wire.M:
        self._link.send(question)
        message, _ = self._link.receive()
        if isinstance(message, wire.Refusal):
            raise message.error()
        if not isinstance(message, answer):
            raise wire.Ended
        return message


class Decoder:
    """Answers the server's requests; holds the file whose header was read last."""

    def __init__(self, link: Link, start: wire.Start) -> None:
        self._link = link
        self._limits = start.limits
        self._processor = AskedProcessor(link, start)
        self._opened: Opened | None = None

    def serve(self) -> None:
        """Answer requests until the server closes its end."""
        while True:
            ask, files = self._link.receive()
            try:
                answer, filled = self.answer(ask, files)
            except MediaError as error:
                answer, filled = wire.Refusal.of(error), []
            finally:
                wire.close_all(files)
            if answer is not None:
                self._link.send(answer, filled)
            wire.close_all(filled)

    def answer(self, ask: wire.Message, files: list[int]) -> tuple[wire.Message | None, list[int]]:
        opened, self._opened = self._opened, None
        if isinstance(ask, wire.Open) and len(files) == 1:
            fence.allow_seconds(2 * ask.seconds)  # one share for the header, one for the rest
            return self.open(ask, wire.read_file(files[0])), []
        if isinstance(ask, wire.Decode) and opened is not None:
            return decoded(opened.faster if ask.faster and opened.faster else opened)
        if isinstance(ask, wire.Forget):
            return None, []
        raise wire.Ended

    def open(self, ask: wire.Open, data: bytes) -> wire.Message:
        limits = replace(self._limits, audio_max_seconds=ask.audio_max_seconds)
        if ask.promises:
            return wire.Promised(SoundFile(data, ask.container, limits).promised_seconds())
        encoded = Encoded(data, ask.container, limits, cast(Processor, self._processor), ask.options)
        opener: Callable[[Encoded, Alarm], Opened] = OPENERS[ask.modality]  # type: ignore[index]
        self._opened = opened = opener(encoded, Alarm())
        return wire.Header(opened.cost, opened.size, opened.faster.cost if opened.faster else None)


def decoded(opened: Opened) -> tuple[wire.Decoded, list[int]]:
    """The decoded item; its arrays are written to anonymous files."""
    item: MediaItem = opened.decode(Alarm())
    arrays: list[wire.Array] = []
    files: list[int] = []
    for array in (item.data, item.sound):
        if array is not None:
            described, file = wire.array_file(array)
            arrays.append(described)
            files.append(file)
    return wire.Decoded(arrays, item.scale is not None, item.replaced), files


def main(end: socket.socket) -> None:
    link = Link(end, wire.ASKED)
    try:
        start, _ = link.receive()
        assert isinstance(start, wire.Start), "the first message"
        fence.set_limits(start.limits.helper_memory_bytes)
        import_codecs()
        os.dup2(1, 2)  # discard stderr: the decoders' messages would quote the media
        filtered = fence.refuse_calls()
        link.send(wire.Ready(filtered))
        Decoder(link, start).serve()
    except wire.Ended:
        return
    except MemoryError:
        link.send(wire.Refusal.of(invalid(OUT_OF_MEMORY), last=True))
    except Exception as error:
        link.send(wire.Failure(place_of(error)))


def place_of(error: BaseException) -> str:
    """An error's type and place, without its text, which may quote the media."""
    frame: Any = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {frame.name}, {os.path.basename(frame.filename)}:{frame.lineno}"


if __name__ == "__main__":
    fence.die_with(int(sys.argv[2]))
    fence.stand_apart()
    main(socket.socket(fileno=int(sys.argv[1])))
