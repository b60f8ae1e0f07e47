"""Watching: films and pictures of models that run through transformers, by the checkpoint's own processor.

Pool (`process`). Our decoder returns the frames that the checkpoint's rule or the request chooses. The processor gets
their indices, writes the times of frames as if it had chosen them, and scales the frames itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from engine.base.request import Modality
from mm.decode.frames import FilmPlan
from mm.item import MediaItem, MediaOptions
from mm.limits import MediaLimits
from mm.processors.qwen_vl import BYTES_PER_PIXEL
from mm.processors.through import BLANK, Shapes, Through
from mm.transform.image import Scale

USUAL_FRAMES = 8  # frames of a film if neither the checkpoint nor the request gives a number
BLANK_FILMS: Shapes = ((4, 96, 128, 3), (4, 128, 80, 3))


class Watching(Through):
    """The processor of a checkpoint whose class reads films."""

    blank: ClassVar[dict[Modality, Shapes]] = {**BLANK, "video": BLANK_FILMS}

    def settings(self, modality: Modality, options: MediaOptions) -> bytes:
        if modality != "video":
            return super().settings(modality, options)
        return repr((type(self).__name__, options.max_pixels, options.num_frames, options.fps)).encode()

    def plan_film(
        self, num_frames: int, fps: float, height: int, width: int, options: MediaOptions, limits: MediaLimits
    ) -> FilmPlan:
        """The frames' own size, which the processor scales, within the server's limit on a film's pixels."""
        indices = self._frames(num_frames, fps, height, width, options)
        if len(indices) > limits.video_max_frames:
            indices = indices[even(len(indices), limits.video_max_frames)]
        most = min(limits.video_max_total_pixels, limits.request_decoded_bytes // (2 * BYTES_PER_PIXEL)) // len(indices)
        most = min(most, options.max_pixels or most)
        share = min(1.0, math.sqrt(most / (height * width)))
        scale = Scale(max(1, int(height * share)), max(1, int(width * share)))
        return FilmPlan(indices, scale, num_frames / fps / len(indices), indices / fps, total=num_frames, fps=fps)

    def _frames(self, total: int, fps: float, height: int, width: int, options: MediaOptions) -> np.ndarray:
        """Indices of the chosen frames, int64 [count]."""
        if options.num_frames is not None or options.fps is not None:
            return even(total, options.num_frames or int(total / fps * (options.fps or fps)))
        reads = self.processor.video_processor
        settings = {name: getattr(reads, name, None) for name in reads.valid_kwargs.__annotations__}
        if not any(settings.get(name) for name in ("do_sample_frames", "num_frames", "fps")):
            return even(total, USUAL_FRAMES)
        try:
            film = metadata_of(total, fps, height, width, np.arange(total))
            found = np.asarray(reads.sample_frames(metadata=film, **settings)).astype(np.int64)
        except Exception:  # the class refuses films with fewer frames than it samples
            found = np.arange(total, dtype=np.int64)
        return found if len(found) else even(total, 1)

    def processor_inputs(self, kind: Modality, items: Sequence[MediaItem]) -> dict[str, Any]:
        if kind != "video":
            return super().processor_inputs(kind, items)
        metadata = []
        for item in items:
            plan = item.plan
            assert plan is not None, "films come with the plan by which they were decoded"
            _, height, width, _ = item.data.shape
            metadata.append(metadata_of(plan.total, plan.fps, height, width, plan.indices))
        films = [np.ascontiguousarray(item.data) for item in items]
        return {"videos": films, "video_metadata": metadata, "do_sample_frames": False}

    def blank_item(self, kind: Modality, shape: tuple[int, ...]) -> MediaItem:
        item = super().blank_item(kind, shape)
        if kind != "video":
            return item
        frames = np.arange(shape[0])
        return MediaItem(kind, item.data, 1.0, plan=FilmPlan(frames, Scale(*shape[1:3]), 1.0, total=len(frames), fps=1))


def even(total: int, count: int) -> np.ndarray:
    """`count` of `total` frames, or all, at equal distances from the first; int64."""
    count = max(1, min(count, total))
    return np.arange(count, dtype=np.int64) * total // count


def metadata_of(total: int, fps: float, height: int, width: int, indices: np.ndarray) -> Any:
    """A film's metadata for the processor."""
    from transformers.video_utils import VideoMetadata

    return VideoMetadata(
        total_num_frames=total,
        fps=fps,
        height=height,
        width=width,
        duration=total / fps,
        frames_indices=indices.tolist(),
    )
