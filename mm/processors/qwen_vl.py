"""Qwen2-VL and Qwen2.5-VL: pictures and films as grids of merged patches with three-axis positions (M-RoPE).

Pool (`process`) and loop (`fill`, `positions`). A slot becomes time x rows x columns / merge² placeholder tokens. Text
has equal positions on all three axes. An item's (time, height, width) positions start after the text before it; the
text after the item continues after the larger of the item's rows and columns.

    text a b   picture 2 x 3        text c d
    time   0 1   2 2 2 2 2 2   5 6
    height 0 1   2 2 2 3 3 3   5 6
    width  0 1   2 3 4 2 3 4   5 6
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from engine.base.request import Modality
from mm.decode.frames import FilmPlan, FrameRule, sample_indices
from mm.item import MediaItem, MediaOptions, Part, Processed
from mm.limits import MediaLimits
from mm.processors.base import Filling, Placed, read_processor_files
from mm.transform.image import BICUBIC, PatchSettings, Scale, grid_of, normal_of, patchify, resize_table

_FILM_MIN_PIXELS, _FILM_MAX_PIXELS = 128 * 28 * 28, 768 * 28 * 28  # per frame, for checkpoints without these settings
BYTES_PER_PIXEL = 3 * 4  # features are float32


class Vision:
    """The parts shared by families with Qwen's vision encoder: sizes, frames, patches, grids.

    With `picture_bytes` the encoder's device makes the patches: features are unscaled pixels and the tables that scale
    them. Pictures with more bytes than this come scaled, and films always do.
    """

    def __init__(
        self,
        image: dict[str, Any],
        video: dict[str, Any],
        picture_bytes: int = 0,
        default: PatchSettings = PatchSettings(),  # noqa: B008 (a frozen value)
    ) -> None:
        """`default`: settings that the files lack."""
        self.image = _patch_settings(image, default)
        self.picture_bytes = picture_bytes if self.image.resample == BICUBIC else 0
        film_defaults = replace(default, min_pixels=_FILM_MIN_PIXELS, max_pixels=_FILM_MAX_PIXELS)
        self.video = _patch_settings(video, film_defaults)
        self.cap_total = bool(video.get("cap_pixels_per_frame"))
        self.max_video_tokens = int(video.get("max_video_tokens") or 128000)
        self.rule = FrameRule(
            fps=float(video.get("fps") or 2.0),
            min_frames=int(video.get("min_frames") or 4),
            max_frames=int(video.get("max_frames") or 768),
            num_frames=video.get("num_frames"),
            multiple=self.video.temporal_patch_size,
        )
        self.settings = functools.lru_cache(maxsize=64)(self._settings)  # requests repeat the same options

    def plan_image(self, height: int, width: int, options: MediaOptions) -> Scale:
        return lowered(self.image, options).scale(height, width)

    def still(self, pixels: np.ndarray, scale: Scale | None) -> tuple[dict[str, np.ndarray], int]:
        """Features and token count of a picture, uint8 [height, width, 3]; `scale` None: the picture is already
        scaled.
        """
        return self._features(pixels[None], self.image, scale)

    def moving(self, frames: np.ndarray) -> tuple[dict[str, np.ndarray], int]:
        """Features and token count of a film's chosen frames, uint8 [frames, height, width, 3], already scaled."""
        return self._features(frames, self.video)

    def plan(
        self, num_frames: int, fps: float, height: int, width: int, options: MediaOptions, limits: MediaLimits
    ) -> tuple[FilmPlan, bool]:
        """The plan, and whether the film should have more frames than are allowed."""
        rule = lowered_rule(self.rule, options, limits)
        count = rule.count(num_frames, fps)
        capped = rule.num_frames is not None or num_frames / fps * rule.fps >= rule.max_frames + rule.multiple
        settings = lowered(self.video, options)
        # Our own limit on the film's pixels makes frames smaller instead of refusing the film.
        total = min(limits.video_max_total_pixels, limits.request_decoded_bytes // (2 * BYTES_PER_PIXEL))
        most = total // (count + rule.multiple)
        if self.cap_total:
            budget = int(self.max_video_tokens * settings.factor**2 * 0.9)
            most = min(most, max(budget * rule.multiple // count, int(settings.min_pixels * 1.05)))
        max_pixels = max(min(settings.max_pixels, most), settings.factor**2)
        bounded = replace(settings, min_pixels=min(settings.min_pixels, max_pixels), max_pixels=max_pixels)
        plan = FilmPlan(sample_indices(num_frames, count), bounded.scale(height, width), num_frames / fps / count)
        return plan, capped

    def _settings(self, modality: Modality, options: MediaOptions) -> bytes:
        if modality == "image":
            return repr(astuple(lowered(self.image, options))).encode()
        options = replace(options, num_pictures=1)  # a film does not depend on the number of pictures
        return repr(
            (astuple(lowered(self.video, options)), astuple(self.rule), self.cap_total, astuple(options))
        ).encode()

    def grid_block(self, grid: Sequence[int] | np.ndarray, start: int, interval: np.float32) -> np.ndarray:
        """Positions of one item from `start` on; int64 [3, tokens]. A temporal patch takes `interval` positions."""
        times, rows, columns = (
            int(grid[0]),
            int(grid[1]) // self.image.merge_size,
            int(grid[2]) // self.image.merge_size,
        )
        block = np.empty((3, times, rows, columns), np.int64)
        block[0] = start + (np.arange(times, dtype=np.float32) * interval).astype(np.int64)[:, None, None]
        block[1] = np.arange(start, start + rows)[:, None]
        block[2] = np.arange(start, start + columns)
        return block.reshape(3, -1)

    def _features(
        self, frames: np.ndarray, settings: PatchSettings, scale: Scale | None = None
    ) -> tuple[dict[str, np.ndarray], int]:
        count, height, width, _ = frames.shape
        if self.picture_bytes:
            new = scale or Scale(height, width)
            grid = grid_of(count, new.height, new.width, settings)
            columns, rows = cached_table(width, new.width), cached_table(height, new.height)
            features = {"pixels": frames, "columns": columns, "rows": rows, "normal": normal_of(settings)}
        else:
            patches, grid = patchify(frames, settings)
            features = {"pixel_values": patches}
        features["grid_thw"] = np.array([grid], dtype=np.int64)
        return features, grid[0] * grid[1] * grid[2] // settings.merge_size**2


@functools.lru_cache(maxsize=64)
def cached_table(size: int, new_size: int) -> np.ndarray:
    """`resize_table`, cached: cameras and screens have few sizes. The table is read-only."""
    table = resize_table(size, new_size)
    table.flags.writeable = False
    return table


class QwenVL:
    """Processor of Qwen2VLForConditionalGeneration and Qwen2_5_VLForConditionalGeneration."""

    modalities: frozenset[Modality] = frozenset(("image", "video"))
    writes_texts: ClassVar[bool] = False
    longest_sound: float = math.inf
    frames_of_row: ClassVar[int] = 1  # lines of a film's patches along time that a row stands for

    def __init__(self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0) -> None:
        files = read_processor_files(folder)
        self.vision = Vision(files.image, files.video, picture_bytes)
        self.picture_bytes = self.vision.picture_bytes
        self._ids: dict[Modality, int] = {
            "image": token_id(config, "image", 151655),
            "video": token_id(config, "video", 151656),
        }
        self.media_token_ids = frozenset(self._ids.values())
        # Only the time axis of the 2.5 family counts seconds.
        timed = config.get("model_type") == "qwen2_5_vl"
        self._per_second = int(config.get("vision_config", {}).get("tokens_per_second", 4)) if timed else None

    def placeholder(self, modality: Modality) -> int:
        return self._ids[modality]

    def settings(self, modality: Modality, options: MediaOptions) -> bytes:
        return b"qwen_vl" + self.vision.settings(modality, options)

    def cost(self, modality: Modality, item_bytes: int) -> int:
        return vision_cost(self.vision, modality, item_bytes)

    def plan_image(self, height: int, width: int, options: MediaOptions) -> Scale:
        return self.vision.plan_image(height, width, options)

    def plan_film(
        self, num_frames: int, fps: float, height: int, width: int, options: MediaOptions, limits: MediaLimits
    ) -> FilmPlan:
        return self.vision.plan(num_frames, fps, height, width, options, limits)[0]

    def process(self, item: MediaItem, digest: bytes, options: MediaOptions) -> Processed:
        if item.modality == "image":
            features, count = self.vision.still(item.data, item.scale)
        else:
            features, count = self.vision.moving(item.data)
            per_grid = item.seconds_per_frame * self.vision.video.temporal_patch_size
            features["second_per_grid"] = np.array([per_grid], dtype=np.float32)
        return Processed(item.modality, (Part(item.modality, digest, count, features),))

    def fill(self, processed: Processed) -> Filling:
        (part,) = processed.parts
        return Filling(np.full(part.num_tokens, self._ids[part.modality], np.int32), (((0, part.num_tokens),),))

    def grid_of(self, part: Part) -> np.ndarray:
        """Lines along time, rows and columns of patches of which rows of the encoder have positions: int64 [3]."""
        found: np.ndarray = part.features["grid_thw"][0]
        return found

    def positions(self, length: int, token_ids: np.ndarray, placed: list[Placed]) -> tuple[np.ndarray | None, int]:
        if not placed:
            return None, 0
        out = np.empty((3, length), dtype=np.int32)
        following, done = 0, 0
        for item in placed:
            (part,), (runs,) = item.processed.parts, item.filling.runs
            times, height, width = self.grid_of(part)
            interval = np.float32(1)
            if part.modality == "video" and self._per_second is not None:
                interval = np.float32(self._per_second) * part.features["second_per_grid"][0]
            for start, count in runs:  # a film's frames may have text between them
                first = item.start + start
                following = count_up(out, done, first, following)
                done = first + count
                grid = (times // len(runs), height, width)
                out[:, first:done] = self.vision.grid_block(grid, following, interval)
                following += int(max(height, width)) // self.vision.image.merge_size
        # The answer's positions continue from the last text, even if a film's time axis is further.
        return out, count_up(out, done, length, following) - length


class QwenPages(QwenVL):
    """Processor of ColQwen2ForRetrieval, which was trained only with pages."""

    modalities: frozenset[Modality] = frozenset(("image",))


class JinaPages(QwenPages):
    """Processor of JinaVLForRanking, whose released code overrides the picture sizes in its files."""

    def __init__(self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0) -> None:
        super().__init__(folder, config, picture_bytes)
        self.vision.image = replace(self.vision.image, min_pixels=3_136, max_pixels=602_112)


def count_up(out: np.ndarray, start: int, end: int, first: int) -> int:
    """Write plain text positions into out[:, start:end]; returns the position that follows."""
    out[:, start:end] = np.arange(first, first + end - start)
    return first + end - start


def vision_cost(vision: Vision, modality: Modality, item_bytes: int) -> int:
    """Bytes of features and temporary copies, for `item_bytes` of pixels."""
    if vision.picture_bytes:
        return 1 << 20  # for the tables
    frames = vision.image.temporal_patch_size if modality == "image" else 1
    return item_bytes * (4 * frames + 4) + (1 << 20)


def token_id(config: dict[str, Any], kind: str, default: int) -> int:
    """Placeholder id; configs of different ages call it image_token_id or image_token_index."""
    for key in (f"{kind}_token_id", f"{kind}_token_index"):
        if config.get(key) is not None:
            return int(config[key])
    return default


def _patch_settings(raw: dict[str, Any], default: PatchSettings) -> PatchSettings:
    size = raw.get("size") or {}
    rescale = float(raw.get("rescale_factor", default.rescale_factor)) if raw.get("do_rescale", True) else 1.0
    normalise = raw.get("do_normalize", True)
    return PatchSettings(
        patch_size=int(raw.get("patch_size", default.patch_size)),
        temporal_patch_size=int(raw.get("temporal_patch_size", default.temporal_patch_size)),
        merge_size=int(raw.get("merge_size", default.merge_size)),
        min_pixels=int(raw.get("min_pixels") or size.get("shortest_edge") or default.min_pixels),
        max_pixels=int(raw.get("max_pixels") or size.get("longest_edge") or default.max_pixels),
        resample=int(raw.get("resample", default.resample)),
        rescale_factor=rescale,
        mean=triple(raw.get("image_mean", default.mean)) if normalise else (0.0, 0.0, 0.0),
        std=triple(raw.get("image_std", default.std)) if normalise else (1.0, 1.0, 1.0),
    )


def triple(values: Any) -> tuple[float, float, float]:
    first, second, third = (float(value) for value in values)
    return first, second, third


def lowered(settings: PatchSettings, options: MediaOptions) -> PatchSettings:
    """Settings with the pixel bounds of a request, which may lower ours but not raise them."""
    most = min(settings.max_pixels, options.max_pixels or settings.max_pixels)
    most = max(most, settings.factor**2)
    least = min(settings.min_pixels, options.min_pixels or settings.min_pixels, most)
    return (
        settings
        if (least, most) == (settings.min_pixels, settings.max_pixels)
        else replace(settings, min_pixels=least, max_pixels=most)
    )


def lowered_rule(rule: FrameRule, options: MediaOptions, limits: MediaLimits) -> FrameRule:
    most = min(rule.max_frames, limits.video_max_frames)
    if options.num_frames is not None:
        return replace(rule, num_frames=min(options.num_frames, most), max_frames=most)
    fps = min(rule.fps, options.fps or rule.fps)
    return replace(rule, fps=fps, max_frames=most, min_frames=min(rule.min_frames, most))
