"""Codes of 8 bits in a kernel on a real accelerator: every code is widened to what torch widens it to."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.float8 import codes_of, widen8
from engine.kernels.target import target, tl, triton

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]


@triton.jit
def widen_kernel(out, codes, CODES: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(out + place, widen8(tl.load(codes + place), out.dtype.element_ty, CODES))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_code_is_widened_as_torch_does(kind, dtype):
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(4)[torch.randperm(1024, device="cuda")]
    cache = codes.view(kind)
    out = torch.empty(1024, dtype=dtype, device="cuda")
    widen_kernel[(1,)](out, codes, CODES=codes_of(cache, target(), dtype), BLOCK=1024, num_warps=1)
    exact = cache.float()
    held = ~exact.isinf()  # infinities are never stored
    torch.testing.assert_close(out.float()[held], exact[held], rtol=0, atol=0, equal_nan=True)
