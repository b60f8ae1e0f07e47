"""Gemma 4: pictures and frames keep their shape and have as many rows as the checkpoint allows, at any size.

Pool (`process`) and loop (`fill`). A frame has fewer rows than a picture, and its time precedes it; the renderer writes
the time of the first frame before the slot (server/render/preambles). A sound has 25 rows a second. Films are read
without their sound.

    slot of a picture   <|image>  I I I I  <image|>
    slot of a film      (00:00 ) <|image>  V V  <image|> 00:01 <|image>  V V  <image|>
    slot of a sound     <|audio>  A A A A  <audio|>
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from engine.base.request import Modality
from mm.decode.frames import FilmPlan
from mm.item import MediaItem, MediaOptions, Part, Processed
from mm.limits import MediaLimits
from mm.processors.base import Encode, Filling, no_texts, read_processor_files
from mm.processors.films import Films
from mm.processors.gemma4_sound import LONGEST, Front
from mm.processors.pictures import picture_settings
from mm.processors.qwen3_vl import framed
from mm.processors.qwen_vl import token_id
from mm.transform.image import Scale

UNSCALED = {"image_mean": (0.0, 0.0, 0.0), "image_std": (1.0, 1.0, 1.0)}  # pixels from 0 to 1, as in the release
FRAMES = 4  # mel frames per row


class Gemma4(Films):
    """Processor of Gemma4ForConditionalGeneration."""

    modalities: frozenset[Modality] = frozenset(("image", "video", "audio"))
    usual_frames: ClassVar[int] = 32
    usual_side: ClassVar[int] = 0  # unused: each frame keeps its own shape

    def __init__(
        self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0, encode: Encode = no_texts
    ) -> None:
        super().__init__(folder, {**config, "vision_config": {"patch_size": 16, **config["vision_config"]}}, 0, encode)
        files = read_processor_files(folder)
        self.raw = {"do_normalize": False, **self.raw}
        self.patching = picture_settings(self.raw, self.patching)
        self.film_patching = picture_settings({**UNSCALED, **files.video}, self.film_patching)
        self.pool = int(config["vision_config"].get("pooling_kernel_size", 3))
        self.rows = int(self.raw.get("max_soft_tokens") or 280)
        self.film_rows = int(files.video.get("max_soft_tokens") or 70)  # rows per frame
        self.image_id, self.film_id = token_id(config, "image", 258_880), token_id(config, "video", 258_884)
        self.begin, self.end = int(config.get("boi_token_id") or 255_999), int(config.get("eoi_token_id") or 258_882)
        self.takes_audio = config.get("audio_config") is not None
        self.sound = Front.of(files.audio)
        self.sound_id = token_id(config, "audio", 258_881)
        ends = config.get("eoa_token_id") or config.get("eoa_token_index")
        self.sound_begin, self.sound_end = int(config.get("boa_token_id") or 256_000), int(ends or 258_883)
        self.media_token_ids = frozenset((self.image_id, self.film_id, *([self.sound_id] if self.takes_audio else [])))
        self.longest_sound = LONGEST / self.sound.rate
        if not self.takes_audio:
            self.modalities = frozenset(("image", "video"))

    def placeholder(self, modality: Modality) -> int:
        return self.sound_id if modality == "audio" else super().placeholder(modality)

    def settings(self, modality: Modality, options: MediaOptions) -> bytes:
        if modality == "audio":
            return repr(self.sound).encode()
        return super().settings(modality, options) + repr((self.film_rows, options.max_pixels)).encode()

    def choices(self) -> tuple[Any, ...]:
        return self.pool, self.rows

    def cost(self, modality: Modality, item_bytes: int) -> int:
        return self.sound.cost(item_bytes) if modality == "audio" else super().cost(modality, item_bytes)

    def plan_image(self, height: int, width: int, options: MediaOptions) -> Scale:
        return self.scale(height, width, self.rows, options)

    def frame_scale(self, height: int, width: int, options: MediaOptions) -> Scale:
        return replace(self.scale(height, width, self.film_rows, options), resample=self.film_patching.resample)

    def scale(self, height: int, width: int, most: int, options: MediaOptions) -> Scale:
        """The largest size of this shape with at most `most` squares of pooled patches."""
        unit = self.patch * self.pool
        if options.max_pixels:
            most = max(1, min(most, options.max_pixels // unit**2))
        ratio = math.sqrt(most * unit**2 / (height * width))
        rows, columns = math.floor(ratio * height / unit), math.floor(ratio * width / unit)
        if not rows:
            rows, columns = 1, min(max(1, width // height), most)
        elif not columns:
            rows, columns = min(max(1, height // width), most), 1
        return Scale(rows * unit, columns * unit, self.patching.resample)

    def plan_film(
        self, num_frames: int, fps: float, height: int, width: int, options: MediaOptions, limits: MediaLimits
    ) -> FilmPlan:
        return replace(super().plan_film(num_frames, fps, height, width, options, limits), silent=True)

    def process(self, item: MediaItem, digest: bytes, options: MediaOptions) -> Processed:
        if item.modality == "audio":
            features = self.sound.log_mel(item.data)
            rows = -(-len(features) // FRAMES)
            return Processed("audio", (Part("audio", digest, rows, {"input_features": features}),))
        processed = super().process(item, digest, options)
        if item.modality == "image":
            return processed
        assert item.seconds is not None, "this processor's plans hold the time of each frame"
        processed.parts[0].features["seconds"] = item.seconds
        return replace(processed, preamble=f"{clock(item.seconds[0])} ")

    def features(self, item: MediaItem, options: MediaOptions) -> tuple[dict[str, np.ndarray], int]:
        features = self.tiles([item.data])
        return features, len(features["pixel_values"]) // self.pool**2

    def film_features(self, tiles: dict[str, np.ndarray], frames: int) -> tuple[dict[str, np.ndarray], int]:
        return tiles, len(tiles["pixel_values"]) // self.pool**2

    def fill(self, processed: Processed) -> Filling:
        (part,) = processed.parts
        if part.modality == "video":
            first = part.features["seconds"][0]
            return framed(
                part,
                self.placeholder("video"),
                lambda second: (*(() if second == first else self.encode(f" {clock(second)} ")), self.begin),
                lambda _: (self.end,),
            )
        token = self.placeholder(part.modality)
        begin, end = (self.begin, self.end) if part.modality == "image" else (self.sound_begin, self.sound_end)
        ids = np.array([begin, *[token] * part.num_tokens, end], np.int32)
        return Filling(ids, (((1, part.num_tokens),),))


def clock(seconds: float) -> str:
    """Minutes and seconds, as in 01:05."""
    return f"{int(seconds // 60):02d}:{int(seconds % 60):02d}"
