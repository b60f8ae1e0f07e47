"""Products with a quantised weight by tiles, each of which is widened in registers: which of two kernels does it.

gemm/scaled_values takes what its `takes` names, gemm/groups the rest and every product of --deterministic, where a row
has the same bits in any company. Users: gemm/group_weight, gemm/long_products.
"""

from __future__ import annotations

from torch import Tensor

from engine.kernels.activation import Activation, glu
from engine.kernels.gemm.codes import Inputs
from engine.kernels.gemm.groups import Packed, groups_product, tile_for
from engine.kernels.gemm.quantise_rows import quantise_rows
from engine.kernels.gemm.scaled_values import scaled_values_product, takes
from engine.kernels.gemm.value_cuts import cut_for
from engine.kernels.room import empty_rows


def linear_by_tiles(
    x: Tensor, weight: Packed, bias: Tensor | None, residual: Tensor | None, out: Tensor,
    inputs: Inputs | None = None, invariant: bool = False,
) -> None:  # fmt: skip
    """x [M, K] with contiguous rows times the weight [N, K] into out [M, N]; bias [N]; residual [M, N], may be out.

    `inputs`: x becomes int8 first.
    """
    if takes(x, weight) and not invariant:
        scaled_values_product(x, weight, bias, residual, out, None, cut_for(x, weight, gated=False))
        return
    scales = None
    if inputs is not None:
        x, scales = quantise_rows(x, inputs.scale)
    groups_product(x, weight, bias, residual, out, scales, tile_for(x, weight, invariant))


def gated_by_tiles(
    x: Tensor, weight: Packed, bias: Tensor | None, activation: Activation, inputs: Inputs | None = None,
    invariant: bool = False,
) -> Tensor:  # fmt: skip
    """activate(gate, up) of x [M, K] times the weight [2N, K], gate's rows first: [M, N], new; bias [2N]."""
    if takes(x, weight) and not invariant:
        out = empty_rows(x, len(weight.codes) // 2)
        scaled_values_product(x, weight, bias, None, out, activation, cut_for(x, weight, gated=True))
        return out
    both = x.new_empty(len(x), len(weight.codes))
    linear_by_tiles(x, weight, bias, None, both, inputs, invariant)
    return glu(both, activation)
