"""A quantised KV cache on a real GPU: codes are converted as torch converts them; attention keeps a token's bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.cache.tokens import FullSpec
from engine.kernels.attention import prefill
from engine.kernels.attention.paged import paged_attention, paged_attention_reference
from engine.kernels.attention.work import empty_list, fill_list, max_parts
from engine.kernels.float8 import as_pairs, codes_of, widen8, widen_pairs
from engine.kernels.pages import decode, pages_of
from engine.kernels.rotate import qkv_rope_store
from engine.kernels.target import target, tl, triton
from tests.kernels.test_on_device import LIMIT, draw, error, pages

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


KINDS = [torch.float8_e4m3fn, torch.float8_e5m2]


def coded(kind, count):
    """Random keys, values and scales of 8 heads of 128."""
    spec = FullSpec(8, 128, kind)
    numbers = torch.zeros(count, spec.block_bytes(16), device="cuda", dtype=torch.uint8)
    keys, values, scales = pages_of(spec.views(numbers, 16))
    for cache in (keys, values):
        cache.copy_((torch.randn(cache.shape, device="cuda") * (40 if scales else 1)).to(kind))
    for scale in scales or ():
        scale.copy_(torch.exp2(torch.randint(-7, -4, scale.shape, device="cuda").float()))
    return keys, values, scales


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_large_tiles_give_a_token_the_bits_of_small_ones(kind, invariant, monkeypatch):
    shape, *_, meta = pages([1900, 300, 70], [1700, 300, 1], 8, 128)
    keys, values, scales = coded(kind, len(shape))
    q = draw(2001, 32, 128)
    work = empty_list(3, 2001, max_parts(10_000, 16, 3), 32, 128, "cuda", large=True)
    fill_list(work, meta, 4, invariant)
    meta, got = replace(meta, work=work), []
    for large in (False, True):
        monkeypatch.setattr(prefill, "takes_large", lambda *_, large=large: large)
        got.append(paged_attention(q, keys, values, meta, 0.03, scales=scales))
    assert torch.equal(*got)
    want = paged_attention_reference(q.double(), keys, values, meta, 0.03, scales=scales)
    assert error(got[0], want) < LIMIT


@pytest.mark.parametrize("kind", KINDS)
def test_many_parts_are_added_in_one_order_whoever_comes_last(kind):
    contexts = [9000, 60, 30_000]
    shape, *_, meta = pages(contexts, [1] * 3, 8, 128)
    keys, values, scales = coded(kind, len(shape))
    q = draw(3, 32, 128)
    work = empty_list(3, 3, max_parts(10_000, 16, 3, 8), 32, 128, "cuda", 8)
    fill_list(work, meta, 4)
    meta = replace(meta, work=work)
    assert int(work.num_parts) > 64
    first = paged_attention(q, keys, values, meta, 0.03, scales=scales)
    want = paged_attention_reference(q.double(), keys, values, meta, 0.03, scales=scales)
    assert error(first, want) < LIMIT
    for _ in range(50):
        assert torch.equal(paged_attention(q, keys, values, meta, 0.03, scales=scales), first)
    assert not work.arrived.any()


LONG = 131_072  # tokens


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_context_is_read_within_what_bfloat16_results_allow(kind):
    """An error of at most 4e-3 of the norm, over the stored codes: for a single row, and for a prompt's last tokens."""
    shape, *_, meta = pages([LONG], [17], 8, 128)
    keys, values, scales = coded(kind, len(shape))
    del shape
    q = draw(17, 32, 128)
    for rows in (1, 17):
        asked = replace(
            meta, query_start=torch.tensor([0, rows], dtype=torch.int32, device="cuda"), decode_only=rows == 1
        )
        work = empty_list(1, rows, max_parts(10_000, 16, 1, 8), 32, 128, "cuda", 8, large=True)
        fill_list(work, asked, 4)
        asked = replace(asked, work=work)
        got = paged_attention(q[:rows], keys, values, asked, 128**-0.5, scales=scales)
        want = paged_attention_reference(q[:rows].double(), keys, values, asked, 128**-0.5, scales=scales)
        print(f"{kind}, {rows} rows at {LONG}: {error(got, want):.2e}")
        assert error(got, want) <= 4e-3


@pytest.mark.parametrize("given", [None, ((1.0,) * 8,) * 2])
def test_stored_keys_of_up_to_two_thousand_are_within_a_sixteenth(given):
    """With scales per token and head; a fixed scale of 1, as checkpoints may give, fails."""
    spec = FullSpec(8, 128, torch.float8_e4m3fn, given=given)
    keys, values, scales = pages_of(
        spec.views(torch.zeros(4, spec.block_bytes(16), dtype=torch.uint8, device="cuda"), 16)
    )
    large = draw(64, 8, 128).clamp(-3, 3)
    large[:, :, 5] *= 2000 / 3
    small = large / 100
    qkv = torch.cat([draw(64, 32, 128), large, small], 1).flatten(1)
    cos, sin = torch.ones(64, 64, device=qkv.device), torch.zeros(64, 64, device=qkv.device)
    slots = torch.arange(64, device=qkv.device)
    qkv_rope_store(qkv, cos, sin, None, None, 0.0, 32, 8, 128, keys, values, slots, scales=scales)
    within = []
    for stored, cache, scale in ((large.float(), keys, scales[0]), (small.float(), values, scales[1])):
        got = decode(cache, scale, torch.float32).transpose(1, 2).flatten(0, 1)  # [tokens, heads, 128]
        # Half of the smallest code, times less than twice the scale.
        least = stored.abs().amax(-1, keepdim=True) / 448 * 2.0**-9
        within.append(bool(((got - stored).abs() <= torch.maximum(stored.abs() / 16, least) * 1.001).all()))
    assert within[0] == (given is None)
    assert given is not None or within[1]
