"""Pictures and frames to normalised patches, in the order of Qwen's vision towers.

Pool only. In: uint8 [height, width, 3]. Out: float32 [patches, channels * temporal * patch * patch]; patches run
through time, then blocks of merge x merge neighbours, row by row. An accelerator does the same sums itself
(engine/kernels/image) from decoded pixels and the tables made here: this file says what comes out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

BILINEAR, BICUBIC = 2, 3  # Pillow's numbers; processor files store them
_REACH = 2.0  # old lines on either side that a new one sees, where it does not shrink them
_BITS = 22  # of a weight behind the point: eight bits of a pixel, and two for what sharpening adds, complete a word


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


def grid_of(num_frames: int, height: int, width: int, settings: PatchSettings) -> tuple[int, int, int]:
    """Patches along time, rows and columns of so many scaled frames."""
    return -(-num_frames // settings.temporal_patch_size), height // settings.patch_size, width // settings.patch_size


def patchify(frames: np.ndarray, settings: PatchSettings) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Cut uint8 [frames, height, width, 3] into normalised patches; returns them and the grid (time, rows, columns).

    The last frame is repeated until the number of frames fills whole temporal patches, which is how a still picture
    becomes two equal frames.
    """
    patch, merge, temporal = settings.patch_size, settings.merge_size, settings.temporal_patch_size
    num_frames, height, width, _ = frames.shape
    grid = grid_of(num_frames, height, width, settings)
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


def normal_of(settings: PatchSettings) -> np.ndarray:
    """float32 [6]: a pixel's value becomes value * scale - shift; scale of red, green and blue, then shift."""
    pairs = list(zip(settings.mean, settings.std))
    return np.array([settings.rescale_factor / std for _, std in pairs] + [mean / std for mean, std in pairs], "f4")


def resize_table(size: int, new_size: int) -> np.ndarray:
    """How `size` lines become `new_size` by Pillow's bicubic filter: int32 [1 + taps, new_size].

    First the old line at which each new one begins to look, then what it takes of that and each line behind it, in
    parts of 2**22. Sums and roundings are Pillow's (precompute_coeffs, normalize_coeffs_8bpc), so are all bits.
    """
    if size == new_size:
        return np.stack([np.arange(size, dtype=np.int32), np.full(size, 1 << _BITS, np.int32)])
    scale = size / new_size
    wider = max(scale, 1.0)  # a filter over many lines smooths what shrinks
    reach = _REACH * wider
    centre = (np.arange(new_size) + 0.5) * scale
    first = np.maximum((centre - reach + 0.5).astype(np.int64), 0)
    count = np.minimum((centre + reach + 0.5).astype(np.int64), size) - first
    taps = int(count.max())
    table = np.zeros((1 + taps, new_size), np.int32)
    table[0] = first
    weights = np.zeros((taps, new_size))
    total = np.zeros(new_size)
    for tap in range(taps):
        weights[tap] = np.where(tap < count, _bicubic((tap + first - centre + 0.5) * (1.0 / wider)), 0.0)
        total += weights[tap]  # one after the other: the order decides the last bit
    weights = weights / total * (1 << _BITS)
    table[1:] = np.where(weights < 0, weights - 0.5, weights + 0.5).astype(np.int32)  # towards zero
    return table


def _bicubic(x: np.ndarray) -> np.ndarray:
    """Catmull and Rom's cubic, a = -1/2."""
    x = np.abs(x)
    near = ((-0.5 + 2.0) * x - (-0.5 + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * -0.5
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _normalised(frame: np.ndarray, settings: PatchSettings) -> np.ndarray:
    """uint8 [height, width, 3] to float32 [3, height, width], scaled and centred per channel."""
    planes = np.ascontiguousarray(frame.transpose(2, 0, 1)).astype(np.float32)
    for plane, mean, std in zip(planes, settings.mean, settings.std):
        plane *= np.float32(settings.rescale_factor / std)
        plane -= np.float32(mean / std)
    return planes
