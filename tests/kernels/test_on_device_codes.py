"""Keys and values as codes of 8 bits on a real accelerator: what is stored, and attention over it against float64."""

from __future__ import annotations

import pytest
import torch

from engine.cache.spec import FullSpec, pages_of
from engine.kernels.attention.paged import paged_attention, paged_attention_reference
from engine.kernels.gemm.pack import pack
from engine.kernels.pages import decode, encode
from engine.kernels.rotate import qkv_rope_store, qkv_rope_store_reference
from tests.kernels.test_on_device import PLACEMENT, STEPS, draw, error, listed, pages

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]
KINDS = ["made", "given", "e5m2"]
LIMIT = 4e-3  # of bfloat16's rounding of weights and of the result, over exact codes


def cache_of(kind, kv_heads, dim, num_blocks, block_size=16):
    given = (tuple(0.5 + h / 8 for h in range(kv_heads)), tuple(2.0 - h / 8 for h in range(kv_heads)))
    dtype = torch.float8_e5m2 if kind == "e5m2" else torch.float8_e4m3fn
    spec = FullSpec(kv_heads, dim, dtype, given=given if kind == "given" else None)
    size = -(-spec.block_bytes(block_size) // 16) * 16
    empty = torch.full((num_blocks, size), 255, dtype=torch.uint8, device="cuda")
    return pages_of(spec.views(empty, block_size))


def coded(kind, keys, values):
    """A cache of codes with these numbers, and none where they are none."""
    num_blocks, kv_heads, block_size, dim = keys.shape
    k, v, scales = cache_of(kind, kv_heads, dim, num_blocks, block_size)
    block, offset = (~keys[:, 0, :, 0].isnan()).nonzero(as_tuple=True)
    for number, (numbers, cache) in enumerate(((keys, k), (values, v))):
        encode(numbers[block, :, offset], cache, scales and scales[number], block, offset)
    return k, v, scales


@pytest.mark.parametrize(("dim", "half", "late"), [(128, 64, False), (80, 20, False), (64, 32, True)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [37, 1500])
def test_store(tokens, kind, dim, half, late):
    heads, kv_heads, num_blocks = 12, 4, 100
    qkv, angle = draw(tokens, (heads + 2 * kv_heads) * dim), torch.randn(tokens, half, device="cuda")
    norms = torch.randn(dim, device="cuda"), torch.randn(dim, device="cuda")
    got, want = (cache_of(kind, kv_heads, dim, num_blocks) for _ in range(2))
    slots = torch.randperm(num_blocks * 16, device="cuda")[:tokens]
    args = (qkv, angle.cos(), angle.sin(), *norms, 1e-6, heads, kv_heads, dim)
    qkv_rope_store(*args, *got[:2], slots, late, got[2])
    qkv_rope_store_reference(*args, *want[:2], slots, late, want[2])
    for number in range(2):
        ours, theirs = (decode(cache[number], cache[2] and cache[2][number], torch.float64) for cache in (got, want))
        assert torch.equal(ours.isnan(), theirs.isnan())
        # The reference rounds to bfloat16 on the way to the codes, so a few numbers are the next code.
        assert ((ours - theirs).abs() > 0.01 * theirs.abs()).double().mean() < 0.1
        room = theirs.abs() * (0.26 if kind == "e5m2" else 0.13) + theirs.nan_to_num().abs().amax() / 100
        assert not ((ours - theirs).abs() > room).any()


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (100, 0.0), (0, 30.0)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (16, 8, 64), (8, 8, 80), (8, 4, 256)])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", KINDS)
def test_attention(kind, step, heads, kv_heads, dim, window, softcap):
    contexts, queries = STEPS[step]
    *numbers, meta = pages(contexts, queries, kv_heads, dim)
    k, v, scales = coded(kind, *numbers)
    q, meta = draw(sum(queries), heads, dim), listed(meta, heads, kv_heads, dim)
    sinks = torch.randn(heads, device="cuda")
    options = (dim**-0.5, window, softcap, sinks, scales)
    want = paged_attention_reference(q.double(), k, v, meta, *options)
    assert error(paged_attention(q, k, v, meta, *options), want) < LIMIT


@pytest.mark.parametrize("context", [4096, 32768, 131072])
def test_decode_of_long_contexts(context):
    *numbers, meta = pages([context], [1], 8, 128)
    k, v, scales = coded("made", *numbers)
    q, meta = draw(1, 32, 128), listed(meta, 32, 8, 128, 1)
    want = paged_attention_reference(q.double(), k, v, meta, 128**-0.5, scales=scales)
    assert error(paged_attention(q, k, v, meta, 128**-0.5, scales=scales), want) < LIMIT


def test_a_steps_own_codes_and_scales_are_seen():
    """Also behind a store that has only just been launched; neighbours' scales share a line of the unit's cache."""
    heads, kv_heads, dim = 16, 8, 128
    contexts = [1, 16, 17, 32, 33, 63, 64, 65, 95, 97, 127, 128, 129, 160, 161, 192, 200, 256, 300, 521]
    rows = len(contexts)
    *numbers, meta = pages(contexts, [1] * rows, kv_heads, dim)
    k, v, scales = coded("made", *numbers)
    last = [(int(meta.block_tables[line, (n - 1) // 16]), (n - 1) % 16) for line, n in zip(meta.table_row, contexts)]
    slots = torch.tensor([block * 16 + place for block, place in last], device="cuda")
    weight = pack(draw((heads + 2 * kv_heads) * dim, 1024), None, PLACEMENT)
    angle, norms = torch.randn(rows, dim // 2, device="cuda"), (draw(dim), draw(dim))
    cos, sin, inputs = angle.cos(), angle.sin(), [draw(rows, 1024) * 0.02 * 2**n for n in range(20)]
    meta, got = listed(meta, heads, kv_heads, dim, rows), []
    for settle in (False, True):
        for x in inputs:
            qkv = weight.linear(x)
            q = qkv_rope_store(qkv, cos, sin, *norms, 1e-6, heads, kv_heads, dim, k, v, slots, scales=scales)
            if settle:
                torch.cuda.synchronize()
            got.append(paged_attention(q, k, v, meta, dim**-0.5, scales=scales))
    assert all(torch.equal(a, b) for a, b in zip(got[: len(inputs)], got[len(inputs) :]))
    want = paged_attention_reference(q.double(), k, v, meta, dim**-0.5, scales=scales)
    assert error(got[-1], want) < LIMIT
