"""The device's picture kernels against mm/transform; scaling must be equal bit by bit."""

import numpy as np
import pytest
import torch

from engine.kernels.image import PatchLayout, pixels_to_patches
from mm.transform.image import PatchSettings, Scale, normal_of, patchify, resize_table

SETTINGS = PatchSettings()
LAYOUT = PatchLayout(SETTINGS.patch_size, SETTINGS.merge_size, SETTINGS.temporal_patch_size, torch.float32)
SIZES = [
    ((60, 80), (56, 84)),  # fewer lines, more columns
    ((80, 60), (84, 56)),
    ((100, 333), (84, 336)),
    ((300, 31), (140, 28)),
    ((31, 300), (28, 140)),
    ((50, 50), (56, 56)),
    ((31, 33), (280, 56)),
    ((56, 84), (56, 84)),
    ((700, 900), (28, 28)),
]


def picture(*shape: int) -> np.ndarray:
    """Noise in the upper half, black and white pixels in the lower half: there sharpening exceeds the range."""
    draw = np.random.default_rng(sum(shape)).integers(0, 256, (*shape, 3), dtype=np.uint8)
    half = shape[-2] // 2
    draw[..., half:, :, :] = np.where(draw[..., half:, :, :] > 127, 255, 0)
    return draw


def on_device(frames: np.ndarray, size: tuple[int, int], layout: PatchLayout = LAYOUT) -> torch.Tensor:
    rows, columns = (torch.from_numpy(resize_table(*pair)) for pair in zip(frames.shape[1:3], size))
    return pixels_to_patches(torch.from_numpy(frames), columns, rows, normal_of(SETTINGS).tolist(), layout)


@pytest.mark.parametrize(("size", "new"), SIZES)
def test_pictures_equal_the_hosts(size, new):
    pixels = picture(*size)
    wanted, grid = patchify(Scale(*new).array(pixels)[None], SETTINGS)
    got = on_device(pixels[None], new)
    assert len(got) == np.prod(grid)
    np.testing.assert_array_equal(got.numpy(), wanted)


def test_any_size_has_the_bits_of_pillow():
    draw = np.random.default_rng(5)
    for _ in range(60):
        size = tuple(int(side) for side in draw.integers(4, 200, 2))
        new = tuple(28 * int(count) for count in draw.integers(1, 6, 2))
        pixels = picture(*size)
        wanted, _ = patchify(Scale(*new).array(pixels)[None], SETTINGS)
        np.testing.assert_array_equal(on_device(pixels[None], new).numpy(), wanted, err_msg=f"{size} to {new}")


@pytest.mark.parametrize("count", [1, 2, 5])
def test_films_repeat_their_last_frame(count):
    frames = picture(count, 28, 56)
    wanted, _ = patchify(frames, SETTINGS)
    np.testing.assert_array_equal(on_device(frames, (28, 56)).numpy(), wanted)


def test_towers_of_other_dtypes_get_rounded_numbers():
    pixels = picture(40, 40)[None]
    wide = on_device(pixels, (28, 28))
    narrow = on_device(pixels, (28, 28), PatchLayout(14, 2, 2, torch.bfloat16))
    assert torch.equal(narrow, wide.bfloat16())


def test_new_sides_must_fill_blocks():
    with pytest.raises(AssertionError, match="multiples of 28"):
        on_device(picture(40, 40)[None], (28, 42))
