"""An 8-bit KV cache on a CPU: stored codes, and attention over them, in every instruction set."""

from __future__ import annotations

import pytest
import torch

from engine.cache.tokens import FullSpec
from engine.kernels.attention.paged import paged_attention, paged_attention_reference
from engine.kernels.pages import decode, pages_of
from engine.kernels.rotate import qkv_rope_store, qkv_rope_store_reference
from tests.kernels.test_attention import Pages, close

pytestmark = pytest.mark.usefixtures("isa")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KINDS = ["made", "given", "e5m2"]


def cache_of(kind, kv_heads, dim, block_size, num_blocks):
    """(keys, values, scales) over pages filled with NaN."""
    given = (tuple(0.5 + h for h in range(kv_heads)), tuple(2.0 - h / 8 for h in range(kv_heads)))
    spec = FullSpec(kv_heads, dim, E5M2 if kind == "e5m2" else E4M3, given=given if kind == "given" else None)
    size = -(-spec.block_bytes(block_size) // 16) * 16 + 32  # a page of its group may be larger
    return pages_of(spec.views(torch.full((num_blocks, size), 255, dtype=torch.uint8), block_size))


def put(keys, values, kind, block_size, num_blocks, slots, store=qkv_rope_store):
    """Stores keys and values [T, Hkv, D] unchanged, without rotation or norm; returns the cache."""
    tokens, kv_heads, dim = keys.shape
    cache = cache_of(kind, kv_heads, dim, block_size, num_blocks)
    qkv = torch.cat([torch.zeros(tokens, kv_heads, dim, dtype=keys.dtype), keys, values], 1).flatten(1)
    cos, sin = torch.ones(tokens, 1), torch.zeros(tokens, 1)
    k, v, scales = cache
    store(qkv, cos, sin, None, None, 0.0, kv_heads, kv_heads, dim, k, v, slots, scales=scales)
    return cache


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [20, 64, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_scales_are_the_bits_of_the_reference(kind, dim, dtype):
    heads = torch.randn(40, 3, dim) * torch.logspace(-12, 5, 40)[:, None, None]
    heads[1] = 0.0
    heads[2, :, 1:] = 0.0
    heads[3, 0, 0], heads[3, 1, 1], heads[3, 2, 2] = float("nan"), float("inf"), -float("inf")
    heads[4, :, :16] = torch.arange(16) * 2.0**-10 + 2.0**-11  # ties between the smallest codes
    heads[5, :, :16] = torch.tensor([448.0, 463, 464, 1e9, -449, 57344, 6e4, 2.0**-17] * 2)
    keys, values = heads.to(dtype), (heads.flip(0) * 3).to(dtype)
    slots = torch.randperm(48)[:40]
    slots[7] = -1
    got, want = (put(keys, values, kind, 16, 3, slots, store) for store in (qkv_rope_store, qkv_rope_store_reference))
    for ours, theirs in zip(got[:2], want[:2]):
        nan = theirs.float().isnan()  # the signs of NaN do not matter
        assert torch.equal(ours.float().isnan(), nan)
        assert torch.equal(ours.view(torch.uint8)[~nan], theirs.view(torch.uint8)[~nan])
    for ours, theirs in zip(got[2] or (), want[2] or ()):
        assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


@pytest.mark.parametrize("kind", ["made", "given"])
def test_stored_values_are_within_a_sixteenth_with_keys_up_to_two_thousand(kind):
    keys = torch.randn(32, 2, 64).clamp(-3, 3)
    keys[:, :, 5] *= 2000 / 3
    k, _, scales = put(keys, keys / 100, "made", 16, 2, torch.arange(32))
    if kind == "given":  # a scale of 1 saturates
        scales = tuple(torch.ones(2, 2, 16) for _ in range(2))
        k.copy_(torch.stack([part.transpose(0, 1) for part in keys.split(16)]).clamp(-448, 448).to(E4M3))
    got = torch.cat([page.transpose(0, 1) for page in decode(k, scales[0], torch.float32)])
    least = (
        keys.abs().amax(-1, keepdim=True) / 448 * 2.0**-9
    )  # half of the smallest code, times less than twice the scale
    within = (got - keys).abs() <= torch.maximum(keys.abs() / 16, least) * 1.001
    assert bool(within.all()) == (kind == "made")


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"window": 40}, {"softcap": 3.0}])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), [(4, 2, 64, 16), (7, 1, 80, 16), (8, 8, 20, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_equals_the_reference_over_the_stored_codes(kind, heads, kv_heads, dim, block_size, options, dtype):
    lengths, queries = [1, 130, 77, 600], [1, 1, 77, 50]
    pages = Pages(lengths, kv_heads, dim, block_size, torch.float32)
    meta, q = pages.meta(queries), torch.randn(sum(queries), heads, dim).to(dtype)
    k, v, scales = cache_of(kind, kv_heads, dim, block_size, len(pages.k))
    for row, length in enumerate(lengths):
        count = -(-length // block_size)
        slots = (pages.tables[row, :count, None].long() * block_size + torch.arange(block_size)).flatten()[:length]
        qkv = torch.randn(length, 3 * kv_heads, dim).to(dtype).flatten(1)
        cos, sin = torch.ones(length, 1), torch.zeros(length, 1)
        qkv_rope_store(qkv, cos, sin, None, None, 0.0, kv_heads, kv_heads, dim, k, v, slots, scales=scales)
    sinks = torch.randn(heads)
    got = paged_attention(q, k, v, meta, dim**-0.5, **options, sinks=sinks, scales=scales)
    exact = [decode(c, None if scales is None else scales[i], torch.float64).nan_to_num() for i, c in enumerate((k, v))]
    close(got, paged_attention_reference(q.double(), *exact, meta, dim**-0.5, **options, sinks=sinks), dtype)
    reference = paged_attention_reference(q, k, v, meta, dim**-0.5, **options, sinks=sinks, scales=scales)
    close(reference.nan_to_num(), got.double().where(~reference.isnan(), 0.0), dtype)


def test_the_sums_of_a_token_do_not_depend_on_its_company():
    keys = torch.randn(200, 2, 64)
    k, v, scales = put(keys, keys.flip(0), "made", 16, 13, torch.arange(200))
    pages = Pages([200], 2, 64, 16, torch.float32)
    pages.tables[0, :13] = torch.arange(13)
    q = torch.randn(200, 4, 64)
    together = paged_attention(q, k, v, pages.meta([200]), 0.125, scales=scales)
    for first, last in ((0, 1), (5, 70), (199, 200)):
        meta = pages.meta([last - first], lengths=[last])
        assert torch.equal(paged_attention(q[first:last], k, v, meta, 0.125, scales=scales), together[first:last])
