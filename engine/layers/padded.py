"""Linear layers with a padded inner width for the vendor's library: PaddedLinear, after PaddedGated or a kernel.

Owner: the model; read only after loading. On an accelerator the library's fast kernels need matrix rows that begin at
multiples of 16 bytes, so the inner width is padded to the next larger multiple of UNIT. The first padding unit is
always 1, and its column in the second matrix is the second bias, which saves a separate pass for the bias; therefore
a width that is a multiple already is padded too. The other padding units are 0. There is no padding on a CPU, or if the
checkpoint quantises either matrix.

    hidden  | 0 .. width-1 | 1 | 0 0 .. |      x @ second.T  ->  as before, bias included
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.kernels.activation import Activation
from engine.kernels.gemm.pack import Placement, pack, pack_unchanged
from engine.layers.linear import GatedLinear, Linear
from engine.quant.base import UNQUANTISED

UNIT = 64
GATE_OF_ONE = 32.0  # silu(32) is 32 in float32, and 32 * 1/32 is exactly 1 in every dtype


class PaddedLinear(Linear):
    """h W^T + b, with a padded h from PaddedGated or from `room`."""

    __slots__ = ("first", "padded_width")

    def __init__(self, width: int, out_features: int) -> None:
        super().__init__(width, out_features, bias=True)
        self.padded_width = width  # columns of the matrix in memory
        self.first: PaddedGated | None = None

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        dtype, device = placement.dtype, placement.device
        more = spare(self.in_features, device)
        if not more or not is_plain(self, self.first):
            super().fill(pieces, placement)
            return
        (weight,), (bias,) = pieces["weight"], pieces["bias"]
        assert weight is not None
        assert bias is not None
        self.weight = pack(pad_second(weight.to(device, dtype), bias.to(device, dtype), more), None, placement)
        self.padded_width = self.in_features + more

    def room(self, like: Tensor) -> Tensor:
        """A new buffer [len(like), padded width] for h: callers write only the first `in_features` columns.

        One buffer can serve several layers of the same width in turn.
        """
        room = like.new_zeros(len(like), self.padded_width)
        room[:, self.in_features : self.in_features + 1] = 1
        return room


class PaddedGated(GatedLinear):
    """silu(x G^T + g) * (x U^T + u); [..., width] on a CPU, else [..., padded width]."""

    __slots__ = ("second",)

    def __init__(self, in_features: int, width: int, second: PaddedLinear | None = None) -> None:
        """`second`: the layer that reads the result."""
        super().__init__(in_features, width, bias=True, activation=Activation.SILU)
        self.second = second
        if second is not None:
            second.first = self

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        dtype, device = placement.dtype, placement.device
        more = spare(self.out_features[0], device)
        if not more or not is_plain(self, self.second):
            super().fill(pieces, placement)
            return
        gate, up = (piece.to(device, dtype) for piece in pieces["weight"] if piece is not None)
        gate_bias, up_bias = (piece.to(device, torch.float32) for piece in pieces["bias"] if piece is not None)
        self.weight = pack_unchanged(*pad_gated(gate, up, gate_bias, up_bias, more), placement)


def is_plain(*layers: Linear | None) -> bool:
    """Whether none of the layers is quantised in the checkpoint, or has adapters."""
    return all(layer is None or (layer.scheme is UNQUANTISED and layer.site is None) for layer in layers)


def spare(width: int, device: str) -> int:
    """The number of padding units: 0 on a CPU, else at least 1."""
    return 0 if device == "cpu" else UNIT - width % UNIT


def pad_gated(gate: Tensor, up: Tensor, gate_bias: Tensor, up_bias: Tensor, more: int) -> tuple[Tensor, Tensor]:
    """Weight [2 * (width + more), in_features] and bias of both products, gate first."""
    width = len(gate)
    weight = torch.cat([pad(gate, (0, 0, 0, more)), pad(up, (0, 0, 0, more))])
    bias = torch.stack([pad(gate_bias, (0, more)), pad(up_bias, (0, more))])
    bias[:, width] = torch.tensor([GATE_OF_ONE, 1 / GATE_OF_ONE])
    return weight, bias.flatten()


def pad_second(weight: Tensor, bias: Tensor, more: int) -> Tensor:
    """[out_features, width + more]; the first new column is the bias."""
    return torch.cat([weight, bias[:, None], weight.new_zeros(len(weight), more - 1)], dim=1)
