"""Phi-4-multimodal's pictures: a view of the whole as one tile, and the picture in as many tiles as it fills, at most
36.

Pool. The picture is scaled into its tiles by Pillow's bilinear filter, and padded with white at the right and at the
bottom. The view of the whole is this padded picture, scaled by a cubic filter that does not smooth. Each row is made of
four patches. Rows are in line order, without rows that hold only padding; a separator follows each line and precedes
the whole view.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mm.errors import unsupported
from mm.item import MediaItem, MediaOptions
from mm.processors.pictures import picture_settings
from mm.transform.image import PatchSettings, Scale, patchify

BILINEAR = 2  # Pillow's number
CUBIC = -0.75  # torch's
LEAST = 10  # pixels of a scaled side
POOL = 2
SETTINGS = PatchSettings(temporal_patch_size=1, merge_size=1, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


@dataclass(frozen=True, slots=True)
class Plan:
    """A scaled picture and its grid of tiles."""

    rows: int  # tiles
    columns: int
    height: int  # pixels of the scaled picture
    width: int


class Pictures:
    """Cuts pictures into tiles, and orders the rows of the tiles."""

    def __init__(self, raw: dict[str, Any], vision: dict[str, Any]) -> None:
        """`raw`: settings in the processor's files; `vision`: the encoder's section of config.json, empty if it has
        none.
        """
        self.patching = replace(
            picture_settings(raw, SETTINGS), patch_size=int(vision.get("patch_size", 14)), resample=BILINEAR
        )
        self.side = int(vision.get("image_size", 448))
        self.most = int(raw.get("dynamic_hd", 36))

    @property
    def across(self) -> int:
        """Patches along a side of a tile."""
        return self.side // self.patching.patch_size

    def plan(self, height: int, width: int, options: MediaOptions) -> Plan:
        """The layout of a picture of this size; a request may lower the number of tiles."""
        most = self.most
        if options.max_pixels is not None:
            most = max(1, min(most, options.max_pixels // self.side**2))
        return planned(height, width, self.side, most)

    def scale(self, height: int, width: int, options: MediaOptions) -> Scale:
        plan = self.plan(height, width, options)
        return Scale(plan.height, plan.width, BILINEAR)

    def cost(self, item_bytes: int) -> int:
        return item_bytes + (self.most + 2) * self.side**2 * 3 * 14 + (1 << 20)

    def features(self, item: MediaItem, options: MediaOptions) -> tuple[dict[str, np.ndarray], int]:
        """Arrays for the encoder (engine/encoders/phi4mm_vision.py), and the number of rows that it makes of them."""
        height, width = item.data.shape[:2]
        plan, side = self.plan(height, width, options), self.side
        canvas = np.full((plan.rows * side, plan.columns * side, 3), 255, np.uint8)
        canvas[: plan.height, : plan.width] = self.scale(height, width, options).array(item.data)
        whole = cubic(cubic(canvas.astype(np.float32), side).transpose(1, 0, 2), side).transpose(1, 0, 2)
        tiles = [
            canvas[row : row + side, column : column + side]
            for row in range(0, len(canvas), side)
            for column in range(0, canvas.shape[1], side)
        ]
        patches = np.concatenate([patchify(tile[None], self.patching)[0] for tile in (whole, *tiles)])
        extents, places = arranged(plan, side, self.patching.patch_size)
        return {"pixel_values": patches, "extents": extents, "places": places}, len(places)


@functools.lru_cache(maxsize=1024)
def planned(height: int, width: int, side: int, most: int) -> Plan:
    """The layout as in Microsoft's processor; MediaError if the scaled picture would be too narrow."""
    columns, rows = math.ceil(width / side), math.ceil(height / side)
    if columns * rows > most:
        columns, rows = closest(width / height, width * height, side, most)
    by_width, by_height = columns * side / width, rows * side / height
    if by_width < by_height:
        plan = Plan(rows, columns, int(height * by_width), columns * side)
    else:
        plan = Plan(rows, columns, rows * side, int(width * by_height))
    if min(plan.height, plan.width) < LEAST:
        raise unsupported(
            f"the image is {width}x{height}; scaled for this model it would be {plan.width}x{plan.height}, and "
            f"sides of {LEAST} pixels are needed: cut it, or send an image that is less narrow"
        )
    return plan


def closest(aspect: float, area: int, side: int, most: int) -> tuple[int, int]:
    """(columns, rows) of tiles nearest in shape; among equals the larger, if the picture fills half of its area."""
    best, least = (1, 1), math.inf
    for columns, rows in _shapes(most):
        distance = abs(aspect - columns / rows)
        if distance < least:
            best, least = (columns, rows), distance
        elif distance == least and area > 0.5 * side * side * columns * rows:
            best = (columns, rows)
    return best


@functools.cache
def _shapes(most: int) -> list[tuple[int, int]]:
    """All grids of at most `most` tiles, small ones first."""
    found = {(i, j) for n in range(1, most + 1) for i in range(1, n + 1) for j in range(1, n + 1) if i * j <= most}
    return sorted(found, key=lambda shape: shape[0] * shape[1])


@functools.lru_cache(maxsize=256)
def arranged(plan: Plan, side: int, patch: int) -> tuple[np.ndarray, np.ndarray]:
    """Extents int64 [1 + tiles, 2] in patches. Places int64 [rows]: indices of the tiles' rows, then of two
    separators.
    """
    across = side // patch
    filled = [total * side - visible for total, visible in ((plan.rows, plan.height), (plan.columns, plan.width))]
    visible = [total * across - white // patch for total, white in zip((plan.rows, plan.columns), filled)]
    first = np.arange(max(plan.rows, plan.columns)) * across
    high, wide = (np.clip(count - first, 0, across) for count in visible)
    tiles = [(high[row], wide[column]) for row in range(plan.rows) for column in range(plan.columns)]
    extents = np.array([(across, across), *tiles], np.int64)
    grid = across // POOL
    separator = len(extents) * grid**2
    lines, columns = (np.arange(-(-count // POOL)) for count in visible)
    tile = 1 + (lines // grid)[:, None] * plan.columns + columns // grid
    itself = tile * grid**2 + (lines % grid)[:, None] * grid + columns % grid
    whole = np.arange(grid**2).reshape(grid, grid)
    ended = [np.pad(part, ((0, 0), (0, 1)), constant_values=separator).reshape(-1) for part in (itself, whole)]
    places = np.concatenate([ended[0], [separator + 1], ended[1]]).astype(np.int64)
    for array in (extents, places):
        array.flags.writeable = False
    return extents, places


def cubic(lines: np.ndarray, count: int) -> np.ndarray:
    """float32 [n, ...] -> [count, ...]: each new line from four neighbours, without smoothing when it shrinks."""
    at = (np.arange(count) + 0.5) * (len(lines) / count) - 0.5
    low = np.floor(at)
    made = np.zeros((count, *lines.shape[1:]), np.float32)
    for tap in range(-1, 3):
        far = np.abs(at - low - tap)
        near = ((CUBIC + 2) * far - (CUBIC + 3)) * far * far + 1
        share = np.where(far <= 1, near, ((CUBIC * far - 5 * CUBIC) * far + 8 * CUBIC) * far - 4 * CUBIC)
        index = np.clip(low + tap, 0, len(lines) - 1).astype(np.int64)
        made += lines[index] * share.astype(np.float32).reshape(-1, *(1,) * (lines.ndim - 1))
    return made
