"""Pictures and frames to normalised patches, in the order of Qwen's vision encoders.

Pool only. In: uint8 [height, width, 3]. Out: float32 [patches, channels * temporal * patch * patch]. Patches are
ordered by time, then by blocks of merge x merge neighbours, row by row. An accelerator computes the same sums itself
(engine/kernels/image) from decoded pixels and the tables made here; this file is the reference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

BILINEAR, BICUBIC = 2, 3  # Pillow's numbers; processor files store them
_REACH = 2.0  # lines on either side that contribute to a new line, unless the picture shrinks
_BITS = 22  # fraction bits of a weight: with 8 bits of a pixel and 2 bits for overshoot, a sum fits 32 bits


@dataclass(frozen=True, slots=True)
class PatchSettings:
    """How a picture becomes patches; fields as in preprocessor_config.json."""

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
        """The sides of a scaled picture are multiples of this."""
        return self.patch_size * self.merge_size

    def scale(self, height: int, width: int) -> Scale:
        """The size to which a picture of this size is scaled."""
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
    """The size of a scaled picture or frame, and Pillow's number of the filter."""

    height: int
    width: int
    resample: int = BICUBIC

    @property
    def pixels(self) -> int:
        return self.height * self.width

    def image(self, image: Image.Image) -> Image.Image:
        """Scale a Pillow image; Pillow's filters smooth when they shrink."""
        size = (self.width, self.height)
        return image if image.size == size else image.resize(size, resample=self.resample)

    def array(self, pixels: np.ndarray) -> np.ndarray:
        """Scale uint8 [h, w, 3] to uint8 [height, width, 3]."""
        if pixels.shape[:2] == (self.height, self.width):
            return pixels
        from PIL import Image

        return np.asarray(self.image(Image.fromarray(pixels)))


def grid_of(num_frames: int, height: int, width: int, settings: PatchSettings) -> tuple[int, int, int]:
    """Number of patches along time, rows and columns of `num_frames` scaled frames."""
    return -(-num_frames // settings.temporal_patch_size), height // settings.patch_size, width // settings.patch_size


def patchify(frames: np.ndarray, settings: PatchSettings) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Cut uint8 [frames, height, width, 3] into normalised patches; also returns the grid (time, rows, columns).

    The last frame is repeated until the frames fill whole temporal patches, so a still picture becomes two equal
    frames.
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
    """float32 [6]: a pixel's value becomes value * scale - shift; scale of red, green and blue, then shift of each."""
    pairs = list(zip(settings.mean, settings.std))
    return np.array([settings.rescale_factor / std for _, std in pairs] + [mean / std for mean, std in pairs], "f4")


def resize_table(size: int, new_size: int) -> np.ndarray:
    """How `size` lines become `new_size` by Pillow's bicubic filter: int32 [1 + taps, new_size].

    The first row holds the first old line for each new line; the other rows hold the weights of this line and the lines
    after it, in units of 2**-22. Sums and rounding are Pillow's (precompute_coeffs, normalize_coeffs_8bpc), so results
    are equal bit for bit.
    """
    if size == new_size:
        return np.stack([np.arange(size, dtype=np.int32), np.full(size, 1 << _BITS, np.int32)])
    scale = size / new_size
    wider = max(scale, 1.0)  # when shrinking, the filter covers more lines and so smooths
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
        total += weights[tap]  # tap by tap: the order of the sum decides the last bit
    weights = weights / total * (1 << _BITS)
    table[1:] = np.where(weights < 0, weights - 0.5, weights + 0.5).astype(np.int32)  # rounds half away from zero
    return table


def _bicubic(x: np.ndarray) -> np.ndarray:
    """Catmull-Rom cubic, a = -1/2."""
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
