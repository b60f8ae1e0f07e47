"""InternVL: a picture becomes up to twelve tiles, in the grid nearest to its shape, and a view of the whole.

Pool (`process`) and loop (`fill`). Pictures come unscaled, because tiles and the whole view are scaled separately.

    slot of a picture   <img> rows of tile 1, tile 2 ... whole </img>
    slot of a film      Frame1: <img> rows of frame 1 </img> newline Frame2: <img> rows of frame 2 </img>
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from engine.base.request import Modality
from mm.errors import MediaError
from mm.item import MediaItem, MediaOptions, Processed
from mm.processors.base import Encode, Filling, no_texts
from mm.processors.films import Films
from mm.processors.pictures import AS_DECODED, picture_settings, sides
from mm.transform.image import Scale

START, END, NEWLINE = "<img>", "</img>", "\n"
CONTEXT = "<IMG_CONTEXT>"  # the released code writes this token for each row of a picture
IMAGENET = {"image_mean": (0.485, 0.456, 0.406), "image_std": (0.229, 0.224, 0.225)}


class InternVL(Films):
    """Processor of InternVLForConditionalGeneration."""

    picture_bytes: int = AS_DECODED
    usual_frames: ClassVar[int] = 8
    usual_side: ClassVar[int] = 448

    def __init__(
        self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0, encode: Encode = no_texts
    ) -> None:
        super().__init__(folder, config, picture_bytes, encode)
        if sides(self.raw.get("size"), self.side) != (self.side, self.side):
            raise ValueError(f"size={self.raw['size']}; the tower reads tiles of {self.side} x {self.side} pixels")
        self.least, self.most = int(self.raw.get("min_patches", 1)), int(self.raw.get("max_patches", 12))
        self.thumbnail = True
        if self.raw.get("crop_to_patches") is False:
            self.most = 1
        merge = round(1 / float(config.get("downsample_ratio", 0.5)))
        self.tokens = (self.side // self.patch // merge) ** 2
        self.film_id = film_token(Path(folder), encode)
        if self.film_id is None:
            self.modalities = frozenset(("image",))
        else:
            self.media_token_ids = frozenset((self.image_id, self.film_id))

    def choices(self) -> tuple[Any, ...]:
        return self.side, self.least, self.most, self.thumbnail

    def cost(self, modality: Modality, item_bytes: int) -> int:
        if modality == "video":
            return super().cost(modality, item_bytes)
        return item_bytes + (self.most + 1) * self.side**2 * 3 * 14 + (1 << 20)

    def plan_image(self, height: int, width: int, options: MediaOptions) -> Scale:
        most = min(self.most, (options.max_pixels or self.most * self.side**2) // self.side**2)
        columns, rows = canvas(height, width, self.side, self.least, most) if most > 1 else (1, 1)
        return Scale(rows * self.side, columns * self.side, self.patching.resample)

    def features(self, item: MediaItem, options: MediaOptions) -> tuple[dict[str, np.ndarray], int]:
        assert item.scale is not None, "pictures come as decoded"
        whole, side = item.scale.array(item.data), self.side
        rows, columns = item.scale.height // side, item.scale.width // side
        tiles = [
            whole[row * side : (row + 1) * side, column * side : (column + 1) * side]
            for row in range(rows)
            for column in range(columns)
        ]
        if len(tiles) > 1 and self.thumbnail:
            tiles.append(Scale(side, side, self.patching.resample).array(item.data))
        return self.tiles(tiles), len(tiles) * self.tokens

    def frames(self, total: int, count: int) -> np.ndarray:
        """Middle frames of `count` equal pieces; float32 as in the reference, so that both truncate to the same
        frame.
        """
        step = total / count
        return (step / 2 + np.arange(count) * step).astype(np.float32).astype(np.int64)

    def film_features(self, tiles: dict[str, np.ndarray], frames: int) -> tuple[dict[str, np.ndarray], int]:
        return tiles, frames * self.tokens

    def fill(self, processed: Processed) -> Filling:
        (part,) = processed.parts
        start, end = self.encode(START), self.encode(END)
        film = part.modality == "video"
        each = self.tokens if film else part.num_tokens
        ids: list[int] = []
        runs = []
        for number in range(part.num_tokens // each):
            if film:
                ids += self.encode(f"{NEWLINE if number else ''}Frame{number + 1}: ")
            ids += start
            runs.append((len(ids), each))
            ids += [*[self.image_id] * each, *end]
        return Filling(np.array(ids, np.int32), (tuple(runs),))


class InternVLChat(InternVL):
    """Processor of InternVLChatModel: constants and words are from its released code and model cards, or from
    config.json.

    Films use the token of pictures: the tokenizer has no token for films, and templates write neither.
    """

    def __init__(
        self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0, encode: Encode = no_texts
    ) -> None:
        super().__init__(folder, config, picture_bytes, encode)
        self.patching = self.film_patching = picture_settings({**IMAGENET, **self.raw}, self.patching)
        self.least, self.most = int(config.get("min_dynamic_patch", 1)), int(config.get("max_dynamic_patch", 12))
        if not config.get("dynamic_image_size", True):
            self.most = 1
        self.thumbnail = bool(config.get("use_thumbnail", True))
        try:
            self.image_id = self.one(CONTEXT)
        except MediaError:
            raise ValueError(
                f"InternVLChatModel names its images' token in the tokenizer alone, and {CONTEXT} is not found "
                "there; --language-model-only serves the decoder"
            ) from None
        self.film_id, self.modalities = self.image_id, frozenset(("image", "video"))
        self.media_token_ids = frozenset((self.image_id,))

    def frames(self, total: int, count: int) -> np.ndarray:
        """Choose frames like load_video of the model cards: the last piece ends at the last frame, and the starts of
        pieces are rounded.
        """
        step = (total - 1) / count
        return (step / 2 + np.round(step * np.arange(count))).astype(np.int64)


def film_token(folder: Path, encode: Encode) -> int | None:
    """The id of the token that templates write for a film; None if the tokenizer has no such token."""
    file = folder / "tokenizer_config.json"
    words = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    more = words.get("extra_special_tokens")
    named = words.get("video_token") or (more.get("video_token") if isinstance(more, dict) else None) or "<video>"
    try:
        ids = encode(str(named))
    except MediaError:  # there is no tokenizer
        return None
    return ids[0] if len(ids) == 1 else None


@functools.lru_cache(maxsize=1024)
def canvas(height: int, width: int, side: int, least: int, most: int) -> tuple[int, int]:
    """(columns, rows) of the grid of tiles nearest to a picture's shape; among equals, the largest that the picture
    fills.
    """
    grids = [
        (columns, rows)
        for columns in range(1, most + 1)
        for rows in range(1, most + 1)
        if least <= columns * rows <= most
    ]
    best, nearest = (1, 1), float("inf")
    for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        distance = abs(width / height - columns / rows)
        fills = distance == nearest and width * height > 0.5 * side * side * columns * rows
        if distance < nearest or fills:
            best, nearest = (columns, rows), distance
    return best
