"""Mamba-1's state space: a state of N numbers for each channel; time steps, B and C are computed from the token.

    rule  h = exp(dt A) h + dt x B;  y = C h + D x;  out = y * silu(z)      A = -exp(a_log), h [N] of a channel
          dt = softplus(steps + dt_bias), never bounded

Convolution and rule are two functions, because linear products lie between them (engine/layers/mamba.py). The tail
holds x, `steps`, B and the convolution's inputs; a step replays the recurrence from the base.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from engine.attention.state_meta import StateMeta
from engine.kernels.state.conv_reference import convolved
from engine.kernels.state.delta import StatePages
from engine.kernels.state.places import Part
from engine.kernels.state.rows import StepRow, by_token, step_rows, wide


@dataclass(frozen=True, slots=True)
class SelectiveShape:
    """Sizes of a layer."""

    inner: int  # number of channels
    state_size: int
    taps: int
    ring: int  # positions that a tail holds
    exact: bool = False  # states are rounded to their dtype after every 16 positions, wherever the base is

    def parts(self, dtype: torch.dtype, state: torch.dtype) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
        """Returns a state's parts (h, inputs before the base) and a tail's, per position (x, steps, B, input).

        `dtype`: of the model; `state`: of h.
        """
        wide_row, few = Part(1, self.inner, dtype), Part(1, self.state_size, dtype)
        return (Part(self.inner, self.state_size, state), Part(self.taps - 1, self.inner, dtype)), (
            wide_row, wide_row, few, wide_row
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class SelectiveWeights:
    """Weights of a layer, all float32; references also take float64."""

    taps: Tensor  # [taps, inner], the token's own tap first
    bias: Tensor | None  # [inner]
    a_log: Tensor  # [inner, state_size]
    dt_bias: Tensor  # [inner]
    d: Tensor  # [inner]


@dataclass(frozen=True, slots=True, eq=False)
class SelectiveInputs:
    """Inputs of the rule, for each token."""

    x: Tensor  # [T, inner], after the convolution
    steps: Tensor  # [T, inner], dt before bias and softplus
    b: Tensor  # [T, state_size]
    c: Tensor  # [T, state_size]
    z: Tensor  # [T, inner]


def selective_conv_reference(
    projected: Tensor, weights: SelectiveWeights, shape: SelectiveShape, cache: StatePages, meta: StateMeta
) -> Tensor:
    out = projected.new_zeros(len(projected), shape.inner)
    for row in step_rows(meta):
        found = projected[row.tokens, : shape.inner]
        place = cache.state[1], cache.tail[3], shape.ring
        out[row.tokens] = convolved(found, weights.taps, weights.bias, cache.pages, row, *place).to(out.dtype)
    return out


def selective_scan_reference(
    given: SelectiveInputs, weights: SelectiveWeights, shape: SelectiveShape, cache: StatePages, meta: StateMeta
) -> Tensor:
    out = given.x.new_zeros(given.x.shape)
    for row in step_rows(meta):
        out[row.tokens] = _of_row(given, weights, shape, cache, row).to(out.dtype)
    return out


def _of_row(
    given: SelectiveInputs, weights: SelectiveWeights, shape: SelectiveShape, cache: StatePages, row: StepRow
) -> Tensor:
    """Returns the row's results [tokens of the row, inner], in the wide dtype."""
    state_part, pages, kind, found = cache.state[0], cache.pages, wide(given.x.dtype), []
    for values, place in zip((given.x, given.steps, given.b), cache.tail):
        own = values[row.tokens].to(place.dtype)
        found.append(torch.cat([row.read_tail(pages, place, shape.ring).to(kind), own.to(kind)]))
        row.write_tail(pages, place, shape.ring, own)
    x, steps, b = found
    c, z = (each[row.tokens].to(kind) for each in (given.c, given.z))
    dt = by_token(lambda own: softplus(own + weights.dt_bias.to(kind), threshold=40), steps)
    rate, scaled = -weights.a_log.to(kind).exp(), dt * x
    state, outs = x.new_zeros(shape.inner, shape.state_size), []
    if row.base:
        state = state_part.read(pages, row.base_blocks).to(kind)
    for position in range(row.base, row.end):
        at = position - row.base
        state = (dt[at, :, None] * rate).exp() * state + scaled[at, :, None] * b[at]
        if position >= row.start:
            outs.append(state @ c[position - row.start])
        for blocks in row.targets.get(position + 1, ()):
            state_part.write(pages, blocks, state)
    return (torch.stack(outs) + weights.d.to(kind) * x[row.held :]) * by_token(silu, z)
