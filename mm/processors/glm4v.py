"""GLM-4.1V to 4.6V: grids of merged patches with three-axis positions, as in Qwen2-VL, but with other size limits.

Pool (`process`) and loop (`fill`, `positions`). For the bounds on pixels, a picture counts as two equal frames. A
film's bounds hold for the pixels of all its frames together. The time in seconds follows each pair of frames.

    slot of a film   [image start] I I I I [image end] 0 [image start] I I I I [image end] 1
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from engine.base.request import Modality
from mm.decode.frames import FilmPlan
from mm.item import MediaItem, MediaOptions, Processed
from mm.limits import MediaLimits
from mm.processors.base import Encode, Filling, no_texts, read_processor_files
from mm.processors.qwen3_vl import film_scale, framed, with_timestamps, within
from mm.processors.qwen_vl import QwenVL, Vision, lowered, token_id
from mm.transform.image import PatchSettings, Scale

SETTINGS = PatchSettings(min_pixels=112 * 112, max_pixels=28 * 28 * 15_000)
FILM_PIXELS = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30_000}  # pixels of all frames together
MAX_SECONDS, MAX_FRAMES = 2400, 640  # GLM-4.6V: bounds of a film's length and of its chosen frames


class Glm4V(QwenVL):
    """Processor of Glm4vForConditionalGeneration, its Moe, and Glm46VForConditionalGeneration."""

    writes_texts: ClassVar[bool] = True

    def __init__(
        self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0, encode: Encode = no_texts
    ) -> None:
        """`picture_bytes` is 0: the encoders of these families make no patches."""
        super().__init__(folder, config)
        files = read_processor_files(folder)
        self.vision = Vision(files.image, {"size": FILM_PIXELS, **files.video}, 0, SETTINGS)
        self._ids = {"image": token_id(config, "image", 151_343), "video": token_id(config, "video", 151_344)}
        self.media_token_ids = frozenset(self._ids.values())
        self._start = int(config.get("image_start_token_id") or 151_339)
        self._end = int(config.get("image_end_token_id") or 151_340)
        self.max_duration = int(files.video.get("max_duration") or 300)
        kinds = [files.image.get(key) for key in ("processor_class", "image_processor_type")]
        kinds += [files.video.get(key) for key in ("processor_class", "video_processor_type")]
        # GLM-4.6V, by any of its names in the files: a film of any length has some hundred frames.
        self.dynamic = config.get("model_type") == "glm46v" or any(str(kind).startswith("Glm46V") for kind in kinds)
        self._encode = functools.lru_cache(maxsize=4096)(encode)  # films of one length have the same times

    def settings(self, modality: Modality, options: MediaOptions) -> bytes:
        return repr((b"glm4v", self.dynamic, self.max_duration)).encode() + super().settings(modality, options)

    def plan_image(self, height: int, width: int, options: MediaOptions) -> Scale:
        settings = lowered(self.vision.image, options)
        return film_scale(settings.temporal_patch_size, height, width, settings)

    def plan_film(
        self, num_frames: int, fps: float, height: int, width: int, options: MediaOptions, limits: MediaLimits
    ) -> FilmPlan:
        pair = self.vision.rule.multiple
        indices = self._frames(num_frames, fps, options)
        if len(indices) > limits.video_max_frames:
            indices = indices[evenly(len(indices), limits.video_max_frames)]
        settings = lowered(self.vision.video, options)
        count = -(-len(indices) // pair) * pair
        bounded = within(settings, settings.max_pixels, count, limits)
        seconds_per_frame = num_frames / fps / len(indices)
        return FilmPlan(indices, film_scale(count, height, width, bounded), seconds_per_frame, indices / fps)

    def _frames(self, total: int, fps: float, options: MediaOptions) -> np.ndarray:
        if options.num_frames is not None:
            return evenly(total, min(options.num_frames, total))
        if self.dynamic:
            return dynamic_frames(total, fps, self.vision.rule.multiple)
        return timed_frames(
            total, fps, min(self.vision.rule.fps, options.fps or self.vision.rule.fps), self.max_duration
        )

    def process(self, item: MediaItem, digest: bytes, options: MediaOptions) -> Processed:
        if item.modality == "image":
            return super().process(item, digest, options)
        return with_timestamps(self.vision, item, digest, frame=0)

    def fill(self, processed: Processed) -> Filling:
        (part,) = processed.parts
        if part.modality == "image":
            return super().fill(processed)

        def behind(second: float) -> tuple[int, ...]:
            text = f"{second:.1f} seconds" if self.dynamic else str(int(second))
            return (self._end, *self._encode(text))

        return framed(part, self._ids["image"], lambda _: (self._start,), behind)


def evenly(total: int, count: int) -> np.ndarray:
    """`count` different numbers from 0 to total - 1 at equal distances, with both ends."""
    return np.unique(np.linspace(0, total - 1, max(count, 1)).astype(np.int64))


def timed_frames(total: int, fps: float, wanted_fps: float, max_duration: int) -> np.ndarray:
    """GLM-4.1V: frames at equal distances in time. Longer films than `max_duration` seconds have as many frames as a
    film of that length.
    """
    duration = total / fps
    if duration <= max_duration:
        at = np.ceil(np.arange(max(math.floor(duration * wanted_fps), 1)) * fps / wanted_fps)
    elif int(max_duration * wanted_fps) >= total:
        at = np.arange(total)
    else:
        at = np.ceil(np.linspace(0, duration, int(max_duration * wanted_fps)) * fps)
    return np.unique(np.minimum(at, total - 1).astype(np.int64))


def dynamic_frames(total: int, fps: float, pair: int) -> np.ndarray:
    """GLM-4.6V: pairs of frames per second: 3 in films up to 30 s, 1 in films up to five minutes, otherwise 0.5."""
    duration = min(total / fps, MAX_SECONDS)
    rate = 3 if duration <= 30 else 1 if duration <= 300 else 0.5
    wanted = min(int(duration * rate * pair), MAX_FRAMES)
    if total < wanted:
        return evenly(total, wanted)
    found: list[int] = []
    second, step, last = 0.0, 1 / (pair * rate), int(total / fps)
    for number in range(total):
        if number * (1 / fps) >= second:
            second += step
            found.append(number)
            if second >= last:
                break
    if len(found) < wanted:
        return found[0] + evenly(found[-1] - found[0] + 1, wanted)
    return np.array(found, np.int64) if len(found) == wanted else evenly(total, wanted)
