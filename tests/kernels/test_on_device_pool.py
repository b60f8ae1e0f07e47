"""Pooled rows on a device against their references, and rows written into pinned memory."""

import pytest
import torch

from engine.kernels.pool_home import launch_pool_home
from engine.kernels.pool_rows import KINDS, launch_pool, pool_rows_reference

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "skips"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)])
def test_rows_equal_the_reference(kind, dtype, skips):
    bounds = torch.tensor([0, 512, 512, 530, 2000, 2048], dtype=torch.int32, device="cuda")
    hidden = torch.randn(2048, 1000, device="cuda").to(dtype)
    counted = torch.tensor([500, 0, 3, 0, 48], dtype=torch.int32) if skips else None
    found = launch_pool(hidden, bounds, kind, None if counted is None else counted.cuda())
    wanted = pool_rows_reference(hidden.cpu(), bounds.cpu(), kind, counted)
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-4, atol=1e-4)


def test_lines_reach_pinned_memory():
    out = torch.zeros(3, 9, 1024, pin_memory=True)
    lines = torch.randn(7, 1024, device="cuda")
    launch_pool_home(out, lines, torch.tensor([1], dtype=torch.int32, device="cuda"))
    torch.cuda.synchronize()
    assert torch.equal(out[1, :7], lines.cpu())
    assert not out[0].any()
    assert not out[1, 7:].any()
