"""Triton kernels on a real GPU, with random bfloat16 inputs, against float64 references."""

from dataclasses import replace

import pytest
import torch

from engine.attention.meta import AttentionMeta
from engine.kernels.activation import Activation, glu, glu_reference, pointwise, pointwise_reference
from engine.kernels.attention import prefill
from engine.kernels.attention.dense import dense_attention, dense_attention_reference
from engine.kernels.attention.disentangled import disentangled_attention, disentangled_attention_reference
from engine.kernels.attention.paged import paged_attention, paged_attention_reference
from engine.kernels.attention.work import empty_list, fill_list, max_parts
from engine.kernels.convolution import gated_convolution, gated_convolution_reference
from engine.kernels.gate import gate_reference, multiply_by_sigmoid
from engine.kernels.gemm.pack import Placement, pack, pack_gated
from engine.kernels.norm import layer_norm, layer_norm_reference, rms_norm, rms_norm_reference
from engine.kernels.projection_norm import normalise_projections, projection_norm_reference
from engine.kernels.rotate import apply_rope, apply_rope_reference, qkv_rope_store, qkv_rope_store_reference
from engine.kernels.target import target
from engine.kernels.xielu import xielu, xielu_reference
from tests.kernels.convolutions import ROWS, drawn, moved

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]
PLACEMENT = Placement(torch.bfloat16, "cuda")
LIMIT = 8e-3  # bfloat16's rounding


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-9))


@pytest.mark.parametrize(("rows", "width"), [(1, 1024), (17, 4096), (300, 5120), (3, 100)])
def test_norms(rows, width):
    x, weight, bias = draw(rows, width), draw(width), draw(width)
    assert error(rms_norm(x, weight, 1e-6), rms_norm_reference(x.double(), weight.double(), 1e-6)) < LIMIT
    assert torch.equal(rms_norm(x, weight, 1e-6, out=torch.empty_like(x)), rms_norm(x, weight, 1e-6))
    want = layer_norm_reference(x.double(), weight.double(), bias.double(), 1e-5)
    assert error(layer_norm(x, weight, bias, 1e-5), want) < LIMIT


@pytest.mark.parametrize("width", [12288, 3072, 70])
def test_activations(width):
    x = draw(33, 2 * width)
    for activation in Activation:
        assert error(glu(x, activation), glu_reference(x.double(), activation)) < LIMIT
        if activation is not Activation.CLAMPED_SWIGLU:
            assert error(pointwise(x, activation), pointwise_reference(x.double(), activation)) < LIMIT


@pytest.mark.parametrize("width", [4096, 6144, 70])
def test_gates(width):
    values, projected = draw(33, width), 4 * draw(33, width + 512)
    want = gate_reference(values.double(), projected.double()[:, :width])
    assert error(multiply_by_sigmoid(values, projected[:, :width]), want) < LIMIT


def test_xielu():
    x, slopes = draw(33, 14336), torch.tensor([0.8, 1.3, 0.5, -1e-6], device="cuda")
    assert error(xielu(x, slopes), xielu_reference(x.double(), slopes)) < LIMIT


@pytest.mark.parametrize("rows", [ROWS, [(0, 3000), (500, 700)]])
def test_convolution(rows):
    projected, pages, meta = drawn(2048, torch.bfloat16, rows, padding=3)
    weight, held, stored = torch.randn(3, 2048), pages.clone(), pages.cuda()
    want = gated_convolution_reference(projected, weight, None, held, meta)
    got = gated_convolution(projected.cuda(), weight.cuda(), None, stored, moved(meta, "cuda"))
    count = sum(new for _, new in rows)
    assert error(got[:count].cpu(), want[:count]) < LIMIT
    assert torch.equal(stored.cpu().nan_to_num(7.0), held.nan_to_num(7.0))


@pytest.mark.parametrize(("heads", "kv_heads", "whole"), [(40, 40, True), (40, 8, True), (96, 8, False)])
def test_norms_of_projections(heads, kv_heads, whole):
    qkv = draw(37, (heads + 2 * kv_heads) * 128)
    q_weight, k_weight = (torch.randn(count * 128, device="cuda") for count in (heads, kv_heads))
    groups = (heads * 128, kv_heads * 128) if whole else (128, 128)
    want = qkv.double()
    normalise_projections(qkv, q_weight, k_weight, *groups, 1e-5, not whole)
    projection_norm_reference(want, q_weight, k_weight, *groups, 1e-5, not whole)
    assert error(qkv, want) < LIMIT


@pytest.mark.parametrize("rows", [1, 37, 512])
def test_products(rows):
    x, weight, up, bias = draw(rows, 1024), draw(3072, 1024), draw(3072, 1024), draw(3072)
    want = x.double() @ weight.double().T
    assert error(pack(weight, bias, PLACEMENT).linear(x), want + bias.double()) < LIMIT
    gated = torch.nn.functional.silu(want) * (x.double() @ up.double().T)
    assert error(pack_gated(weight, up, PLACEMENT).gated(x, Activation.SILU), gated) < 2 * LIMIT


QKV = [
    (128, 64, True, False),
    (64, 32, False, False),
    (80, 20, True, False),
    (96, 48, True, False),
    (128, 64, True, True),
    (256, 128, False, False),
]


@pytest.mark.parametrize(("dim", "half", "norm", "late"), QKV)
def test_qkv_rope_store(dim, half, norm, late):
    tokens, heads, kv_heads = 65, 32, 8
    qkv, angle = draw(tokens, (heads + 2 * kv_heads) * dim), torch.randn(tokens, half, device="cuda")
    weights = (draw(dim), draw(dim)) if norm else (None, None)
    slots = torch.randperm(20 * 16, device="cuda")[:tokens]
    caches = [torch.zeros(20, kv_heads, 16, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    args = (qkv, angle.cos(), angle.sin(), *weights, 1e-6, heads, kv_heads, dim)
    got = qkv_rope_store(*args, caches[0], caches[1], slots, late)
    want = qkv_rope_store_reference(*args, caches[2], caches[3], slots, late)
    for mine, theirs in ((got, want), (caches[0], caches[2]), (caches[1], caches[3])):
        assert error(mine, theirs) < LIMIT


@pytest.mark.parametrize(("dim", "half", "norm", "late"), QKV)
def test_a_head_has_the_same_bits_in_any_step(dim, half, norm, late):
    tokens, heads, kv_heads = 1500, 32, 8
    qkv, angle = draw(tokens, (heads + 2 * kv_heads) * dim), torch.randn(tokens, half, device="cuda")
    weights = (draw(dim), draw(dim)) if norm else (None, None)

    def stored(count):
        caches = [torch.zeros(100, kv_heads, 16, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        slots = torch.arange(count, device="cuda")
        turns = angle[:count].cos(), angle[:count].sin()
        q = qkv_rope_store(qkv[:count], *turns, *weights, 1e-6, heads, kv_heads, dim, *caches, slots, late)
        return q, *(cache.transpose(1, 2).flatten(0, 1)[:count] for cache in caches)

    whole = stored(tokens)
    for count in (1, 12, 300, 1030):
        assert all(torch.equal(got, want[:count]) for got, want in zip(stored(count), whole)), count


@pytest.mark.parametrize(("dim", "half"), [(128, 64), (80, 20), (72, 36)])
def test_rotation_alone(dim, half):
    fused, angle = draw(37, 3 * 5, dim), torch.randn(37, half, device="cuda")
    x = fused[:, 5:10]  # a view into the product, like a tower's queries
    want = apply_rope_reference(x.double(), angle.cos(), angle.sin())
    assert error(apply_rope(x, angle.cos(), angle.sin()), want) < LIMIT


def pages(contexts, queries, kv_heads, dim, block_size=16):
    counts = [-(-length // block_size) for length in contexts]
    order = torch.randperm(sum(counts) + 2)
    caches = torch.full((2, len(order), kv_heads, block_size, dim), float("nan"), device="cuda", dtype=torch.bfloat16)
    tables = torch.zeros(len(contexts), max(counts), dtype=torch.int32)
    used = 0
    for row, (length, count) in enumerate(zip(contexts, counts)):
        tables[row, :count] = order[used : used + count]
        used += count
        for number, block in enumerate(tables[row, :count].tolist()):
            fill = min(block_size, length - number * block_size)
            caches[:, block, :, :fill] = draw(2, kv_heads, fill, dim)
    lines = torch.randperm(len(contexts) + 2)[: len(contexts)]  # rows of other slots are between them
    table = torch.zeros(len(contexts) + 2, max(counts), dtype=torch.int32)
    table[lines] = tables
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    mapping = torch.zeros(0, dtype=torch.int64, device="cuda")
    lengths = torch.tensor(contexts, dtype=torch.int32)
    meta = AttentionMeta(
        starts.cuda(),
        lengths.cuda(),
        table.cuda(),
        mapping,
        table_row=lines.to(torch.int32).cuda(),
        decode_only=max(queries) == 1,
    )
    keys, values = caches.transpose(0, 1).contiguous().unbind(1)  # adjacent in a page, as in a layer's cache
    return keys, values, meta


def listed(meta, heads, kv_heads, dim, max_rows=8, room=0, invariant=False):
    """The metadata with its work lists; in a step too, the lists are written before any kernel that may begin early."""
    tokens = int(meta.query_start[-1])
    work = empty_list(max_rows, tokens, room or max_parts(10_000, 16, max_rows), heads, dim, "cuda")
    fill_list(work, meta, heads // kv_heads, invariant)
    torch.cuda.synchronize()
    return replace(meta, work=work)


STEPS = {
    "decode": ([1, 16, 33, 261, 2048, 1000, 0], [1, 1, 1, 1, 1, 1, 0]),
    "prefill": ([200, 700], [200, 700]),
    "chunk": ([900, 2000], [400, 129]),
    "mixed": ([400, 65, 1700, 300], [1, 65, 1, 90]),
}


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_work_lists(step, invariant):
    contexts, queries = STEPS[step]
    _, _, meta = pages(contexts, queries, 1, 16)
    home = [getattr(meta, name).cpu() for name in ("query_start", "context_len", "table_row")]
    near = replace(meta, query_start=home[0], context_len=home[1], table_row=home[2])
    got, want = (empty_list(8, sum(queries), 40, 2, 16, device) for device in ("cuda", "cpu"))
    fill_list(got, meta, 2, invariant)
    fill_list(want, near, 2, invariant)
    parts, tiles = int(want.num_parts), int(want.num_tiles)
    assert (int(got.num_parts), int(got.num_tiles)) == (parts, tiles)
    assert torch.equal(got.parts[:parts, :7].cpu(), want.parts[:parts, :7])
    assert torch.equal(got.tiles[:tiles].cpu(), want.tiles[:tiles])


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (100, 0.0), (0, 30.0), (100, 30.0)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(32, 8, 128), (16, 8, 64), (28, 4, 128), (8, 8, 80), (16, 4, 96), (8, 4, 256)]
)
@pytest.mark.parametrize("step", STEPS)
def test_paged_attention(step, heads, kv_heads, dim, window, softcap):
    contexts, queries = STEPS[step]
    k_cache, v_cache, meta = pages(contexts, queries, kv_heads, dim)
    q = draw(sum(queries), heads, dim)
    meta = listed(meta, heads, kv_heads, dim)
    sinks = torch.randn(heads, device="cuda") * 3
    sinks[1], sinks[2] = 20.0, float("-inf")
    for sink in (None, sinks):
        got = paged_attention(q, k_cache, v_cache, meta, dim**-0.5, window, softcap, sink)
        want = paged_attention_reference(q.double(), k_cache, v_cache, meta, dim**-0.5, window, softcap, sink)
        assert error(got, want) < LIMIT


@pytest.mark.parametrize("sunken", [False, True])
def test_an_invariant_list_gives_a_token_the_same_bits_however_its_prompt_was_cut(sunken):
    sinks = torch.randn(32, device="cuda") if sunken else None
    k_cache, v_cache, meta = pages([1500], [1500], 8, 128)  # enough tiles for the kernel of large launches
    q = draw(1500, 32, 128)

    def attend(first, last):
        starts, length = torch.tensor([0, last - first]), torch.tensor([last])
        part = replace(meta, query_start=starts.int().cuda(), context_len=length.int().cuda(), decode_only=False)
        args = (k_cache, v_cache, listed(part, 32, 8, 128, 1, invariant=True), 0.1)
        return paged_attention(q[first:last].contiguous(), *args, sinks=sinks)

    whole = attend(0, 1500)
    for first, last in ((0, 1), (5, 70), (63, 64), (300, 513), (650, 700), (700, 1500), (1499, 1500)):
        assert torch.equal(attend(first, last), whole[first:last]), (first, last)


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (100, 0.0), (0, 30.0)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(32, 8, 128), (16, 8, 64), (28, 4, 128), (8, 8, 80), (16, 4, 96), (8, 4, 256)]
)
def test_a_launch_of_many_tiles_gives_the_bits_of_one_of_few(heads, kv_heads, dim, window, softcap, monkeypatch):
    k_cache, v_cache, meta = pages([1100, 300], [900, 300], kv_heads, dim)
    q = draw(1200, heads, dim)
    meta = listed(meta, heads, kv_heads, dim, 2)
    got = []
    for units in (1, 10**6):
        monkeypatch.setattr(prefill, "target", lambda units=units: replace(target(), num_units=units))
        got.append(paged_attention(q, k_cache, v_cache, meta, dim**-0.5, window, softcap))
        want = paged_attention_reference(q.double(), k_cache, v_cache, meta, dim**-0.5, window, softcap)
        assert error(got[-1], want) < LIMIT
    assert torch.equal(*got)


def test_parts_are_added_in_one_order_whoever_comes_last():
    contexts = [3000, 9000, 50] * 8
    k_cache, v_cache, meta = pages(contexts, [1] * 24, 8, 128)
    q = draw(24, 32, 128)
    meta = listed(meta, 32, 8, 128, 24)
    first = paged_attention(q, k_cache, v_cache, meta, 0.1)
    for _ in range(50):
        assert torch.equal(paged_attention(q, k_cache, v_cache, meta, 0.1), first)
    assert meta.work is not None
    assert not meta.work.arrived.any()


@pytest.mark.parametrize(("window", "sunken"), [(0, False), (100, False), (0, True)])
def test_a_step_reads_its_own_keys_after_earlier_keys_were_prefetched(window, sunken):
    """Contexts near the lengths from which a part begins to load before the previous kernel has written its keys."""
    heads, kv_heads, dim = 16, 8, 128
    contexts = [1, 16, 17, 32, 33, 63, 64, 65, 95, 97, 127, 128, 129, 130, 159, 160, 161, 192, 193, 200, 256, 300, 521]
    rows = len(contexts)
    k_cache, v_cache, meta = pages(contexts, [1] * rows, kv_heads, dim)
    last = [(int(meta.block_tables[line, (n - 1) // 16]), (n - 1) % 16) for line, n in zip(meta.table_row, contexts)]
    slots = torch.tensor([block * 16 + place for block, place in last], device="cuda")
    sinks = torch.randn(heads, device="cuda") if sunken else None
    weight = pack(draw((heads + 2 * kv_heads) * dim, 1024), None, PLACEMENT)
    angle, norms = torch.randn(rows, dim // 2, device="cuda"), (draw(dim), draw(dim))
    cos, sin = angle.cos(), angle.sin()
    inputs = [draw(rows, 1024) * 0.02 for _ in range(20)]
    for room in (rows + 1, 0):  # rows with one part each, then short parts
        meta = listed(meta, heads, kv_heads, dim, rows, room)
        got = []
        for settle in (False, True):
            for x in inputs:
                q = qkv_rope_store(
                    weight.linear(x), cos, sin, *norms, 1e-6, heads, kv_heads, dim, k_cache, v_cache, slots
                )
                if settle:
                    torch.cuda.synchronize()
                got.append(paged_attention(q, k_cache, v_cache, meta, dim**-0.5, window, 0.0, sinks))
        half = len(inputs)
        assert all(torch.equal(a, b) for a, b in zip(got[:half], got[half:]))
        want = paged_attention_reference(q.double(), k_cache, v_cache, meta, dim**-0.5, window, 0.0, sinks)
        assert error(got[-1], want) < LIMIT


WINDOWS = [0, *range(64, 577, 64), 592, *range(656, 1169, 64), 1184, 1188]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "bounds"),
    [
        (16, 16, 80, WINDOWS),
        (16, 16, 80, [0, 1500]),
        (16, 16, 80, [0, 700, 701, 701, 1500]),
        (20, 20, 64, [0, 100, 200, 300, 350]),
        (16, 4, 72, WINDOWS),
        (16, 16, 72, [0, 1500]),
        (16, 16, 72, [0, 700, 701, 701, 4096]),
        (3, 1, 72, [0, 1500]),
        (16, 16, 88, [0, 1500]),
        (4, 4, 96, [0, 1500]),
        (4, 2, 76, [0, 1500]),
        (8, 8, 128, [0, 1500]),
        (4, 4, 256, [0, 300]),
    ],
)
def test_dense_attention(heads, kv_heads, dim, bounds, causal):
    fused = draw(bounds[-1], heads + 2 * kv_heads, dim)
    q, k, v = fused.split([heads, kv_heads, kv_heads], 1)
    segments = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    got = dense_attention(q, k, v, segments, dim**-0.5, causal)
    want = dense_attention_reference(q.double(), k.double(), v.double(), segments, dim**-0.5, causal)
    assert error(got, want) < LIMIT
    wider = draw(bounds[-1], heads * dim + 64)
    behind = wider[:, heads * dim :].clone()
    dense_attention(q, k, v, segments, dim**-0.5, causal, out=wider[:, : heads * dim])
    assert torch.equal(wider[:, : heads * dim], got)
    assert torch.equal(wider[:, heads * dim :], behind)


@pytest.mark.parametrize("bounds", [[0, 512], [0, 1, 1, 130, 700]])
def test_disentangled_attention(bounds):
    q, k, v = draw(bounds[-1], 36, 64).split(12, 1)
    pos_k, pos_q = draw(512, 12, 64), draw(512, 12, 64)
    buckets = (torch.arange(-511, 512, device="cuda") // 2 + 256).int()
    segments = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    got = disentangled_attention(q, k, v, pos_k, pos_q, buckets, segments, 192**-0.5)
    parts = (part.double() for part in (q, k, v, pos_k, pos_q))
    assert error(got, disentangled_attention_reference(*parts, buckets, segments, 192**-0.5)) < LIMIT


@pytest.mark.parametrize("dim", [64, 80, 128])
def test_dense_attention_of_rows_far_apart(dim):
    rows, heads, stride = 300, 4, 1 << 23  # the last rows are beyond offset 2^31
    room = torch.empty((rows - 1) * stride + 3 * heads * dim, dtype=torch.bfloat16, device="cuda")
    fused = room.as_strided((rows, 3 * heads, dim), (stride, dim, 1)).copy_(draw(rows, 3 * heads, dim))
    q, k, v = fused.split(heads, 1)
    segments = torch.tensor([0, rows], dtype=torch.int32, device="cuda")
    want = dense_attention_reference(q.double(), k.double(), v.double(), segments, dim**-0.5)
    assert error(dense_attention(q, k, v, segments, dim**-0.5), want) < LIMIT
