"""Each Triton kernel in the interpreter against its reference in plain torch."""

from dataclasses import replace

import pytest
import torch
import triton  # noqa: F401  (must precede the import of any kernel file; TRITON_INTERPRET sets the mode)

from engine.attention.meta import AttentionMeta
from engine.kernels.activation import Activation, glu_reference, launch_point, pointwise_reference
from engine.kernels.attention.dense import dense_attention_reference, launch_dense
from engine.kernels.attention.paged import launch_paged, paged_attention_reference
from engine.kernels.attention.work import (
    MIN_PART,
    PARTS_OF_CODES,
    PARTS_PER_UNIT,
    empty_list,
    fill_list_reference,
    launch_list,
    max_parts,
)
from engine.kernels.norm import launch_norm, layer_norm_reference, rms_norm_reference
from engine.kernels.projection_norm import launch_projection_norm, projection_norm_reference
from engine.kernels.rotate import launch_qkv, qkv_rope_store_reference
from engine.kernels.target import HAS_TRITON
from engine.kernels.xielu import launch_xielu, xielu_reference
from tests.contributing import example
from tests.kernels.one_run import in_one_run

DTYPES = [torch.float32, torch.bfloat16]
# Products run in float16 here: the interpreter stores bfloat16 as integers and cannot multiply bfloat16.
DOT_DTYPES = [torch.float32, torch.float16]
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-9))


def limit(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 8e-3


@pytest.fixture(autouse=True)
def seed():
    assert HAS_TRITON
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 64), (5, 100), (2, 1536)])
def test_norms(rows, width, dtype):
    x, weight, bias = torch.randn(rows, width).to(dtype), torch.randn(width), torch.randn(width)
    got = launch_norm(x, weight, None, 1e-6, 1.0, centre=False)
    assert error(got, rms_norm_reference(x.double(), weight.double(), 1e-6, 1.0)) < limit(dtype)
    if width > 1:
        got = launch_norm(x, weight, bias, 1e-5, 0.0, centre=True)
        assert error(got, layer_norm_reference(x.double(), weight.double(), bias.double(), 1e-5)) < limit(dtype)
        other = torch.randn(rows, width).to(dtype)
        got = launch_norm(x, weight, bias, 1e-5, 0.0, centre=True, residual=other)
        summed = x.double() + other.double()
        assert error(got, layer_norm_reference(summed, weight.double(), bias.double(), 1e-5)) < limit(dtype)


def test_norm_of_strided_rows():
    x = torch.randn(4, 96)[:, :50]
    got = launch_norm(x, torch.ones(50), None, 1e-6, 0.0, centre=False)
    assert error(got, rms_norm_reference(x.double(), torch.ones(50), 1e-6)) < 1e-5
    room = torch.full_like(got, float("nan"))
    assert launch_norm(x, torch.ones(50), None, 1e-6, 0.0, centre=False, out=room) is room
    assert torch.equal(room, got)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("width", [1, 30, 1030])
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # exp overflows to inf, and the sigmoid is then 0
def test_activations(width, dtype):
    x = (torch.randn(3, 2 * width) * 3).to(dtype)
    for activation in Activation:
        got = launch_point(activation, x, gated=True)
        assert got.shape == (3, width)
        assert error(got, glu_reference(x.double(), activation)) < limit(dtype)
        if activation is not Activation.CLAMPED_SWIGLU:
            got = launch_point(activation, x)
            assert got.shape == x.shape
            assert error(got, pointwise_reference(x.double(), activation)) < limit(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("centre", [False, True])
@pytest.mark.parametrize(("q_group", "k_group"), [(60, 20), (10, 10)])
def test_norms_of_projections(q_group, k_group, centre, dtype):
    wide = torch.randn(3, 60 + 20 + 20 + 7).to(dtype)
    q_weight, k_weight = torch.randn(60), torch.randn(20)
    got, want, given = wide[:, :100], wide.double()[:, :100], wide.clone()
    launch_projection_norm(got, q_weight, k_weight, q_group, k_group, 1e-5, centre)
    projection_norm_reference(want, q_weight, k_weight, q_group, k_group, 1e-5, centre)
    assert error(got, want) < limit(dtype)
    assert torch.equal(wide[:, 80:], given[:, 80:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_xielu(dtype):
    x = torch.cat([torch.randn(1500) * 3, torch.tensor([0.0, -1e-7, -1e-3, -0.01, -30.0, 1e-7])]).to(dtype)
    slopes = torch.tensor([0.8, 1.3, 0.5, -1e-6])
    got, want = launch_xielu(x.view(2, -1), slopes), xielu_reference(x.view(2, -1).double(), slopes)
    assert error(got, want) < limit(dtype)
    assert error(got.flatten()[-6:], want.flatten()[-6:]) < limit(dtype)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "half"), [(64, 32), (80, 40), (128, 32), (96, 24), (256, 128)])
@pytest.mark.parametrize("norm", ["early", "late", None])
def test_qkv_rope_store(dim, half, norm, dtype):
    tokens, heads, kv_heads, block_size = 5, 6, 2, 4
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    angle = torch.randn(tokens, half)
    weights = (torch.randn(dim), torch.randn(dim)) if norm else (None, None)
    caches = [torch.zeros(4, kv_heads, block_size, dim).to(dtype) for _ in range(4)]
    slots = torch.tensor([3, 4, -1, 15, 9])
    args = (qkv, angle.cos(), angle.sin(), *weights, 1e-6, heads, kv_heads, dim)
    got = launch_qkv(*args, caches[0], caches[1], slots, norm == "late")
    want = qkv_rope_store_reference(*args, caches[2], caches[3], slots, norm == "late")
    assert error(got, want) < limit(dtype)
    assert error(caches[0], caches[2]) < limit(dtype)
    assert error(caches[1], caches[3]) < limit(dtype)
    untouched = (caches[2] == 0).all(-1)
    assert (caches[0][untouched] == 0).all()


def test_a_store_into_blocks_of_all_layers_in_one_run_leaves_the_other_layers():
    tokens, heads, kv_heads, dim = 5, 4, 2, 32
    qkv, angle = torch.randn(tokens, (heads + 2 * kv_heads) * dim), torch.randn(tokens, dim // 2)
    caches = torch.zeros(2, 4, kv_heads, 4, dim).unbind(0)
    *views, others = in_one_run(*caches)
    for keys, values in (caches, views):
        slots = torch.tensor([3, 4, -1, 15, 9])
        launch_qkv(qkv, angle.cos(), angle.sin(), None, None, 0.0, heads, kv_heads, dim, keys, values, slots)
    assert all(torch.equal(view, cache) for view, cache in zip(views, caches))
    assert others.isnan().all()


def test_rotation_without_caches():
    x, angle = torch.randn(3, 4 * 32), torch.randn(3, 16)
    got = launch_qkv(x, angle.cos(), angle.sin(), None, None, 0.0, 4, 0, 32, None, None, None)
    want = torch.empty(1, 1, 1, 32), torch.empty(1, 1, 1, 32)
    both = torch.cat([x, torch.randn(3, 64)], 1)
    want = qkv_rope_store_reference(
        both, angle.cos(), angle.sin(), None, None, 0.0, 4, 1, 32, *want, torch.full((3,), -1)
    )
    assert error(got, want) < 1e-5


def pages(contexts, queries, kv_heads, dim, block_size, dtype):
    """Caches with NaN in unused places, and the step's metadata."""
    counts = [-(-length // block_size) for length in contexts]
    order = torch.randperm(sum(counts) + 2)
    caches = torch.full((2, len(order), kv_heads, block_size, dim), float("nan")).to(dtype)
    tables = torch.full((len(contexts), max(counts)), 0, dtype=torch.int32)
    used = 0
    for row, (length, count) in enumerate(zip(contexts, counts)):
        blocks = order[used : used + count]
        used += count
        tables[row, :count] = blocks
        for number, block in enumerate(blocks.tolist()):
            fill = min(block_size, length - number * block_size)
            caches[:, block, :, :fill] = torch.randn(2, kv_heads, fill, dim).to(dtype)
    lines = torch.randperm(len(contexts) + 2)[: len(contexts)]  # rows of other slots are between them
    table = torch.full((len(contexts) + 2, max(counts)), -7, dtype=torch.int32)
    table[lines] = tables
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    meta = AttentionMeta(
        starts,
        torch.tensor(contexts, dtype=torch.int32),
        table,
        torch.zeros(0, dtype=torch.int64),
        table_row=lines.to(torch.int32),
        decode_only=max(queries) == 1,
    )
    return caches[0].contiguous(), caches[1].contiguous(), meta


# Contexts and queries of the rows; an unused row of a graph has neither.
STEPS = {
    "decode": ([1, 16, 33, 0, 3 * MIN_PART + 5, 2 * MIN_PART], [1, 1, 1, 0, 1, 1]),
    "prefill": ([20, 70], [20, 70]),
    "chunk": ([90, 0], [40, 0]),
    "mixed": ([0, 40, 65, 17, 30], [0, 1, 65, 1, 9]),
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (24, 0.0), (-24, 0.0), (0, 5.0)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (7, 1, 80)])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("sunk", [False, True])
def test_attention(sunk, step, heads, kv_heads, dim, window, softcap, dtype):
    contexts, queries = STEPS[step]
    k_cache, v_cache, meta = pages(contexts, queries, kv_heads, dim, 16, dtype)
    q = torch.randn(sum(queries), heads, dim).to(dtype)
    work = empty_list(8, sum(queries), 16, heads, dim, "cpu")
    launch_list(work, meta, heads // kv_heads, False)
    sinks = sinks_of(heads) if sunk else None
    out = launch_paged(q, k_cache, v_cache, replace(meta, work=work), dim**-0.5, window, softcap, sinks)
    want = paged_attention_reference(q, k_cache, v_cache, meta, dim**-0.5, window, softcap, sinks).view_as(out)
    assert error(out, want) < limit(dtype) * 2


@pytest.mark.parametrize("window", [0, 24])
@pytest.mark.parametrize("step", [([33, 16, 3 * MIN_PART + 5], [1, 1, 1]), ([150, 0, 40, 33], [150, 0, 9, 1])])
def test_keys_before_the_first_key_are_hidden(step, window):
    contexts, queries = step
    k_cache, v_cache, meta = pages(contexts, queries, 2, 32, 16, torch.float32)
    assert meta.table_row is not None
    first = meta.block_tables[meta.table_row.long(), 0].long()
    k_cache[first, :, 0] = v_cache[first, :, 0] = float("nan")
    q, work = torch.randn(sum(queries), 4, 32), empty_list(8, sum(queries), 16, 4, 32, "cpu")
    meta = replace(meta, first_key=1)
    launch_list(work, meta, 2, False)
    out = launch_paged(q, k_cache, v_cache, replace(meta, work=work), 0.2, window, 0.0, None)
    want = paged_attention_reference(q, k_cache, v_cache, meta, 0.2, window).view_as(out)
    seen = torch.ones(sum(queries), dtype=torch.bool)
    seen[0] = contexts[0] > queries[0]  # a row's first token sees no key
    assert error(out[seen], want[seen]) < limit(torch.float32) * 2


@pytest.mark.parametrize("everywhere", [False, True], ids=["items", "prompt"])
@pytest.mark.parametrize("window", [0, 24])
def test_attention_of_tokens_that_see_later_ones(window, everywhere):
    contexts, queries, heads, dim = [0, 40, 150, 90], [0, 1, 150, 40], 4, 32
    k_cache, v_cache, meta = pages(contexts, queries, 2, dim, 16, torch.float32)
    last_keys = torch.cat([torch.arange(end - count, end) for end, count in zip(contexts, queries)]).to(torch.int32)
    for at, first, behind in ((1, 0, 140),) if everywhere else ((1, 20, 120), (1, 125, 150), (151 - 50, 52, 85)):
        last_keys[at + first : at + behind] = ~(behind - 1) if everywhere else behind - 1
    q = torch.randn(sum(queries), heads, dim)
    work = empty_list(8, sum(queries), 16, heads, dim, "cpu")
    launch_list(work, meta, 2, False)
    meta = replace(meta, work=work, last_keys=last_keys)
    out = launch_paged(q, k_cache, v_cache, meta, dim**-0.5, window, 0.0, None)
    want = paged_attention_reference(q, k_cache, v_cache, meta, dim**-0.5, window).view_as(out)
    assert error(out, want) < limit(torch.float32) * 2


@pytest.mark.covering(2)
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (24, 5.0)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(2, 1, 64), (3, 3, 96), (4, 1, 128), (4, 2, 256), (2, 1, 512)])
@pytest.mark.parametrize("step", ["decode", "mixed"])
def test_attention_of_every_head_size(step, heads, kv_heads, dim, window, softcap):
    contexts, queries = STEPS[step]
    k_cache, v_cache, meta = pages(contexts, queries, kv_heads, dim, 16, torch.float16)
    q = torch.randn(sum(queries), heads, dim).half()
    work = empty_list(8, sum(queries), 16, heads, dim, "cpu")
    launch_list(work, meta, heads // kv_heads, False)
    sinks = torch.randn(heads) * 2 if window else None
    out = launch_paged(q, k_cache, v_cache, replace(meta, work=work), dim**-0.5, window, softcap, sinks)
    want = paged_attention_reference(q, k_cache, v_cache, meta, dim**-0.5, window, softcap, sinks).view_as(out)
    assert error(out, want) < limit(torch.float16) * 2


@pytest.mark.parametrize("step", ["decode", "mixed"])
def test_blocks_of_all_layers_in_one_run_give_the_same_bits(step):
    contexts, queries = STEPS[step]
    k_cache, v_cache, meta = pages(contexts, queries, 2, 32, 16, torch.float32)
    q = torch.randn(sum(queries), 4, 32)
    work = empty_list(8, sum(queries), 16, 4, 32, "cpu")
    launch_list(work, meta, 2, False)
    keys, values, _ = in_one_run(k_cache, v_cache)
    got = launch_paged(q, keys, values, replace(meta, work=work), 0.2, 0, 0.0, None)
    assert torch.equal(got, launch_paged(q, k_cache, v_cache, replace(meta, work=work), 0.2, 0, 0.0, None))


def sinks_of(heads):
    """Random sinks: most weigh like a few keys, one takes nearly all weight, and one is absent (-inf)."""
    sinks = torch.randn(heads) * 2
    sinks[1], sinks[2] = 20.0, float("-inf")
    return sinks


@pytest.mark.parametrize(
    "options", [(0, 0.0, None), (24, 0.0, None), (120, 0.0, None), (0, 0.0, torch.linspace(-3, 3, 4))]
)
def test_an_invariant_list_gives_a_token_the_same_bits_however_its_prompt_was_cut(options, ordered_sums):
    k_cache, v_cache, meta = pages([150], [150], 2, 32, 16, torch.float32)
    q = torch.randn(150, 4, 32)

    def attend(first, last):
        starts, length = torch.tensor([0, last - first], dtype=torch.int32), torch.tensor([last], dtype=torch.int32)
        part = replace(meta, query_start=starts, context_len=length, decode_only=False)
        work = empty_list(1, 150, 2, 4, 32, "cpu")
        launch_list(work, part, 2, True)
        return launch_paged(q[first:last].contiguous(), k_cache, v_cache, replace(part, work=work), 0.2, *options)

    whole = attend(0, 150)
    for first, last in ((0, 1), (3, 70), (63, 64), (64, 66), (129, 150), (149, 150)):
        assert torch.equal(attend(first, last), whole[first:last]), (first, last)


@pytest.mark.covering(2)
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("room", [9, 12, 40])
@pytest.mark.parametrize("step", STEPS)
def test_work_lists(step, room, invariant):
    contexts, queries = STEPS[step]
    _, _, meta = pages(contexts, queries, 1, 16, 16, torch.float32)
    got, want = (empty_list(8, sum(queries), room, 2, 16, "cpu", large=True) for _ in range(2))
    launch_list(got, meta, 2, invariant)
    fill_list_reference(want, meta, 2, invariant)
    parts, tiles = int(got.num_parts), int(got.num_tiles)
    assert (parts, tiles) == (int(want.num_parts), int(want.num_tiles))
    assert torch.equal(got.parts[:parts, :7], want.parts[:parts, :7])
    assert torch.equal(got.tiles[:tiles], want.tiles[:tiles])
    large = int(want.num_large_tiles)
    assert int(got.num_large_tiles) == large <= tiles
    assert torch.equal(got.large_tiles[:large], want.large_tiles[:large])
    assert parts <= room
    assert not invariant or int(got.num_parts) == 0


@pytest.mark.parametrize(
    ("contexts", "parts"),
    [
        ([521, 0, 490], [(0, 521), (0, 490)]),
        ([440, 575, 0], [(0, 440), (0, 575)]),
        ([577, 0, 430], [(0, 512), (512, 577), (0, 430)]),
    ],
)
def test_a_row_of_little_more_than_its_parts_has_them_a_little_longer(contexts, parts):
    lengths = torch.tensor(contexts, dtype=torch.int32)
    starts = torch.cat([lengths.new_zeros(1), (lengths > 0).cumsum(0).to(torch.int32)])
    meta = AttentionMeta(starts, lengths, torch.zeros(3, 70), torch.zeros(0))
    got, want = (empty_list(3, 3, 5, 2, 16, "cpu") for _ in range(2))  # the aim is two parts of 512 keys
    launch_list(got, meta, 2, False)
    fill_list_reference(want, meta, 2, False)
    assert [tuple(part) for part in want.parts[: int(want.num_parts), 1:3].tolist()] == parts
    assert int(got.num_parts) == len(parts)
    assert torch.equal(got.parts[: len(parts), :7], want.parts[: len(parts), :7])


@pytest.mark.parametrize("per_unit", [PARTS_PER_UNIT, PARTS_OF_CODES])
def test_parts_fit_into_their_room(per_unit):
    assert max_parts(10, 16, 4, per_unit) == 4 + min(12, max_parts(10**6, 16, 4, per_unit) - 4)
    rows = 6
    room = max_parts(400, 16, rows, per_unit)
    work = empty_list(rows, rows, room, 1, 16, "cpu", per_unit)
    for contexts in ([6400] * rows, [1] * rows, [6400, 1, 1, 63, 64, 65]):
        starts, lengths = torch.arange(rows + 1, dtype=torch.int32), torch.tensor(contexts, dtype=torch.int32)
        tables = torch.zeros(rows, 400, dtype=torch.int32)
        launch_list(work, AttentionMeta(starts, lengths, tables, torch.zeros(0)), 1, False)
        parts = work.parts[: int(work.num_parts)]
        assert rows <= len(parts) <= room
        if min(contexts) == 6400:  # the parts that the step aims at, except for rounding up
            assert len(parts) > 0.8 * (room - rows)
        for row, context in enumerate(contexts):  # the parts of a row cover its context without gaps
            mine = parts[parts[:, 0] == row]  # each row has one token here
            assert mine[0, 1] == 0
            assert mine[-1, 2] == context
            assert torch.equal(mine[1:, 1], mine[:-1, 2])


@pytest.mark.parametrize("dim", [96, 112, 128, 256])
def test_dense_attention_of_wider_heads(dim):
    q, k, v = (torch.randn(150, heads, dim).half() for heads in (2, 1, 1))
    bounds = torch.tensor([0, 130, 150], dtype=torch.int32)
    want = dense_attention_reference(q.double(), k.double(), v.double(), bounds, dim**-0.5, True)
    assert error(launch_dense(q, k, v, bounds, dim**-0.5, True), want) < limit(torch.float16)


@pytest.mark.parametrize("dim", [40, 80])
def test_dense_attention_with_a_bias_by_distance(dim):
    bounds, bias = torch.tensor([0, 3, 140, 140, 150], dtype=torch.int32), torch.randn(4, 2 * 33 + 1) * 3
    q, k, v = (torch.randn(150, heads, dim).half() for heads in (4, 2, 2))
    want = dense_attention_reference(q.double(), k.double(), v.double(), bounds, dim**-0.5, bias=bias)
    for mixed in (True, False):
        got = launch_dense(q, k, v, bounds, dim**-0.5, False, mixed_lengths=mixed, bias=bias)
        assert error(got, want) < limit(torch.float16)


def test_dense_attention_of_rows_far_apart():
    rows, dim, stride = 5, 80, 1 << 29
    far = torch.empty((rows - 1) * stride + dim, dtype=torch.float16).as_strided((rows, 1, dim), (stride, dim, 1))
    q, k = torch.randn(2, rows, 1, dim).half()
    far.copy_(torch.randn(rows, 1, dim))
    bounds = torch.tensor([0, rows], dtype=torch.int32)
    want = dense_attention_reference(q.double(), k.double(), far.double(), bounds, dim**-0.5)
    assert error(launch_dense(q, k, far, bounds, dim**-0.5, False), want) < limit(torch.float16)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize(("causal", "window"), [(False, 0), (True, 0), (False, 20), (True, 20)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(2, 2, 64), (4, 2, 80), (1, 1, 40)])
@pytest.mark.parametrize("bounds", [[0, 200], [0, 64, 128, 144, 200], [0, 1, 1, 150, 150, 200], [0, 3, 265, 265]])
def test_dense_attention(bounds, heads, kv_heads, dim, causal, window, dtype):
    fused = torch.randn(bounds[-1], (heads + 2 * kv_heads) * dim).to(dtype)
    q, k, v = (part.unflatten(1, (-1, dim)) for part in fused.split([heads * dim, kv_heads * dim, kv_heads * dim], 1))
    segments = torch.tensor(bounds, dtype=torch.int32)
    want = dense_attention_reference(q.double(), k.double(), v.double(), segments, dim**-0.5, causal, window=window)
    wider = torch.full((len(q), heads * dim + 8), 7.0, dtype=dtype)
    launch_dense(q, k, v, segments, dim**-0.5, causal, wider[:, : heads * dim], window=window)
    assert error(wider[:, : heads * dim], want) < limit(dtype)
    assert (wider[:, heads * dim :] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_that_contributing_shows(tmp_path, dtype):
    module = example("kernel", tmp_path)
    x, scale = torch.randn(3, 700).to(dtype), torch.rand(3)
    assert error(module.launch_scale_rows(x, scale), module.scale_rows_reference(x, scale)) < limit(dtype)
