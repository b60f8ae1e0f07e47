"""Mamba-2's state space of a layer: short convolution, time steps, the recurrence, and the gated norm.

    projected  [T, z | x | B | C | dt]              x, B, C = silu(conv(.)); dt = softplus(dt + dt_bias), never bounded
    rule       h = exp(dt A) h + B dt x;  y = C h + D x           A = -exp(a_log); h [state_size, head_dim] of a head
    out        norm(y * silu(z)), norm(y) * silu(z), y * silu(z) or y, [T, inner]; a norm covers a group of channels

A group of consecutive heads shares B and C. The tail holds x, B, dt and the convolution's inputs of each position after
the base. Users: engine/layers/mamba.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from engine.attention.state_meta import StateMeta
from engine.kernels.state.conv_reference import convolved
from engine.kernels.state.delta import StatePages
from engine.kernels.state.places import Columns, Part
from engine.kernels.state.rows import StepRow, by_token, step_rows, wide

NormOrder = Literal["none", "before gate", "behind gate", "bare"]  # "bare": no norm and no gate


@dataclass(frozen=True, slots=True)
class SsdShape:
    """Sizes and options of a layer."""

    heads: int
    head_dim: int
    groups: int  # a group of heads shares B and C; a norm covers the channels of a group
    state_size: int
    taps: int
    ring: int  # positions that a tail holds
    norm: NormOrder = "behind gate"
    eps: float = 1e-5  # epsilon of the norm
    exact: bool = False  # rows are replayed from their base (replay.py), and the tail holds columns of the product

    @property
    def inner(self) -> int:
        """Number of channels of all heads."""
        return self.heads * self.head_dim

    @property
    def again_width(self) -> int:
        """Columns of x and B, the columns that a tail holds."""
        return self.inner + self.groups * self.state_size

    @property
    def conv_width(self) -> int:
        return self.inner + 2 * self.groups * self.state_size

    @property
    def columns(self) -> tuple[int, int, int, int]:
        """First columns of z, x | B | C and dt in the product, then the product's number of columns."""
        dt = self.inner + self.conv_width
        return 0, self.inner, dt, dt + self.heads

    @property
    def tail_columns(self) -> Columns:
        """Columns of the product that the tail of an exact layer holds: x | B | C, and dt."""
        return Columns(self.inner, self.conv_width, self.columns[2], self.heads)

    def parts(self, dtype: torch.dtype, state: torch.dtype) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
        """Returns a state's parts (h, inputs before the base) and a tail's, per position (x | B, dt, input).

        `dtype`: of the model; `state`: of h. An exact layer's tail: (dt, input).
        """
        before = Part(self.taps - 1, self.conv_width, dtype)
        if self.exact:
            return (Part(self.heads * self.state_size, self.head_dim, state), before), self.tail_columns.parts(dtype)
        tail = (Part(1, self.again_width, dtype), Part(1, self.heads, wide(state)), Part(1, self.conv_width, dtype))
        return (Part(self.heads * self.state_size, self.head_dim, state), before), tail


@dataclass(frozen=True, slots=True, eq=False)
class SsdWeights:
    """Weights of a layer, all float32; references also take float64."""

    taps: Tensor  # [taps, conv_width], the token's own tap first
    bias: Tensor | None  # [conv_width]
    a_log: Tensor  # [heads]
    dt_bias: Tensor  # [heads]
    d: Tensor  # [heads]
    norm: Tensor | None  # [inner]; None if the shape's norm is "none" or "bare"


def ssd_reference(
    projected: Tensor, weights: SsdWeights, shape: SsdShape, cache: StatePages, meta: StateMeta
) -> Tensor:
    out = projected.new_zeros(len(projected), shape.inner)
    for row in step_rows(meta):
        out[row.tokens] = _of_row(projected[row.tokens], weights, shape, cache, row).to(out.dtype)
    return out


def _of_row(x: Tensor, weights: SsdWeights, shape: SsdShape, cache: StatePages, row: StepRow) -> Tensor:
    """x [tokens of the row, columns] -> [tokens, inner], in the wide dtype."""
    (state_part, before), (again, steps, inputs), pages, ring = cache.state, cache.tail, cache.pages, shape.ring
    z, found, dt = x.split([shape.inner, shape.conv_width, shape.heads], 1)
    active = convolved(found, weights.taps, weights.bias, pages, row, before, inputs, ring)
    kind, heads = active.dtype, shape.heads
    dt = by_token(lambda own: softplus(own + weights.dt_bias.to(kind), threshold=40), dt.to(kind))
    held, times = (row.read_tail(pages, place, ring).to(kind) for place in (again, steps))
    own = active[:, : shape.again_width].to(again.dtype)
    row.write_tail(pages, again, ring, own)
    row.write_tail(pages, steps, ring, dt)
    values, b = torch.cat([held, own.to(kind)]).split([shape.inner, shape.groups * shape.state_size], 1)
    values = values.view(-1, heads, shape.head_dim)
    c = active[:, shape.again_width :]
    b, c = (
        each.reshape(-1, shape.groups, shape.state_size).repeat_interleave(heads // shape.groups, 1) for each in (b, c)
    )
    dt = torch.cat([times, dt])
    rate = -weights.a_log.to(kind).exp()
    decay, scaled = by_token(lambda own: (rate * own).exp(), dt), values * dt[:, :, None]
    state, outs = active.new_zeros(heads, shape.state_size, shape.head_dim), []
    if row.base:
        state = state_part.read(pages, row.base_blocks).view_as(state).to(kind)
    for position in range(row.base, row.end):
        place = position - row.base
        state = state * decay[place, :, None, None] + b[place, :, :, None] * scaled[place, :, None]
        if position >= row.start:
            outs.append(torch.einsum("hnp,hn->hp", state, c[position - row.start]))
        for blocks in row.targets.get(position + 1, ()):
            state_part.write(pages, blocks, state.reshape(-1, shape.head_dim))
    y = torch.stack(outs) + weights.d.to(kind)[:, None] * values[row.held :]
    return by_token(lambda own, gate: grouped_norm(own, gate, weights.norm, shape), y.flatten(1), z.to(kind))


def grouped_norm(y: Tensor, z: Tensor, weight: Tensor | None, shape: SsdShape) -> Tensor:
    """Gates and normalises y [inner] of a token by z [inner], in the order that the shape's norm names."""
    if shape.norm == "bare":
        return y
    gate = silu(z)
    if weight is None or shape.norm == "none":
        return y * gate
    y = y * gate if shape.norm == "behind gate" else y
    parts = y.view(shape.groups, -1)
    y = (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + shape.eps)).flatten() * weight.to(y.dtype)
    return y if shape.norm == "behind gate" else y * gate
