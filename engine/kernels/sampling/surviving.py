"""How many of a row's drafts are right, where an operator sets it for measurements (engine/base/survivals).

    right = number of places j with u < survivals[j],  u from (the row's seed, number of the first draft in the answer)

Survivals fall along a row, so one draw decides a step of a row. The draw has a stream of its own: samples are those of
a server without it. Users: kernels/sampling/verify, kernels/sampling/replay, engine/step/backend/host/verify.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.sampling.noise import fraction, fraction_reference
from engine.kernels.sampling.xtc import STREAM as XTC_STREAM
from engine.kernels.step_tensors import SlotTensors, seed_of
from engine.kernels.target import tl, triton

STREAM = XTC_STREAM + 2  # the streams before belong to tokens and to XTC
OWN_STREAM = tl.constexpr(STREAM)


def survivals_on(survivals: Sequence[float], device: str | torch.device) -> Tensor | None:
    """The survivals for kernels, float32 [K]; None: none are set."""
    return torch.tensor(survivals, dtype=torch.float32, device=device) if survivals else None


@triton.jit
def surviving(words, slot, place, survivals, NUM: tl.constexpr, LANES: tl.constexpr):
    """Return the number of right drafts of a slot, of which the first has the number `place` in the answer; LANES: a
    power of two >= NUM."""
    lane = tl.arange(0, LANES)
    drawn = fraction(seed_of(words, slot), place, place * 0, OWN_STREAM)
    chance = tl.load(survivals + lane, mask=lane < NUM, other=0.0)
    return tl.sum((drawn < chance).to(tl.int32), 0)


def surviving_reference(slots: SlotTensors, slot: Tensor, place: Tensor, survivals: Tensor) -> Tensor:
    """Specification of `surviving` for rows int64 [rows] -> int64 [rows]."""
    zero = torch.zeros(1, dtype=torch.int64)
    pairs = zip(slots.seed[slot].tolist(), place.tolist())
    drawn = [fraction_reference(seed, place, zero, STREAM) for seed, place in pairs]
    return (torch.cat([zero[:0].float(), *drawn])[:, None] < survivals).sum(1)
