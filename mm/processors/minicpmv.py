"""MiniCPM-V 4.5: a view of the whole picture, and for large pictures up to nine slices, in the grid nearest its shape.

Pool (`process`) and loop (`fill`). Pictures come unscaled, because the whole and the slices are scaled separately. Each
view becomes as many rows as the model has queries. Pictures of a prompt are numbered from 0. Frames of films are views
of the whole; in long films up to three successive frames share rows.

    slot of a small picture      <image_id>0</image_id><image> rows </image>
    slot of one of 2 x 2 slices  <image_id>0</image_id><image> rows </image><slice> rows </slice><slice> rows </slice>
                                 newline <slice> rows </slice><slice> rows </slice>
    slot of a film               <image> rows </image> newline <image> rows </image> ...
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np

from engine.base.request import Modality
from mm.decode.frames import FilmPlan
from mm.item import MediaItem, MediaOptions, Part, Processed
from mm.limits import MediaLimits
from mm.processors.base import Encode, Filling, no_texts
from mm.processors.pictures import AS_DECODED, Pictures, picture_settings
from mm.processors.qwen_vl import BYTES_PER_PIXEL, token_id
from mm.transform.image import Scale

PLACEHOLDER = 128_244  # <unk> of the released tokenizer
HALF = [0.5, 0.5, 0.5]
MOST_GROUPS, MOST_TOGETHER = 180, 3  # groups of a film's frames; frames of a group
USUAL_FPS, STEP = 3.0, 0.1  # chosen frames per second; seconds of a moment


class MiniCPMV(Pictures):
    """Processor of MiniCPMV."""

    modalities: frozenset[Modality] = frozenset(("image", "video"))
    picture_bytes: int = AS_DECODED

    def __init__(
        self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0, encode: Encode = no_texts
    ) -> None:
        super().__init__(folder, config, picture_bytes, functools.lru_cache(maxsize=1024)(encode))
        raw = self.raw
        means = {f"image_{key}": raw.get(f"norm_{key}") or raw.get(f"image_{key}") or HALF for key in ("mean", "std")}
        self.patching = picture_settings(means, self.patching)
        self.image_id = token_id(config, "image", PLACEHOLDER)
        self.media_token_ids = frozenset((self.image_id,))
        self.side = int(raw.get("scale_resolution", 448))
        self.most = int(raw.get("max_slice_nums", 9)) if raw.get("slice_mode", True) else 1
        self.numbers = bool(raw.get("use_image_id", False))
        self.tokens = int(config.get("query_num", 64))

    def choices(self) -> tuple[Any, ...]:
        return self.side, self.most, self.tokens

    def cost(self, modality: Modality, item_bytes: int) -> int:
        return item_bytes + (self.most + 1) * self.side**2 * 3 * 28 + (1 << 20)

    def plan_image(self, height: int, width: int, options: MediaOptions) -> Scale:
        """The size of the view of the whole; the slices follow from the picture's shape."""
        whole = self.grid(height, width, options) == (1, 1)
        return Scale(*self.fitted(height, width, enlarged=whole), self.patching.resample)

    def fitted(self, height: float, width: float, enlarged: bool) -> tuple[int, int]:
        """(height, width) of whole patches, with about side² pixels if the picture is larger, or is `enlarged`."""
        if enlarged or height * width > self.side**2:
            shape = width / height
            height = int(self.side / math.sqrt(shape))
            width = int(height * shape)
        return self.whole_units(height, self.patch), self.whole_units(width, self.patch)

    def whole_units(self, length: float, unit: int) -> int:
        return max(round(length / unit) * unit, unit)

    def grid(self, height: int, width: int, options: MediaOptions) -> tuple[int, int]:
        """(columns, rows) of slices: the grid with a shape nearest the picture's; (1, 1): only a view of the whole."""
        most = min(self.most, (options.max_pixels or 1 << 62) // self.side**2)
        wanted = min(math.ceil(height * width / self.side**2), most)
        if wanted <= 1:
            return 1, 1
        counts = [count for count in (wanted - 1, wanted, wanted + 1) if 1 < count <= most]
        grids = [
            (columns, count // columns) for count in counts for columns in range(1, count + 1) if not count % columns
        ]
        return min(grids, key=lambda grid: abs(math.log(width / height) - math.log(grid[0] / grid[1])))

    def settings(self, modality: Modality, options: MediaOptions) -> bytes:
        frames = (options.num_frames, options.fps) if modality == "video" else ()
        return repr(frames).encode() + super().settings(modality, options)

    def plan_film(
        self, num_frames: int, fps: float, height: int, width: int, options: MediaOptions, limits: MediaLimits
    ) -> FilmPlan:
        wanted, _ = frames_of(num_frames / fps, fps, options)
        scale = Scale(*self.fitted(height, width, enlarged=True), self.patching.resample)
        total = min(limits.video_max_total_pixels, limits.request_decoded_bytes // (2 * BYTES_PER_PIXEL))
        count = max(1, min(wanted, num_frames, limits.video_max_frames, total // scale.pixels))
        gap = num_frames / count
        indices = (np.arange(count) * gap + gap / 2).astype(np.int64)
        return FilmPlan(indices, scale, num_frames / fps / count, indices / fps)

    def process(self, item: MediaItem, digest: bytes, options: MediaOptions) -> Processed:
        if item.modality == "image":
            return super().process(item, digest, options)
        assert item.seconds is not None, "this processor's plans hold the time of each frame"
        length = item.seconds_per_frame * len(item.data)
        _, together = frames_of(length, len(item.data) / length, options)
        features = {
            **self.tiles(list(item.data)),
            "moments": moments(item.seconds, length),
            "together": np.array([together], np.int64),
        }
        return Processed("video", (Part("video", digest, -(-len(item.data) // together) * self.tokens, features),))

    def features(self, item: MediaItem, options: MediaOptions) -> tuple[dict[str, np.ndarray], int]:
        assert item.scale is not None, "pictures come as decoded"
        height, width = item.data.shape[:2]
        columns, rows = self.grid(height, width, options)
        whole = self.tiles([item.scale.array(item.data)])
        if columns * rows == 1:
            return {**whole, "slices": np.zeros(4, np.int64)}, self.tokens
        cell = self.whole_units(height, rows) / rows, self.whole_units(width, columns) / columns
        high, wide = self.fitted(*cell, enlarged=True)
        scaled = Scale(rows * high, columns * wide, self.patching.resample).array(item.data)
        cut = scaled.reshape(rows, high, columns, wide, 3).swapaxes(1, 2).reshape(-1, high, wide, 3)
        slices = self.tiles(list(cut))
        features = {
            "pixel_values": np.concatenate([whole["pixel_values"], slices["pixel_values"]]),
            "grid": whole["grid"],
            "slices": np.array([rows, columns, *slices["grid"]], np.int64),
        }
        return features, (1 + rows * columns) * self.tokens

    def fill(self, processed: Processed) -> Filling:
        (part,) = processed.parts
        if part.modality == "video":
            return self._film(part.num_tokens // self.tokens)
        rows, columns = part.features["slices"][:2].tolist()
        ids: list[int] = list(self.encode(f"<image_id>{processed.number}</image_id>")) if self.numbers else []
        runs: list[tuple[int, int]] = []
        self._view(ids, runs, "image")
        for number in range(rows * columns):
            if number and not number % columns:
                ids += self.encode("\n")
            self._view(ids, runs, "slice")
        return Filling(np.array(ids, np.int32), (tuple(runs),))

    def _film(self, groups: int) -> Filling:
        ids: list[int] = []
        runs: list[tuple[int, int]] = []
        for number in range(groups):
            ids += self.encode("\n") if number else ()
            self._view(ids, runs, "image")
        return Filling(np.array(ids, np.int32), (tuple(runs),))

    def _view(self, ids: list[int], runs: list[tuple[int, int]], name: str) -> None:
        ids += self.encode(f"<{name}>")
        runs.append((len(ids), self.tokens))
        ids += [self.image_id] * self.tokens
        ids += self.encode(f"</{name}>")


def frames_of(length: float, fps: float, options: MediaOptions) -> tuple[int, int]:
    """How many frames of a film of `length` seconds to choose, and how many of them form a group.

    As the model card's program does: https://huggingface.co/openbmb/MiniCPM-V-4_5, "Chat with Video".
    """
    if options.num_frames is not None:
        return options.num_frames, min(math.ceil(options.num_frames / MOST_GROUPS), MOST_TOGETHER)
    rate = options.fps or USUAL_FPS
    if rate * int(length + 1e-6) <= MOST_GROUPS:
        return round(min(rate, round(fps) or fps) * min(MOST_GROUPS, length)), 1
    together = math.ceil(length * rate / MOST_GROUPS)
    if together <= MOST_TOGETHER:
        return round(length * rate), together
    return MOST_GROUPS * MOST_TOGETHER, MOST_TOGETHER


def moments(seconds: np.ndarray, length: float) -> np.ndarray:
    """The numbers of the moments nearest to `seconds`, in a film of `length` seconds; int64 [frames].

    The published program divides a moment by its length and cuts the quotient, which may be a little too small.
    """
    near = np.floor(seconds / STEP)[:, None] + (-1, 0, 1)
    known = np.clip(near, 0, max(math.ceil(length / STEP) - 1, 0)) * STEP
    nearest = known[np.arange(len(seconds)), np.abs(known - seconds[:, None]).argmin(1)]
    return (nearest / STEP).astype(np.int64)
