"""Films that are lists of pictures: data:video/jpeg;base64,A,B,C, as clients of Qwen's families send them (S17, S21).

Pool only. `pack` joins the pictures of a request into one file, which passes through the stages of every film; the
first bytes of each picture decide its format. PictureFilm reads such a file: the first picture's header gives the size
of all frames, and only the chosen pictures are decoded.

    file    rate: float64 | count: uint64 | size of each picture: uint64 | picture | picture | ...
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from mm.decode.alarm import Alarm
from mm.decode.image import ImageFile
from mm.decode.magic import sniff
from mm.decode.video import Planner, check_frame_size
from mm.errors import invalid, too_large, unsupported
from mm.item import Colour, MediaOptions
from mm.limits import MediaLimits
from mm.transform.image import Scale

PICTURES = "pictures"  # the name of this container
_NUMBER = 8  # bytes of each number of the header


def pack(pictures: Sequence[bytes], options: MediaOptions) -> bytes:
    """One file of these encoded pictures; the options' rate is the pictures' own rate, and one per second otherwise."""
    rate = np.array([options.fps or 1.0], "<f8").tobytes()
    sizes = np.array([len(pictures), *map(len, pictures)], "<u8").tobytes()
    return b"".join((rate, sizes, *pictures))


def whole(file: bytes, options: MediaOptions) -> MediaOptions:
    """The options that choose all pictures: the client has chosen them already. A smaller number remains."""
    count = _count(file)
    return options.with_frames(min(count, options.num_frames or count))


def _count(file: bytes) -> int:
    return int.from_bytes(file[_NUMBER : 2 * _NUMBER], "little")


class PictureFilm:
    """A film of pictures whose first header has been read and whose frames have been chosen."""

    def __init__(self, file: bytes, limits: MediaLimits, planner: Planner, background: Colour) -> None:
        """`file`: from `pack`. Raises MediaError for a film beyond the limits."""
        self._limits, self._background = limits, background
        rate, count = float(np.frombuffer(file, "<f8", 1)[0]), _count(file)
        if count / rate > limits.video_max_seconds:
            most = limits.video_max_seconds
            raise too_large(f"the video is longer than {most:g} seconds: {count} pictures at {rate:g} per second")
        sizes = np.frombuffer(file, "<u8", count, 2 * _NUMBER).tolist()
        ends = list(accumulate(sizes, initial=(2 + count) * _NUMBER))
        self._pictures = [memoryview(file)[start:end] for start, end in pairwise(ends)]
        first = self._open(0)
        self._size = first.upright
        self.plan = planner(count, rate, *self._size)
        if self.plan.pixels > limits.video_max_total_pixels:
            raise too_large(f"the video keeps {self.plan.pixels} pixels; at most {limits.video_max_total_pixels}")
        self.cost = len(file) + first.cost + self.plan.pixels * 3

    def _open(self, index: int) -> ImageFile:
        data = bytes(self._pictures[index])
        form = sniff(data)
        if form not in self._limits.image_formats:
            allowed = ", ".join(self._limits.image_formats)
            raise unsupported(
                f"picture {index} of the video is {form or 'in an unknown format'}; send pictures as {allowed}"
            )
        picture = ImageFile(data, form, self._limits)
        check_frame_size(picture.width, picture.height, self._limits)
        return picture

    def decode(self, alarm: Alarm) -> np.ndarray:
        """The chosen pictures, scaled; uint8 [frames, height, width, 3]."""
        scale = self.plan.scale
        frames = np.empty((len(self.plan.indices), scale.height, scale.width, 3), np.uint8)
        for place, index in enumerate(self.plan.indices.tolist()):
            alarm.check()
            picture = self._open(index)
            if picture.upright != self._size:
                (height, width), (of_first, wide) = picture.upright, self._size
                raise invalid(
                    f"picture {index} of the video is {width}x{height}, and the first is {wide}x{of_first}; "
                    "send pictures of one size"
                )
            frames[place] = picture.decode(self._scale, self._background)
        return frames

    def _scale(self, height: int, width: int) -> Scale:
        return self.plan.scale
