"""Norms, activations and rotation with the store into the caches, against their references in float64."""

from __future__ import annotations

import functools

import pytest
import torch

from _fast import cpu
from engine.kernels.activation import (
    Activation,
    gelu,
    gelu_reference,
    glu,
    glu_reference,
    pointwise,
    pointwise_reference,
)
from engine.kernels.gate import gate_reference, multiply_by_sigmoid
from engine.kernels.norm import (
    layer_norm,
    layer_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from engine.kernels.rope import cos_sin
from engine.kernels.rotate import apply_rope, apply_rope_reference, qkv_rope_store, qkv_rope_store_reference
from tests.kernels.one_run import in_one_run

pytestmark = pytest.mark.usefixtures("isa")
DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [1, 7, 16, 64, 100, 513, 1280]


def close(actual, expected, dtype):
    rtol, atol = (1e-5, 2e-6) if dtype == torch.float32 else (8e-3, 1e-2)
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_equal_their_references(width, dtype):
    x = (torch.randn(9, width) * 3 + 1).to(dtype)
    weight, bias = torch.randn(width).to(dtype), torch.randn(width).to(dtype)
    close(rms_norm(x, weight, 1e-6), rms_norm_reference(x.double(), weight, 1e-6), dtype)
    close(rms_norm(x, weight, 1e-6, 1.0), rms_norm_reference(x.double(), weight, 1e-6, 1.0), dtype)
    for b in (bias, None):
        if width > 1:
            close(layer_norm(x, weight, b, 1e-5), layer_norm_reference(x.double(), weight, b, 1e-5), dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_a_norm_fills_the_room_that_it_is_given(dtype):
    x, weight = torch.randn(5, 40).to(dtype), torch.randn(40)
    room = torch.full((6, 40), 7.0, dtype=dtype)
    assert rms_norm(x, weight, 1e-6, out=room[:5]).data_ptr() == room.data_ptr()
    assert torch.equal(room[:5], rms_norm(x, weight, 1e-6))
    assert (room[5] == 7).all()
    with pytest.raises(AssertionError, match="like x"):
        rms_norm(x[:, :8].contiguous().float(), weight[:8], 1e-6, out=room[:5])


def test_norm_takes_float32_weights_for_bfloat16_rows():
    x, weight = torch.randn(3, 40).to(torch.bfloat16), torch.randn(40)
    close(rms_norm(x, weight, 1e-6), rms_norm_reference(x.double(), weight, 1e-6), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_activations_equal_their_references(width, dtype):
    x = (torch.randn(5, 2 * width) * 4).to(dtype)
    for activation in Activation:
        close(glu(x, activation), glu_reference(x.double(), activation), dtype)
        if activation is not Activation.CLAMPED_SWIGLU:
            close(pointwise(x, activation), pointwise_reference(x.double(), activation), dtype)
    close(gelu(x), gelu_reference(x.double()), dtype)
    close(gelu(x, "tanh"), gelu_reference(x.double(), "tanh"), dtype)


def test_activations_at_the_ends_of_the_range():
    x = torch.tensor([[-1e30, -200.0, -90.0, -20.0, -0.0, 0.0, 20.0, 90.0, 200.0, 1e30]])
    torch.testing.assert_close(gelu(x).double(), gelu_reference(x.double()), rtol=1e-5, atol=1e-6)
    assert gelu(torch.tensor([[float("nan")]])).isnan().all()


@pytest.mark.parametrize("activation", Activation)
def test_gated_activations_at_the_ends_of_the_range(activation):
    ends = torch.tensor([-1e4, -200.0, -90.0, -20.0, -7.0, -0.0, 0.0, 7.0, 20.0, 90.0, 200.0, 1e4])
    x = torch.cat([ends.repeat_interleave(len(ends)), ends.repeat(len(ends))])[None]
    torch.testing.assert_close(glu(x, activation).double(), glu_reference(x.double(), activation), rtol=1e-5, atol=1e-6)
    nan = torch.tensor([[float("nan"), 1.0, float("nan"), 1.0, float("nan"), float("nan")]])  # NaN in gate, up, both
    assert glu(nan, activation).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_gets_the_same_bits_in_any_company(dtype):
    x = torch.randn(700, 130).to(dtype)
    weight, bias = torch.randn(130).to(dtype), torch.randn(130).to(dtype)
    ops = [
        lambda rows: rms_norm(rows, weight, 1e-6),
        lambda rows: layer_norm(rows, weight, bias, 1e-6),
        *(functools.partial(glu, activation=each) for each in Activation),
        gelu,
    ]
    for op in ops:
        for threads in (1, 2, 3):
            cpu.set_num_threads(threads)
            whole = op(x)
            for first, last in ((0, 1), (300, 337), (500, 700)):
                assert torch.equal(op(x[first:last].contiguous()), whole[first:last])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("width", WIDTHS)
def test_gates_multiply_in_place_whatever_lies_around_them(width, dtype):
    projected, values = (torch.randn(700, width + 5) * 4).to(dtype), torch.randn(700, width).to(dtype)
    gates, whole = projected[:, 2 : width + 2], values.clone()
    assert multiply_by_sigmoid(whole, gates) is whole
    close(whole, gate_reference(values.double(), gates.double()), dtype)
    for first, last in ((0, 1), (300, 337)):
        assert torch.equal(multiply_by_sigmoid(values[first:last].clone(), gates[first:last]), whole[first:last])
    with pytest.raises(AssertionError, match="a gate for each value"):
        multiply_by_sigmoid(values, projected)


@pytest.mark.parametrize("sections", [None, (2, 3, 3), (1, 4, 0, 3)])
def test_cos_sin_reads_each_section_from_its_own_row(sections):
    inv_freq = 1.0 / 10000 ** (torch.arange(8) / 8)
    positions = torch.randint(0, 5000, (len(sections or "abc"), 11))
    cos, sin = cos_sin(positions, inv_freq, sections, scaling=1.5)
    rows = [0] * 8 if sections is None else [row for row, size in enumerate(sections) for _ in range(size)]
    for j, row in enumerate(rows):
        angle = positions[row].to(torch.float32) * inv_freq[j]
        assert torch.equal(cos[:, j], angle.cos() * 1.5)
        assert torch.equal(sin[:, j], angle.sin() * 1.5)


@pytest.mark.parametrize(
    ("turns", "sections", "rows"),
    [("all", (2, 3, 3), [0, 1, 2, 0, 1, 2, 0, 1]), ("sides", (3, 3, 2), [1, 2, 1, 2, 1, 2, 0, 0])],
)
def test_cos_sin_reads_rows_in_turns(turns, sections, rows):
    positions, inv_freq = torch.randint(0, 5000, (3, 11)), 1.0 / 10000 ** (torch.arange(8) / 8)
    cos, _ = cos_sin(positions, inv_freq, sections, turns=turns)
    assert torch.equal(cos, (positions[rows].T.float() * inv_freq).cos())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "half"), [(64, 32), (80, 40), (24, 12), (128, 32), (256, 128), (20, 3)])
def test_apply_rope_equals_its_reference(dim, half, dtype):
    x = torch.randn(13, 3, dim).to(dtype)
    cos, sin = cos_sin(torch.arange(13) * 7, torch.rand(half))
    close(apply_rope(x, cos, sin), apply_rope_reference(x.double(), cos, sin), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slot_type", [torch.int32, torch.int64])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "half"), [(8, 4, 64, 32), (3, 1, 20, 10), (2, 2, 128, 24)])
@pytest.mark.parametrize("normed", [True, False])
def test_qkv_rope_store_equals_its_reference(heads, kv_heads, dim, half, normed, slot_type, dtype):
    tokens, blocks, block_size = 23, 6, 8
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    cos, sin = cos_sin(torch.arange(tokens) + 100, torch.rand(half))
    q_norm, k_norm = (torch.randn(dim).to(dtype), torch.randn(dim).to(dtype)) if normed else (None, None)
    slots = torch.randperm(blocks * block_size)[:tokens].to(slot_type)
    slots[5] = -1
    caches = [torch.randn(blocks, kv_heads, block_size, dim).to(dtype) for _ in range(2)]
    expected_caches = [cache.double() for cache in caches]
    q = qkv_rope_store(qkv, cos, sin, q_norm, k_norm, 1e-6, heads, kv_heads, dim, *caches, slots)
    expected = qkv_rope_store_reference(
        qkv.double(), cos, sin, q_norm, k_norm, 1e-6, heads, kv_heads, dim, *expected_caches, slots
    )
    close(q, expected, dtype)
    for cache, expected_cache in zip(caches, expected_caches):
        close(cache, expected_cache, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_store_into_blocks_of_all_layers_in_one_run_leaves_the_other_layers(dtype):
    heads, kv_heads, dim, tokens, blocks, block_size = 4, 2, 32, 23, 6, 8
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    cos, sin = cos_sin(torch.arange(tokens), torch.rand(dim // 2))
    caches = [torch.zeros(blocks, kv_heads, block_size, dim).to(dtype) for _ in range(2)]
    *views, others = in_one_run(*caches)
    slots = torch.randperm(blocks * block_size)[:tokens]
    for keys, values in (caches, views):
        qkv_rope_store(qkv, cos, sin, None, None, 0.0, heads, kv_heads, dim, keys, values, slots)
    for view, cache in zip(views, caches):
        assert torch.equal(view, cache)
    assert others.isnan().all()
