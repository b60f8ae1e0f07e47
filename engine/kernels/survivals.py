"""Estimates of how often drafts are right, by slot and place, updated by each step's verification.

    right draft:  a += (1 - a) / 16        first wrong draft:  a -= a / 16, at least 1 / 64
    all verified drafts right, and there are places behind them:  the next place's a += (1 - a) / 64
    survival of place j = a[0] * .. * a[j]

in units of Acceptance.ONE. A request begins with the estimates of all requests. _fast/budget has the same arithmetic
on the host, one step behind. Integers: the result does not depend on the order in which rows add to the counts. A
drafter that knows more about its drafts (a confidence, the length of a match) writes its survivals over these after the
choice. Users: kernels/sampling/verify writes, kernels/deal_drafts reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from _fast.layout import Acceptance
from engine.kernels.target import tl, triton

ONE = tl.constexpr(int(Acceptance.ONE))
LEAST = tl.constexpr(int(Acceptance.LEAST))
WEIGHT = tl.constexpr(int(Acceptance.WEIGHT))
HOPE = tl.constexpr(int(Acceptance.HOPE))
MANY = tl.constexpr(int(Acceptance.MANY))


@dataclass(frozen=True, slots=True, eq=False)
class Survivals:
    """Estimates and counts; K is the most drafts of a row."""

    estimates: Tensor  # [max_slots + 1, K] int32
    survivals: Tensor  # [max_slots + 1, K] int32, at least 1
    right: Tensor  # [K] int32: right drafts of all requests
    tried: Tensor  # [K] int32: verified drafts whose predecessors were right
    model: Tensor  # [K] int32: estimates with which a request begins; a step reads those from before the step


def empty_survivals(lines: int, num_drafts: int, device: str | torch.device) -> Survivals:
    """Allocate the estimates of `lines` slots."""
    shapes = (lines, num_drafts), (lines, num_drafts), (num_drafts,), (num_drafts,), (num_drafts,)
    found = Survivals(*(torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes))
    found.survivals.fill_(1)
    found.right.fill_(int(Acceptance.FIRST_RIGHT))
    found.tried.fill_(int(Acceptance.FIRST_TRIED))
    found.model.fill_(Acceptance.ONE * Acceptance.FIRST_RIGHT // Acceptance.FIRST_TRIED)
    return found


@triton.jit
def learn(
    estimates, survivals, right, tried, model,  # fields of Survivals
    slot, verified, count, begins,
    NUM: tl.constexpr,
    LANES: tl.constexpr,  # power of two >= NUM
):  # fmt: skip
    """Take over that the first `count` of a slot's `verified` drafts were right; `begins`: its first verification."""
    lane = tl.arange(0, LANES)
    inside = lane < NUM
    own = tl.load(estimates + slot * NUM + lane, mask=inside, other=0)
    own = tl.where(begins, tl.load(model + lane, mask=inside, other=0), own)
    good = lane < count
    bad = (lane == count) & (count < verified)
    hope = (lane == count) & (count == verified) & (verified > 0)
    own = tl.where(good, own + ((ONE - own) >> WEIGHT), own)
    own = tl.where(bad, tl.maximum(own - (own >> WEIGHT), LEAST), own)
    own = tl.where(hope, own + ((ONE - own) >> HOPE), own)
    tl.store(estimates + slot * NUM + lane, own, mask=inside)
    survival = tl.max(lane * 0, 0) + ONE
    for place in range(NUM):
        survival = tl.maximum((survival * tl.sum(tl.where(lane == place, own, 0), 0)) // ONE, 1)
        tl.store(survivals + slot * NUM + place, survival)
    if verified > 0:
        at = tl.where(inside, lane, 0)  # without a mask: the interpreter knows none here
        tl.atomic_add(right + at, (inside & good).to(tl.int32))
        tl.atomic_add(tried + at, (inside & (good | bad)).to(tl.int32))


def learn_reference(state: Survivals, slot: Tensor, verified: Tensor, count: Tensor, begins: Tensor) -> None:
    """Specification of `learn` for rows int64 [rows], of different slots; begins bool [rows]."""
    place, count, verified = torch.arange(state.estimates.shape[1]), count[:, None], verified[:, None]
    good, bad = place < count, (place == count) & (count < verified)
    hope = (place == count) & (count == verified) & (verified > 0)
    own = torch.where(begins[:, None], state.model, state.estimates[slot])  # [rows, K]
    own = torch.where(good, own + ((Acceptance.ONE - own) >> Acceptance.WEIGHT), own)
    own = torch.where(bad, (own - (own >> Acceptance.WEIGHT)).clamp(min=Acceptance.LEAST), own)
    own = torch.where(hope, own + ((Acceptance.ONE - own) >> Acceptance.HOPE), own)
    state.estimates[slot] = own
    survival = torch.full((len(slot),), int(Acceptance.ONE))
    for number, estimate in enumerate(own.unbind(1)):
        survival = (survival * estimate // Acceptance.ONE).clamp(min=1)
        state.survivals[slot, number] = survival.int()
    state.right.add_(good.sum(0).int())
    state.tried.add_((good | bad).sum(0).int())


@triton.jit
def refresh(right, tried, model, NUM: tl.constexpr, LANES: tl.constexpr):
    """Before a step: take the estimates of all requests from the counts, and halve large counts; one program."""
    lane = tl.arange(0, LANES)
    inside = lane < NUM
    good = tl.load(right + lane, mask=inside, other=0)
    all = tl.load(tried + lane, mask=inside, other=1)
    many = all >= MANY
    good, all = tl.where(many, good >> 1, good), tl.where(many, all >> 1, all)
    tl.store(right + lane, good, mask=inside)
    tl.store(tried + lane, all, mask=inside)
    tl.store(model + lane, good * ONE // all, mask=inside)


def refresh_reference(state: Survivals) -> None:
    many = state.tried >= Acceptance.MANY
    state.right.copy_(torch.where(many, state.right >> 1, state.right))
    state.tried.copy_(torch.where(many, state.tried >> 1, state.tried))
    state.model.copy_(state.right.long() * Acceptance.ONE // state.tried)
