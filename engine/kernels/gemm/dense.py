"""Unquantized linear layers: y = x W^T + bias, with W packed once at load.

Packing (CPU): panels of 64 output rows, [ceil(N/64), K, 64], so one microkernel streams a panel front to back for a
single token and keeps it in cache for many. Each output is one fused multiply-add chain over k = 0..K-1, whatever the
number of tokens: the base of the engine's batch invariance. bfloat16 weights stay bfloat16 in memory (float32 ones too,
when every value survives the narrowing) and are widened in registers, which is exact. Users: every layer with weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PANEL = 64  # output rows in a panel


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """Weights of one linear layer, ready for `linear`. Owner: the model; read only."""

    panels: Tensor  # [num_panels, in_features, 64] float32 or bfloat16; rows past out_features are zero
    bias: Tensor | None  # [num_panels * 64] float32, zero-padded
    out_features: int
    in_features: int

    def weight(self) -> Tensor:
        """The unpacked weight, [out_features, in_features]: for references and for saving; copies."""
        flat = self.panels.transpose(1, 2).reshape(-1, self.in_features)
        return flat[: self.out_features]


def pack(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """weight [N, K] float32 or bfloat16, bias [N] or None -> PackedLinear (a copy; the originals can go)."""
    assert weight.dim() == 2, f"weight has shape {tuple(weight.shape)}; [out_features, in_features] is needed"
    rows, columns = weight.shape
    num_panels = -(-rows // PANEL)
    padded = weight.new_zeros(num_panels * PANEL, columns)
    padded[:rows] = weight
    panels = padded.view(num_panels, PANEL, columns).transpose(1, 2).contiguous()
    wide_bias = None
    if bias is not None:
        wide_bias = torch.zeros(num_panels * PANEL, dtype=torch.float32, device=weight.device)
        wide_bias[:rows] = bias
    return PackedLinear(panels, wide_bias, rows, columns)


def linear(x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
    """x [..., K] float32 or bfloat16 -> [..., N] of x's dtype; written to `out` when given (same shape, contiguous)."""
    y = linear_reference(x, packed)
    return y if out is None else out.copy_(y)


def linear_reference(x: Tensor, packed: PackedLinear) -> Tensor:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    bias = None if packed.bias is None else packed.bias[: packed.out_features].to(wide)
    return torch.nn.functional.linear(x.to(wide), packed.weight().to(wide), bias).to(x.dtype)
