"""The exchange: the sum of all ranks' partial rows, added to the residual stream, through the next norm.

Every product whose columns are dealt out over ranks (attention's output, an MLP's down) gives each rank a partial
result. All ranks call `exchange` in the same order with the same number of rows. The sum is float32 in rank order, so
all ranks have the same bits, and by both ways: one-shot for few rows (one_shot.py), two-shot for many (two_shot.py).
The partials are rounded to the room's dtype before they travel.

Thread: device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.norm import rms_norm
from engine.kernels.parallel.one_shot import launch_one_shot
from engine.kernels.parallel.room import ExchangeRoom
from engine.kernels.parallel.two_shot import launch_two_shot


def launch_exchange(
    room: ExchangeRoom,
    x: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 0.0,
    out: Tensor | None = None,
    programs: int = 0,
) -> Tensor:
    """Exchange x [rows, width] -> norm(residual), the residual, or the sum, as in launch_one_shot."""
    launch = launch_one_shot if x.numel() <= room.layout.small else launch_two_shot
    return launch(room, x, residual, weight, eps, out, programs)


def exchange_reference(
    partials: Sequence[Tensor], residual: Tensor | None = None, weight: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """The same for all ranks at once: partials in rank order, each [rows, width]; changes the residual in place."""
    total = torch.zeros_like(partials[0], dtype=torch.float32)
    for partial in partials:
        total += partial
    if residual is None:
        total = total.to(partials[0].dtype)
    else:
        total = residual.copy_(total + residual)
    return total if weight is None else rms_norm(total, weight, eps)
