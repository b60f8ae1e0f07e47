"""The picture kernels on a real GPU: the host's bits, except the last rounding of a fused multiply-add."""

import pytest
import torch

from engine.kernels.image import PatchLayout, launch_patches, pixels_to_patches_reference
from mm.transform.image import PatchSettings, normal_of, resize_table

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]
SIZES = [
    (1, (1024, 1024), (1036, 1036)),
    (1, (1080, 1920), (1092, 1932)),
    (1, (600, 800), (588, 812)),
    (1, (2000, 701), (532, 700)),
    (1, (3000, 4000), (840, 1120)),
    (5, (56, 84), (56, 84)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("frames", "size", "new"), SIZES)
def test_patches_equal_the_reference(frames, size, new, dtype):
    pixels = torch.randint(0, 256, (frames, *size, 3), dtype=torch.uint8)
    rows, columns = (torch.from_numpy(resize_table(*pair)) for pair in zip(size, new))
    normal, layout = normal_of(PatchSettings()).tolist(), PatchLayout(14, 2, 2, dtype)
    wanted = pixels_to_patches_reference(pixels, columns, rows, normal, layout)
    got = launch_patches(pixels.cuda(), columns.cuda(), rows.cuda(), normal, layout).cpu()
    assert got.dtype is dtype
    # One level of a pixel is 0.015 here, so no pixel changes its level.
    torch.testing.assert_close(got, wanted, rtol=2**-8 if dtype is torch.bfloat16 else 0, atol=1e-6)
