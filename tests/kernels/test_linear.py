"""Linear layers against float64; a token's bits depend on nothing but the token."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from _fast import cpu
from engine.kernels.activation import Activation, glu
from engine.kernels.gemm import dense, dispatch
from engine.kernels.gemm import weight as weight_module
from engine.kernels.gemm.dense import DenseWeight
from engine.kernels.gemm.invariant import InvariantWeight
from engine.kernels.gemm.pack import Placement, pack_unchanged, stacked
from engine.kernels.gemm.panels import pack_paired, pack_panels
from engine.kernels.gemm.weight import gated_linear_reference, linear_reference

pytestmark = pytest.mark.usefixtures("isa")
SILU = Activation.SILU
SHAPES = [
    (1, 1, 1),
    (1, 64, 64),
    (2, 65, 63),
    (5, 17, 200),
    (7, 100, 65),
    (15, 513, 96),
    (37, 96, 130),
    (130, 1100, 70),
]


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 2e-5, "atol": 2e-4} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 2e-2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "depth", "width"), SHAPES)
def test_linear_equals_its_reference_in_float64(tokens, depth, width, dtype):
    x = torch.randn(tokens, depth).to(dtype)
    weight, bias = torch.randn(width, depth).to(dtype), torch.randn(width).to(dtype)
    packed = pack_panels(weight, bias)
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(packed.linear(x).double(), expected, **tolerance(dtype))
    torch.testing.assert_close(linear_reference(x.double(), packed), expected)


def test_packing_is_undone_by_weight():
    weight = torch.randn(200, 33)
    assert torch.equal(pack_panels(weight, None).dense(), weight)
    gate, up = torch.randn(50, 33), torch.randn(50, 33)
    assert torch.equal(pack_paired(torch.stack([gate, up]), None).dense(), torch.cat([gate, up]))


class Made(TorchDispatchMode):
    """Counts the bytes that operations allocate."""

    def __init__(self):
        super().__init__()
        self.sizes = {}

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        made = call(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.sizes[made.untyped_storage().data_ptr()] = made.untyped_storage().nbytes()
        return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("paired", [False, True])
def test_packing_takes_the_room_of_the_panels_alone(dtype, paired):
    """Temporary copies between lasting tensors once fragmented memory: experts took twice the size of their weights."""
    pieces = [torch.randn(600, 1000).to(dtype) for _ in range(1 + paired)]
    with Made() as made:
        packed = pack_paired(pieces, None) if paired else pack_panels(pieces[0], None)
    taken = [size for at, size in made.sizes.items() if at not in {piece.data_ptr() for piece in pieces}]
    assert packed.panels.untyped_storage().nbytes() in taken
    rest = sum(taken) - packed.panels.untyped_storage().nbytes()
    assert rest < 0.5 * pieces[0].nbytes


def test_float32_weights_of_a_bfloat16_checkpoint_are_stored_in_half_the_bytes():
    exact = torch.randn(64, 32).to(torch.bfloat16).to(torch.float32)
    assert pack_panels(exact, None).panels.dtype == torch.bfloat16
    assert pack_panels(exact + 1e-5, None).panels.dtype == torch.float32
    x = torch.randn(3, 32)
    torch.testing.assert_close(pack_panels(exact, None).linear(x), x @ exact.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "depth", "width"), [(1, 64, 32), (9, 70, 100), (40, 600, 33)])
def test_gated_linear_equals_its_reference_in_float64(tokens, depth, width, dtype):
    x = torch.randn(tokens, depth).to(dtype)
    gate, up = torch.randn(width, depth).to(dtype) / 8, torch.randn(width, depth).to(dtype) / 8
    packed = pack_paired(torch.stack([gate, up]), None)
    expected = torch.nn.functional.silu(x.double() @ gate.double().T) * (x.double() @ up.double().T)
    torch.testing.assert_close(packed.gated(x, SILU).double(), expected, **tolerance(dtype))
    torch.testing.assert_close(gated_linear_reference(x.double(), packed, SILU), expected)


def test_gated_linear_adds_the_biases_before_the_gate():
    x, gate, up = torch.randn(9, 40), torch.randn(45, 40), torch.randn(45, 40)
    b, c = torch.randn(45), torch.randn(45)
    packed = pack_paired(torch.stack([gate, up]), torch.stack([b, c]))
    assert torch.equal(packed.dense_bias(), torch.cat([b, c]))
    expected = torch.nn.functional.silu(x.double() @ gate.double().T + b) * (x.double() @ up.double().T + c)
    torch.testing.assert_close(packed.gated(x, SILU).double(), expected, **tolerance(torch.float32))
    torch.testing.assert_close(gated_linear_reference(x.double(), packed, SILU), expected)


def test_large_weights_begin_at_a_huge_page():
    weight = torch.randn(1100, 700)
    packed = pack_panels(weight, None)
    assert packed.panels.data_ptr() % (2 << 20) == 0
    assert packed.panels.is_contiguous()
    assert torch.equal(packed.dense(), weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("depth", [48, 1200])
def test_a_token_gets_the_same_bits_in_any_company(depth, dtype):
    x = torch.randn(200, depth).to(dtype)
    packed = pack_panels(torch.randn(130, depth).to(dtype), torch.randn(130))
    gated = pack_paired(torch.randn(2, 70, depth), None)
    for op in (packed.linear, functools.partial(gated.gated, activation=SILU)):
        whole = op(x)
        for first, last in ((0, 1), (7, 8), (3, 40), (100, 106), (150, 163), (60, 200)):
            assert torch.equal(op(x[first:last]), whole[first:last])


def test_more_rows_than_are_worked_on_at_once_keep_their_order():
    x, residual = torch.randn(1100, 20).to(torch.bfloat16), torch.randn(1100, 70).to(torch.bfloat16)
    packed = pack_panels(torch.randn(70, 20), None)
    whole = packed.linear(x, None, residual)
    for row in (0, 511, 512, 1023, 1024, 1099):
        assert torch.equal(packed.linear(x[row : row + 1], None, residual[row : row + 1]), whole[row : row + 1])


def test_the_number_of_threads_changes_no_bit():
    x, packed = torch.randn(33, 700), pack_panels(torch.randn(1000, 700), None)
    results = []
    for threads in (1, 2, 3, 5):
        cpu.set_num_threads(threads)
        results.append(packed.linear(x))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_out_and_residual_are_used_in_place():
    x, packed = torch.randn(10, 64), pack_panels(torch.randn(80, 64), torch.randn(80))
    residual = torch.randn(10, 80)
    expected = packed.linear(x) + residual
    out = torch.empty(10, 80)
    assert packed.linear(x, out, residual) is out
    assert torch.equal(out, expected)
    packed.linear(x, residual, residual)
    assert torch.equal(residual, expected)


def test_strided_rows_and_leading_axes_are_taken():
    packed = pack_panels(torch.randn(70, 32), None)
    wide = torch.randn(12, 50)
    assert torch.equal(packed.linear(wide[:, 9:41]), packed.linear(wide[:, 9:41].contiguous()))
    x = torch.randn(2, 3, 32)
    assert torch.equal(packed.linear(x), packed.linear(x.view(6, 32)).view(2, 3, 70))


def test_no_tokens_give_no_rows():
    assert pack_panels(torch.randn(8, 16), None).linear(torch.empty(0, 16)).shape == (0, 8)


def test_nan_stays_in_its_own_token():
    x = torch.randn(20, 64)
    x[11, 5] = float("nan")
    y = pack_panels(torch.randn(64, 64), None).linear(x)
    assert y[11].isnan().all()
    assert not y[torch.arange(20) != 11].isnan().any()


def test_pieces_that_lie_one_after_the_other_are_stacked_without_a_copy():
    whole = torch.randn(12, 5)
    pieces = list(whole.split([3, 4, 5]))
    joined = stacked(pieces)
    assert torch.equal(joined, whole)
    assert joined.data_ptr() == whole.data_ptr()
    assert stacked(pieces[1:]).data_ptr() == pieces[1].data_ptr()
    assert torch.equal(stacked(pieces[1:]), whole[3:])
    assert stacked(pieces[:1]).data_ptr() == whole.data_ptr()


def test_pieces_that_lie_elsewhere_are_copied():
    whole = torch.randn(12, 6)
    for pieces in (
        [whole[:3], whole[4:]],
        [whole[3:], whole[:3]],
        [whole[:3], whole[3:].clone()],
        [whole[:3].clone(), whole[3:].clone()],
        [whole[:, :3], whole[:, 3:]],
    ):
        joined = stacked(pieces)
        assert torch.equal(joined, torch.cat(pieces))
        assert joined.data_ptr() != pieces[0].data_ptr()


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_plain_weights_of_an_accelerator_follow_the_same_rules(biased, dtype, invariant):
    x, weight, residual = (
        torch.randn(2, 5, 40).to(dtype),
        torch.randn(60, 40).to(dtype),
        torch.randn(2, 5, 60).to(dtype),
    )
    bias = torch.randn(60) if biased else None
    packed = pack_unchanged(weight, bias, Placement(dtype, "cuda", invariant))
    assert isinstance(packed, InvariantWeight if invariant else DenseWeight)
    assert packed.dense().data_ptr() == weight.data_ptr()
    assert packed.num_bytes == weight.nbytes + (dtype.itemsize * 60 if biased else 0)
    assert bias is None or packed.bias.dtype == dtype
    both = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.to(dtype).double())
    near = tolerance(dtype) if dtype == torch.float32 else {"rtol": 2e-2, "atol": 6e-2}
    torch.testing.assert_close(packed.linear(x).double(), both, **near)
    torch.testing.assert_close(packed.linear(x[:, ::2].reshape(6, 40)), packed.linear(x)[:, ::2].reshape(6, 60))
    torch.testing.assert_close(packed.linear(x, None, residual).double(), both + residual.double(), **near)
    out = residual.clone()
    assert packed.linear(x, out, out) is out
    torch.testing.assert_close(out.double(), both + residual.double(), **near)
    gate, up = both.chunk(2, dim=-1)
    y = torch.nn.functional.silu(gate) * up
    # Gate, up and their product are each rounded once, by half an ulp; silu's slope is at most 1.1. The bound is twice
    # that.
    ulp = torch.finfo(dtype).eps
    error = (packed.gated(x, SILU).double() - y).abs()
    assert (error <= ulp * (1.1 * (gate * up).abs() + 2 * y.abs()) + 1e-5).all()


@pytest.mark.parametrize("kind", ["ours", "invariant", "float32"])
@pytest.mark.parametrize("rule", ["one_wave_gated", "many_gated"])
def test_gated_products_are_one_kernel(rule, kind, monkeypatch):
    """Separate kernels run if a row's bits must not vary, and in float32."""
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(dispatch, rule, lambda *sizes: asked.append(sizes) or True)
    for module in (dense, weight_module):
        monkeypatch.setattr(module, "glu", lambda *given: asked.append(()) or glu(*given))
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    x, weight, bias = torch.randn(2, 3, 40).to(dtype), torch.randn(60, 40).to(dtype) / 4, torch.randn(60)
    packed = pack_unchanged(weight, bias, Placement(dtype, "cuda", kind == "invariant"))
    y = packed.gated(x, SILU)
    torch.testing.assert_close(y.double(), gated_linear_reference(x.double(), packed, SILU), rtol=3e-2, atol=6e-2)
    assert asked == [(6, 30, 40) if kind == "ours" else ()]


def test_plain_weights_say_when_the_rows_are_of_another_kind():
    with pytest.raises(AssertionError, match="load them as"):
        pack_unchanged(torch.zeros(3, 4), None, Placement(torch.float32, "cuda")).linear(torch.zeros(1, 4).bfloat16())
