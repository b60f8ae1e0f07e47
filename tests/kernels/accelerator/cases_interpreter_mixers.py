"""DeBERTa's attention, LFM2's convolution, Qwen3.5's gates and ranks' norms in the interpreter against references."""

import pytest
import torch
import triton  # noqa: F401  (must precede the import of any kernel file)

from engine.kernels.attention.disentangled import disentangled_attention_reference, launch_disentangled
from engine.kernels.convolution import gated_convolution_reference, launch_convolution
from engine.kernels.gate import gate_reference, launch_gate
from engine.kernels.parallel import dealt_norm
from engine.kernels.parallel.dealt_norm import (
    Parts,
    dealt_norm_reference,
    dealt_squares_reference,
    launch_dealt_norm,
    launch_dealt_squares,
)
from tests.kernels.convolutions import ROWS, drawn


@pytest.mark.parametrize(("dim", "reach", "dtype"), [(64, 149, torch.float16), (24, 20, torch.float32)])
def test_disentangled_attention(dim, reach, dtype):
    torch.manual_seed(0)
    fused = torch.randn(150, 6, dim).to(dtype)
    pos_k, pos_q = torch.randn(2, 16, 2, dim).to(dtype)
    buckets = (torch.arange(-reach, reach + 1) * 15.9 / (2 * reach) + 7.9).int()
    bounds = torch.tensor([0, 1, 1, 131, 150], dtype=torch.int32)
    parts = (*fused.split(2, 1), pos_k, pos_q)
    want = disentangled_attention_reference(*(part.double() for part in parts), buckets, bounds, 0.2)
    got = launch_disentangled(*parts, buckets, bounds, 0.2).double()
    assert (got - want).norm() / want.norm() < (1e-5 if dtype == torch.float32 else 8e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("taps", "width", "rows"), [(3, 300, ROWS), (4, 20, [(0, 70), (30, 12)]), (1, 16, ROWS[:1])])
def test_convolution(taps, width, rows, dtype):
    torch.manual_seed(0)
    projected, pages, meta = drawn(width, dtype, rows, padding=3)
    weight, bias = torch.randn(taps, width), torch.randn(width) if taps == 4 else None
    held = pages.clone()
    want = gated_convolution_reference(projected, weight, bias, held, meta)
    got = launch_convolution(projected, weight, bias, pages, meta)
    count = sum(new for _, new in rows)
    assert (got - want)[:count].norm() / want[:count].norm() < (1e-5 if dtype == torch.float32 else 8e-3)
    assert torch.equal(pages.nan_to_num(7.0), held.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(3, 1), (5, 1030), (0, 16)])
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # to inf, of which a sigmoid makes 0
def test_gates(rows, width, dtype):
    torch.manual_seed(0)
    projected = (torch.randn(rows, 2 * width + 3) * 4).to(dtype)
    projected[:1, 3:5] = 60 * torch.sign(projected[:1, 3:5])
    values, gates = torch.randn(rows, width).to(dtype), projected[:, 3 : width + 3]
    want = gate_reference(values.double(), gates.double())
    got = launch_gate(values, gates)
    assert got is values
    assert (got - want).norm() <= (1e-6 if dtype == torch.float32 else 1e-3) * want.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "parts", [Parts((60, 20), (120, 20), 0, 2), Parts((70,), (140,), 1, 3), Parts((5,), (5,), 0, 2)]
)
@pytest.mark.parametrize("gated", [False, True])
def test_norms_whose_sums_are_of_several_ranks(parts, gated, dtype, monkeypatch):
    monkeypatch.setattr(dealt_norm, "MOST_COLUMNS", 32)
    torch.manual_seed(0)
    width = sum(parts.widths)
    wide, gates = torch.randn(3, width + 7).to(dtype), torch.randn(3, 2 * width).to(dtype)[:, width:]
    weights = [torch.randn(each) for each in parts.widths]
    sums = launch_dealt_squares(wide, parts)
    want = dealt_squares_reference(wide.double(), parts)
    assert torch.equal(sums == 0, want == 0)
    assert (sums - want).norm() / want.norm() < 1e-6
    others, given, made = torch.rand_like(sums) * 50, wide.clone(), wide.double()
    launch_dealt_norm(wide, sums + others, weights, parts, 1e-5, gates if gated else None)
    dealt_norm_reference(made, want + others, weights, parts, 1e-5, gates.double() if gated else None)
    assert (wide - made).norm() / made.norm() < (1e-6 if dtype == torch.float32 else 1e-3)
    assert torch.equal(wide[:, width:], given[:, width:])
