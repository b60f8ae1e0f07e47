"""The padded MLP of towers: what an accelerator keeps of it, on CPU tensors."""

import pytest
import torch
from torch.nn import functional

from engine.layers.padded import pad_gated, pad_second, spare


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_padded_hidden_width_gives_the_same_and_carries_the_bias(dtype):
    width, more = 44, spare(44, "cuda")
    assert (more, spare(64, "cuda"), spare(44, "cpu")) == (20, 0, 0)
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
