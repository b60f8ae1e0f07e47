"""Pictures: the common base of families that read only pictures; each family defines how it scales, cuts and writes
them.

Pool (`process`) and loop (`fill`). In: a picture, scaled as planned, or unscaled if `picture_bytes` says that the
family scales it. Out: its patches row by row, tile after tile, and the tokens of its slot.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from engine.base.request import Modality
from mm.decode.frames import FilmPlan
from mm.errors import MediaError, unsupported
from mm.item import MediaItem, MediaOptions, Part, Processed
from mm.limits import MediaLimits
from mm.processors.base import Encode, Filling, Placed, no_texts, read_processor_files
from mm.processors.qwen_vl import token_id, triple
from mm.transform.image import BICUBIC, PatchSettings, Scale, patchify

AS_DECODED = 1 << 31  # bytes: more than any picture has
CLIP = PatchSettings(temporal_patch_size=1, merge_size=1)


class Pictures(ABC):
    """The base class of their processors."""

    modalities: frozenset[Modality] = frozenset(("image",))
    writes_texts: ClassVar[bool] = True
    picture_bytes: int = 0
    longest_sound: float = math.inf

    def __init__(
        self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0, encode: Encode = no_texts
    ) -> None:
        """`picture_bytes` is 0: the encoders of these families make no patches."""
        files = read_processor_files(folder)
        self.raw = files.image
        self.config = config
        vision = config["vision_config"]
        patch = vision.get("patch_size", 16 if vision.get("model_type") == "pixtral" else 14)
        self.patch = int(patch[0] if isinstance(patch, list) else patch)
        self.patching = picture_settings(self.raw, replace(CLIP, patch_size=self.patch))
        self.image_id = token_id(config, "image", 32000)
        self.media_token_ids = frozenset((self.image_id,))
        self.encode = encode

    def placeholder(self, modality: Modality) -> int:
        return self.image_id

    def settings(self, modality: Modality, options: MediaOptions) -> bytes:
        return repr((type(self).__name__, astuple(self.patching), self.choices(), options.max_pixels)).encode()

    @abstractmethod
    def choices(self) -> tuple[Any, ...]:
        """Further settings that affect the features of a picture."""

    def cost(self, modality: Modality, item_bytes: int) -> int:
        return item_bytes * 8 + (1 << 20)

    @abstractmethod
    def plan_image(self, height: int, width: int, options: MediaOptions) -> Scale:
        """The size at which a picture is decoded."""

    def plan_film(
        self, num_frames: int, fps: float, height: int, width: int, options: MediaOptions, limits: MediaLimits
    ) -> FilmPlan:
        raise unsupported("this model does not read videos")

    def process(self, item: MediaItem, digest: bytes, options: MediaOptions) -> Processed:
        features, count = self.features(item, options)
        return Processed("image", (Part("image", digest, count, features),))

    @abstractmethod
    def features(self, item: MediaItem, options: MediaOptions) -> tuple[dict[str, np.ndarray], int]:
        """Arrays for the encoder, and the number of rows that it makes of them."""

    def fill(self, processed: Processed) -> Filling:
        (part,) = processed.parts
        return Filling(np.full(part.num_tokens, self.image_id, np.int32), (((0, part.num_tokens),),))

    def positions(self, length: int, token_ids: np.ndarray, placed: list[Placed]) -> tuple[np.ndarray | None, int]:
        return None, 0

    def tiles(self, pictures: list[np.ndarray], patching: PatchSettings | None = None) -> dict[str, np.ndarray]:
        """Features of pictures of one size, uint8 [height, width, 3]; sides are cut to whole patches.

        `patching`: how pixels become numbers, if not as in pictures.
        """
        height, width = (side // self.patch for side in pictures[0].shape[:2])
        cut = [picture[: height * self.patch, : width * self.patch] for picture in pictures]
        patches = np.concatenate([patchify(picture[None], patching or self.patching)[0] for picture in cut])
        return {"pixel_values": patches, "grid": np.array([height, width], np.int64)}

    def one(self, text: str) -> int:
        """The id of a single token that this family writes."""
        ids = self.encode(text)
        if len(ids) != 1:
            raise MediaError(500, "internal_error", f"the tokenizer of this checkpoint has no token {text}")
        return ids[0]


def picture_settings(raw: dict[str, Any], default: PatchSettings) -> PatchSettings:
    """How pixels become numbers, and the filter that scales pictures."""
    rescale = float(raw.get("rescale_factor", default.rescale_factor)) if raw.get("do_rescale", True) else 1.0
    mean, std = (raw.get(f"image_{name}") or getattr(default, name) for name in ("mean", "std"))
    normalise = raw.get("do_normalize", True)
    return replace(
        default,
        resample=int(raw.get("resample", BICUBIC)),
        rescale_factor=rescale,
        mean=triple(mean) if normalise else (0.0, 0.0, 0.0),
        std=triple(std) if normalise else (1.0, 1.0, 1.0),
    )


def sides(given: Any, default: int) -> tuple[int, int]:
    """(height, width) of {"height": h, "width": w}, of {"shortest_edge": s}, or of a number."""
    if not given:
        return default, default
    if isinstance(given, dict):
        edge = given.get("shortest_edge") or given.get("longest_edge") or 0
        return int(given.get("height") or edge), int(given.get("width") or edge)
    return int(given), int(given)


def tower_side(config: dict[str, Any], default: int) -> int:
    """Side in pixels of the encoder's pictures."""
    size = config["vision_config"].get("image_size", default)
    return int(size[0] if isinstance(size, list) else size)
