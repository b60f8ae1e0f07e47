"""Qwen3-VL: pictures as in Qwen2.5-VL; films in pairs of frames, each pair after its time as text.

Pool (`process`) and loop (`fill`, `positions`). A film's bounds hold for the pixels of all its frames together.

    slot of a film   <0.3 seconds> [vision start] V V V V [vision end] <1.3 seconds> [vision start] V V V V [vision end]
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mm.decode.frames import FilmPlan
from mm.item import MediaItem, MediaOptions, Part, Processed
from mm.limits import MediaLimits
from mm.processors.base import Encode, Filling, no_texts, read_processor_files
from mm.processors.qwen_vl import BYTES_PER_PIXEL, QwenVL, Vision, lowered, lowered_rule
from mm.transform.image import PatchSettings, Scale

HALF = (0.5, 0.5, 0.5)
SETTINGS = PatchSettings(patch_size=16, min_pixels=65536, max_pixels=16777216, mean=HALF, std=HALF)
FILM_PIXELS = {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768}  # pixels of all frames together


class Qwen3VL(QwenVL):
    """Processor of Qwen3VLForConditionalGeneration."""

    writes_texts: ClassVar[bool] = True

    def __init__(
        self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0, encode: Encode = no_texts
    ) -> None:
        super().__init__(folder, config, picture_bytes)
        files = read_processor_files(folder)
        film = {"size": FILM_PIXELS, "max_video_tokens": 768, **files.video}
        self.vision = Vision(files.image, film, picture_bytes, SETTINGS)
        self.picture_bytes = self.vision.picture_bytes
        self._start = int(config.get("vision_start_token_id", 151652))
        self._end = int(config.get("vision_end_token_id", 151653))
        self._encode = functools.lru_cache(maxsize=4096)(encode)  # films of one length have the same times

    def plan_film(
        self, num_frames: int, fps: float, height: int, width: int, options: MediaOptions, limits: MediaLimits
    ) -> FilmPlan:
        rule = lowered_rule(self.vision.rule, options, limits)
        wanted = rule.num_frames or max(int(num_frames / fps * rule.fps), rule.min_frames)
        count = max(1, min(wanted, rule.max_frames, num_frames))
        indices = np.linspace(0, num_frames - 1, count).round().astype(np.int64)
        settings = lowered(self.vision.video, options)
        most = settings.max_pixels
        if self.vision.cap_total:
            each = min(self.vision.max_video_tokens * settings.factor**2, most // count)
            most = max(each, int(settings.min_pixels * 1.05)) * count
        scale = film_scale(max(count, rule.multiple), height, width, within(settings, most, count, limits))
        return FilmPlan(indices, scale, num_frames / fps / count, indices / fps)

    def process(self, item: MediaItem, digest: bytes, options: MediaOptions) -> Processed:
        if item.modality == "image":
            return super().process(item, digest, options)
        return with_timestamps(self.vision, item, digest, frame=-1)

    def fill(self, processed: Processed) -> Filling:
        (part,) = processed.parts
        if part.modality == "image":
            return super().fill(processed)
        return framed(
            part,
            self._ids["video"],
            lambda second: (*self._encode(f"<{second:.1f} seconds>"), self._start),
            lambda _: (self._end,),
        )


def with_timestamps(vision: Vision, item: MediaItem, digest: bytes, frame: int) -> Processed:
    """A film with the time of each pair of frames in seconds: the mean of the pair's first frame and of its frame
    `frame`.
    """
    features, count = vision.moving(item.data)
    assert item.seconds is not None, "this processor's plans hold the time of each frame"
    pairs = vision.video.temporal_patch_size
    seconds = np.pad(item.seconds, (0, -len(item.seconds) % pairs), mode="edge").reshape(-1, pairs)
    features["seconds"] = (seconds[:, 0] + seconds[:, frame]) / 2
    return Processed("video", (Part("video", digest, count, features),))


def framed(
    part: Part, token: int, before: Callable[[float], Iterable[int]], behind: Callable[[float], Iterable[int]]
) -> Filling:
    """The tokens of a film: each pair of frames between the tokens before and after it, which depend on the pair's
    time.
    """
    seconds = part.features["seconds"]
    each = part.num_tokens // len(seconds)
    ids: list[int] = []
    runs = []
    for second in seconds:
        ids += before(second)
        runs.append((len(ids), each))
        ids += [*[token] * each, *behind(second)]
    return Filling(np.array(ids, np.int32), (tuple(runs),))


def within(settings: PatchSettings, most: int, count: int, limits: MediaLimits) -> PatchSettings:
    """Bounds for the pixels of `count` frames together: `most`, and the server's own limits."""
    total = min(limits.video_max_total_pixels, limits.request_decoded_bytes // (2 * BYTES_PER_PIXEL))
    most = min(most, total // (count + settings.temporal_patch_size) * count)
    return replace(settings, min_pixels=min(settings.min_pixels, most), max_pixels=most)


def film_scale(num_frames: int, height: int, width: int, settings: PatchSettings) -> Scale:
    """The size nearest to the original with multiples of `factor` as sides, and the pixels of all frames within
    bounds.
    """
    factor, pair = settings.factor, settings.temporal_patch_size
    if height < factor or width < factor:
        grow = max(factor / height, factor / width)
        height, width = int(height * grow), int(width * grow)
    new = [round(side / factor) * factor for side in (height, width)]
    volume = round(num_frames / pair) * pair * new[0] * new[1]
    if volume > settings.max_pixels:
        shrink = math.sqrt(num_frames * height * width / settings.max_pixels)
        new = [max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width)]
    elif volume < settings.min_pixels:
        grow = math.sqrt(settings.min_pixels / (num_frames * height * width))
        new = [math.ceil(side * grow / factor) * factor for side in (height, width)]
    return Scale(new[0], new[1], settings.resample)
