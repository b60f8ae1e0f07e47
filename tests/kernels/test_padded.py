"""The padded MLP of towers as a GPU stores it, on CPU tensors."""

import pytest
import torch
from torch.nn import functional

from engine.kernels.attention.dense import dense_attention
from engine.kernels.gemm.pack import Placement, pack
from engine.layers.padded import PaddedGated, PaddedLinear, pad_gated, pad_second, spare
from engine.quant.base import Quantised
from engine.quant.online import Floats


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_padded_hidden_width_gives_the_same_and_carries_the_bias(dtype):
    width, more = 44, spare(44, "cuda")
    assert (more, spare(64, "cuda"), spare(44, "cpu")) == (20, 64, 0)
    draw = torch.Generator().manual_seed(1)
    x, gate, up, gate_bias, up_bias, down, bias = (
        torch.randn(*shape, generator=draw).to(dtype)
        for shape in ((9, 32), (width, 32), (width, 32), (width,), (width,), (24, width), (24,))
    )
    first, first_bias = pad_gated(gate, up, gate_bias, up_bias, more)
    both = functional.linear(x, first, first_bias)
    hidden = (functional.silu(both[:, : width + more].float()) * both[:, width + more :].float()).to(dtype)
    assert (hidden[:, width] == 1).all()
    assert (hidden[:, width + 1 :] == 0).all()
    known = functional.silu(functional.linear(x, gate, gate_bias).float()) * functional.linear(x, up, up_bias).float()
    torch.testing.assert_close(hidden[:, :width], known.to(dtype))
    second = pad_second(down, bias, more)
    assert second.shape == (24, 64)
    got = hidden.double() @ second.double().T
    torch.testing.assert_close(got, hidden[:, :width].double() @ down.double().T + bias.double())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_output_of_attention_in_padded_rows_gets_the_bias(device):
    width, bounds = 64, torch.tensor([0, 5, 9], dtype=torch.int32)
    draw = torch.Generator().manual_seed(2)
    weight, bias, x = (torch.randn(*shape, generator=draw) for shape in ((24, width), (24,), (9, 24)))
    layer, placement = PaddedLinear(width, 24), Placement(torch.float32, "cpu")
    layer.fill({"weight": [weight], "bias": [bias]}, placement)
    if more := spare(width, device):
        layer.weight = pack(pad_second(weight, bias, more), None, placement)  # as a GPU stores the weight
        layer.padded_width = width + more
    room = layer.room(x)
    assert room.shape == (9, width + more)
    for _ in range(2):  # two layers in sequence
        q, k, v = torch.randn(3, 9, 4, 16, generator=draw)
        wanted = dense_attention(q, k, v, bounds, 0.25)
        dense_attention(q, k, v, bounds, 0.25, out=room[:, :width])
        assert torch.equal(room[:, :width], wanted)
        added = x.clone()
        layer.add_to(added, room)
        torch.testing.assert_close(added, x + functional.linear(wanted, weight, bias))


@pytest.mark.parametrize(("quantised", "width"), [((), 64), (("up",), 44), (("down",), 44), (("up", "down"), 44)])
def test_a_width_is_padded_in_both_matrices_or_in_none(quantised, width):
    """Quantisers skip single matrices of a tower."""
    down = PaddedLinear(44, 32)
    layers = {"up": PaddedGated(32, 44, down), "down": down}
    for name in quantised:
        count = len(layers[name].out_features)
        layers[name].scheme = Quantised((Floats(),) * count, (name,) * count)
    for layer in layers.values():
        pieces = {kind: [torch.zeros(each.shape) for each in wanted] for kind, wanted in layer.expects().items()}
        layer.fill(pieces, Placement(torch.float32, "cpu:0"))  # as on a GPU
    made, read = layers["up"].weight.dense(), down.weight.dense()
    assert (len(made) // 2, read.shape[1]) == (width, width)
