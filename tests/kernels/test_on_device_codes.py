"""Codes of 8 bits in a kernel on a real accelerator: every code is widened to what torch widens it to."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.float8 import as_pairs, codes_of, widen8, widen_pairs
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
    widen_kernel[(1,)](out, codes, CODES=codes_of(cache, target()), BLOCK=1024, num_warps=1)
    exact = cache.float()
    held = ~exact.isinf()  # infinities are never stored
    torch.testing.assert_close(out.float()[held], exact[held], rtol=0, atol=0, equal_nan=True)


@triton.jit
def widen_pairs_kernel(low_out, high_out, words, CODES: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    low, high = widen_pairs(tl.load(words + place), low_out.dtype.element_ty, CODES)
    tl.store(low_out + place, low)
    tl.store(high_out + place, high)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_both_codes_of_a_word_are_widened_as_torch_does(kind, dtype):
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(8)[torch.randperm(2048, device="cuda")]
    cache = codes.view(kind)
    out = torch.empty(2, 1024, dtype=dtype, device="cuda")
    widen_pairs_kernel[(1,)](*out, as_pairs(cache), CODES=codes_of(cache, target()), BLOCK=1024, num_warps=1)
    exact = cache.float().view(1024, 2).T
    held = ~exact.isinf()
    torch.testing.assert_close(out.float()[held], exact[held], rtol=0, atol=0, equal_nan=True)
