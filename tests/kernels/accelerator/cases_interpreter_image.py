"""The picture kernels in the interpreter against their reference, which has the bits of Pillow (kernels/test_image)."""

import pytest
import torch
import triton  # noqa: F401  (must precede the import of any kernel file; TRITON_INTERPRET sets the mode)

from engine.kernels.image import PatchLayout, launch_patches, pixels_to_patches_reference, rows_first
from engine.kernels.target import HAS_TRITON
from mm.transform.image import PatchSettings, normal_of, resize_table

LAYOUT = PatchLayout(4, 2, 2, torch.float32)
SIZES = {
    "columns first": (1, (12, 21), (8, 16)),
    "rows first": (1, (30, 9), (8, 8)),
    "as it is": (1, (8, 16), (8, 16)),
    "frames": (3, (8, 10), (8, 8)),
    "wider than a program": (1, (9, 300), (8, 280)),
}


def case(frames, size, new):
    draw = torch.Generator().manual_seed(sum(size))
    pixels = torch.randint(0, 256, (frames, *size, 3), dtype=torch.uint8, generator=draw)
    rows, columns = (torch.from_numpy(resize_table(*pair)) for pair in zip(size, new))
    return pixels, columns, rows, normal_of(PatchSettings()).tolist(), LAYOUT


def same(given) -> None:
    torch.testing.assert_close(launch_patches(*given), pixels_to_patches_reference(*given), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", SIZES)
def test_patches_equal_the_reference(name):
    assert HAS_TRITON
    frames, size, new = SIZES[name]
    assert rows_first(*size, *new) == (name == "rows first")
    same(case(frames, size, new))


@pytest.mark.parametrize("value", [-1, 1 << 30, -(1 << 30), 7])
def test_a_broken_table_stays_inside_the_picture(value):
    given = case(1, (10, 10), (8, 8))
    for table in given[1:3]:
        table[0] = value
    same(given)
