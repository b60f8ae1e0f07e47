"""What experts made of a token, summed: out = sum over k of weight[k] * made[k] (+ shared) (+ residual).

The sum is taken in float32, in the order in which the token chose its experts, then the shared MLP's result (times the
sigmoid of its gate), then the residual, and is rounded once. Users: engine/layers/moe.
"""

from __future__ import annotations

import torch
from torch import Tensor


def combine(
    made: Tensor, weights: Tensor, shared: Tensor | None, gate: Tensor | None, residual: Tensor | None
) -> Tensor:
    """made [T, top_k, H], weights [T, top_k] float32 -> [T, H] of made's dtype: `residual`, in place, or new.

    shared [T, H]: the shared MLP's result; gate [T, 1]: by whose sigmoid it is multiplied.
    """
    return combine_reference(made, weights, shared, gate, residual)


def combine_reference(
    made: Tensor, weights: Tensor, shared: Tensor | None, gate: Tensor | None, residual: Tensor | None
) -> Tensor:
    wide = torch.float64 if made.dtype == torch.float64 else torch.float32
    weights = weights.to(wide)
    total = made[:, 0].to(wide) * weights[:, :1]
    for slot in range(1, made.shape[1]):
        total += made[:, slot].to(wide) * weights[:, slot : slot + 1]
    if shared is not None:
        # float64: torch computes the end of a float32 tensor by other instructions, whose last bit may differ
        total += shared.to(wide) if gate is None else shared.to(wide) * gate.double().sigmoid().to(wide)
    if residual is None:
        return total.to(made.dtype)
    return residual.copy_(total + residual)
