"""Pictures and frames to normalised patches, in the order of Qwen's vision towers.

Pool only. In: uint8 [height, width, 3]. Out: float32 [patches, channels * temporal * patch * patch]; patches run
through time, then blocks of merge x merge neighbours, row by row. The device version of the same sums will have this
file as its reference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

BICUBIC = 3  # Pillow's number; processor files store it


@dataclass(frozen=True, slots=True)
class PatchSettings:
    """How a picture becomes patches; values as in preprocessor_config.json."""

    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    resample: int = BICUBIC
    rescale_factor: float = 1 / 255
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)

    @property
    def factor(self) -> int:
        """Sides of a scaled picture are multiples of this."""
        return self.patch_size * self.merge_size

    def scale(self, height: int, width: int) -> Scale:
        """What a picture of this size is brought to."""
        return Scale(*smart_resize(height, width, self.factor, self.min_pixels, self.max_pixels), self.resample)


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """The size nearest to the original whose sides are multiples of `factor` and whose area is within bounds."""
    new_height = round(height / factor) * factor
    new_width = round(width / factor) * factor
    area = height * width
    if new_height * new_width > max_pixels:
        shrink = math.sqrt(area / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / area)
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


@dataclass(frozen=True, slots=True)
class Scale:
    """The size that a picture or frame is brought to, and Pillow's number of the filter."""

    height: int
    width: int
    resample: int = BICUBIC

    @property
    def pixels(self) -> int:
        return self.height * self.width

    def image(self, image: Image.Image) -> Image.Image:
        """Scale a Pillow image; its filters smooth when they shrink."""
        size = (self.width, self.height)
        return image if image.size == size else image.resize(size, resample=self.resample)

    def array(self, pixels: np.ndarray) -> np.ndarray:
        """Scale uint8 [h, w, 3] to uint8 [height, width, 3]."""
        if pixels.shape[:2] == (self.height, self.width):
            return pixels
        from PIL import Image

        return np.asarray(self.image(Image.fromarray(pixels)))


def patchify(frames: np.ndarray, settings: PatchSettings) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Cut uint8 [frames, height, width, 3] into normalised patches; returns them and the grid (time, rows, columns).

    The last frame is repeated until the number of frames fills whole temporal patches, which is how a still picture
    becomes two equal frames.
    """
    patch, merge, temporal = settings.patch_size, settings.merge_size, settings.temporal_patch_size
    num_frames, height, width, _ = frames.shape
    grid = (-(-num_frames // temporal), height // patch, width // patch)
    blocks = (grid[0], grid[1] // merge, grid[2] // merge)
    patches = np.empty((*blocks, merge, merge, 3, temporal, patch, patch), dtype=np.float32)
    for index in range(grid[0] * temporal):
        time, step = divmod(index, temporal)
        if index >= num_frames:
            patches[time, ..., step, :, :] = patches[time, ..., step - 1, :, :]
            continue
        planes = _normalised(frames[index], settings)  # [3, height, width]
        split = planes.reshape(3, blocks[1], merge, patch, blocks[2], merge, patch)
        # -> block rows, block columns, merge, merge, channel, patch, patch
        patches[time, ..., step, :, :] = split.transpose(1, 4, 2, 5, 0, 3, 6)
    return patches.reshape(grid[0] * grid[1] * grid[2], 3 * temporal * patch * patch), grid


def _normalised(frame: np.ndarray, settings: PatchSettings) -> np.ndarray:
    """uint8 [height, width, 3] to float32 [3, height, width], scaled and centred per channel."""
    planes = np.ascontiguousarray(frame.transpose(2, 0, 1)).astype(np.float32)
    for plane, mean, std in zip(planes, settings.mean, settings.std):
        plane *= np.float32(settings.rescale_factor / std)
        plane -= np.float32(mean / std)
    return planes
