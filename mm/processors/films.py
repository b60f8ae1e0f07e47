"""Films of the families whose encoders read each frame separately; most scale a frame to one tile of any shape.

Pool (`process`) and loop (`fill`). In: a film. Out: its frames' patches, frame after frame; the family's file defines
the tokens and rows. Frames are chosen at equal distances, as many as the checkpoint's files or the request specify.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from engine.base.request import Modality
from mm.decode.frames import FilmPlan
from mm.errors import unsupported
from mm.item import MediaItem, MediaOptions, Part, Processed
from mm.limits import MediaLimits
from mm.processors.base import Encode, Filling, no_texts, read_processor_files
from mm.processors.pictures import CLIP, Pictures, picture_settings, tower_side
from mm.processors.qwen_vl import BYTES_PER_PIXEL
from mm.transform.image import Scale


class Films(Pictures):
    """A processor of pictures, and of films whose frames are tiles."""

    modalities: frozenset[Modality] = frozenset(("image", "video"))
    usual_frames: ClassVar[int]  # the model card's number of frames, for files and requests without a number
    usual_side: ClassVar[int]  # side of the encoder's tiles if config.json gives none
    film_id: int | None = None  # the token that the template writes for a film; None: films are not read

    def __init__(
        self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0, encode: Encode = no_texts
    ) -> None:
        super().__init__(folder, config, picture_bytes, encode)
        video = read_processor_files(folder).video
        self.side = tower_side(config, self.usual_side)
        self.film_patching = picture_settings(video, replace(CLIP, patch_size=self.patch))
        self.film_frames, self.film_fps = video.get("num_frames"), video.get("fps")

    def placeholder(self, modality: Modality) -> int:
        return super().placeholder(modality) if modality == "image" or self.film_id is None else self.film_id

    def settings(self, modality: Modality, options: MediaOptions) -> bytes:
        if modality == "image":
            return super().settings(modality, options)
        frames = self.film_frames, self.film_fps, options.num_frames, options.fps
        return repr((type(self).__name__, self.film_patching, self.side, frames)).encode()

    def cost(self, modality: Modality, item_bytes: int) -> int:
        """Bytes held; a frame's patches are floats, in two copies."""
        return super().cost(modality, item_bytes) if modality == "image" else item_bytes * 9 + (1 << 20)

    def plan_film(
        self, num_frames: int, fps: float, height: int, width: int, options: MediaOptions, limits: MediaLimits
    ) -> FilmPlan:
        if self.film_id is None:
            raise unsupported("this model does not read videos")
        scale = self.frame_scale(height, width, options)
        total = min(limits.video_max_total_pixels, limits.request_decoded_bytes // (2 * BYTES_PER_PIXEL))
        most = min(limits.video_max_frames, num_frames, max(1, total // scale.pixels))
        count = max(1, min(self._wanted(num_frames, fps, options), most))
        indices = self.frames(num_frames, count)
        return FilmPlan(indices, scale, num_frames / fps / count, indices / fps)

    def frame_scale(self, height: int, width: int, options: MediaOptions) -> Scale:
        """The size of each chosen frame."""
        return Scale(self.side, self.side, self.film_patching.resample)

    def _wanted(self, num_frames: int, fps: float, options: MediaOptions) -> int:
        if options.num_frames is not None:
            return options.num_frames
        if options.fps is not None:
            return int(num_frames / fps * options.fps)
        if self.film_frames:
            return int(self.film_frames)
        return int(num_frames / fps * self.film_fps) if self.film_fps else self.usual_frames

    def frames(self, total: int, count: int) -> np.ndarray:
        """Indices of the chosen frames out of `total`, int64 [count]."""
        return np.arange(count, dtype=np.int64) * total // count

    def process(self, item: MediaItem, digest: bytes, options: MediaOptions) -> Processed:
        if item.modality == "image":
            return super().process(item, digest, options)
        features, count = self.film_features(self.tiles(list(item.data), self.film_patching), len(item.data))
        return Processed("video", (Part("video", digest, count, features),))

    @abstractmethod
    def film_features(self, tiles: dict[str, np.ndarray], frames: int) -> tuple[dict[str, np.ndarray], int]:
        """A film's features from the tiles of its frames, and the number of rows that the encoder makes of them."""

    def fill(self, processed: Processed) -> Filling:
        (part,) = processed.parts
        token = self.placeholder(part.modality)
        return Filling(np.full(part.num_tokens, token, np.int32), (((0, part.num_tokens),),))
