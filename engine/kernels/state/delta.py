"""The gated delta rule of a layer: short convolution, norms of queries and keys, gates, the rule, and the gated norm.

    projected  [T, q | k | v | z | b | a]          q, k, v = silu(conv(.)); q and k divided by their norms, q * dk^-0.5
    gate       g = -exp(a_log) * softplus(a + dt_bias), per head or per key channel; beta = sigmoid(b)
    rule       S = exp(g) S;  u = beta (v - S k);  S += k u;  o = S q                       S [dk, dv] of a value head
    out        norm(o) * silu(z), or sigmoid(z)                                                [T, value heads * dv]

The tail holds k, u, g and the convolution's inputs of each position after the base. Because the tail holds u, a later
step need not solve the recurrence again. Consecutive value heads share a key head. Users: engine/layers/delta.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from engine.attention.state_meta import StateMeta
from engine.kernels.state.conv_reference import convolved
from engine.kernels.state.places import Columns, Part, Place, placed
from engine.kernels.state.rows import StepRow, by_token, step_rows, wide

UNIT = 1e-6  # added to the sum of squares of a query and of a key


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Sizes and options of a layer."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    ring: int  # positions that a tail holds
    eps: float = 1e-6  # epsilon of the gated norm
    per_channel: bool = False  # True: one gate per channel of a key; False: one per value head
    sigmoid: bool = False  # the norm's gate is sigmoid(z) instead of silu(z)
    exact: bool = False  # rows are replayed from their base (replay.py), and the tail holds columns of the product

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def conv_width(self) -> int:
        return 2 * self.key_width + self.value_width

    @property
    def gate_width(self) -> int:
        """Number of gates of a token."""
        return self.value_heads * (self.key_dim if self.per_channel else 1)

    @property
    def columns(self) -> tuple[int, int, int, int, int]:
        """First columns of q | k | v, z, b and a in the product, then the product's number of columns."""
        z = self.conv_width
        b = z + self.value_width
        a = b + self.value_heads
        return 0, z, b, a, a + self.gate_width

    @property
    def tail_columns(self) -> Columns:
        """Columns of the product that the tail of an exact layer holds: q | k | v, and b | a."""
        _, _, b, _, end = self.columns
        return Columns(0, self.conv_width, b, end - b)

    def parts(
        self, dtype: torch.dtype, state: torch.dtype, deltas: torch.dtype | None = None
    ) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
        """Returns a state's parts (S, inputs before the base) and a tail's, per position (k, u, g, input).

        An exact layer's tail: (b | a, input).

        `dtype`: of the model; `state`: of S; `deltas`: of u, None for the dtype of S.
        """
        state_part = (
            Part(self.value_heads * self.key_dim, self.value_dim, state),
            Part(self.taps - 1, self.conv_width, dtype),
        )
        if self.exact:
            return state_part, self.tail_columns.parts(dtype)
        return state_part, (
            Part(1, self.key_width, dtype),
            Part(self.value_heads, self.value_dim, deltas or state),
            Part(1, self.gate_width, wide(state)),
            Part(1, self.conv_width, dtype),
        )


@dataclass(frozen=True, slots=True, eq=False)
class DeltaWeights:
    """Weights of a layer, all float32; references also take float64."""

    taps: Tensor  # [taps, conv_width], the token's own tap first
    a_log: Tensor  # [value_heads]
    dt_bias: Tensor  # [gate_width]
    norm: Tensor  # [value_dim]


@dataclass(frozen=True, slots=True, eq=False)
class StatePages:
    """A layer's pages, and the places of a state's parts and a tail's parts in a run."""

    pages: Tensor  # [num_blocks, page_bytes] uint8
    state: tuple[Place, ...]
    tail: tuple[Place, ...]


def cut(pages: Tensor, parts: tuple[Part, ...], tail: tuple[Part, ...], ring: int) -> StatePages:
    """Places the parts of a spec, state and tail, in pages."""
    return StatePages(pages, placed(parts, pages.shape[1])[0], placed(tail, pages.shape[1], ring)[0])


def delta_rule_reference(
    projected: Tensor, weights: DeltaWeights, shape: DeltaShape, cache: StatePages, meta: StateMeta
) -> Tensor:
    out = projected.new_zeros(len(projected), shape.value_width)
    for row in step_rows(meta):
        out[row.tokens] = _of_row(projected[row.tokens], weights, shape, cache, row).to(out.dtype)
    return out


def gates_of(a: Tensor, weights: DeltaWeights, shape: DeltaShape) -> Tensor:
    """a [gate_width] of a token -> g [value_heads, key_dim or 1], in the wide dtype."""
    kind = wide(a.dtype)
    step = softplus(a.to(kind) + weights.dt_bias.to(kind), threshold=40)
    return -weights.a_log.to(kind).exp()[:, None] * step.view(shape.value_heads, -1)


def unit(x: Tensor) -> Tensor:
    """Divides each head by its norm."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT)


def _of_row(x: Tensor, weights: DeltaWeights, shape: DeltaShape, cache: StatePages, row: StepRow) -> Tensor:
    """x [tokens of the row, columns] -> [tokens, value_width], in the wide dtype."""
    (state_part, before), (keys, deltas, gates, inputs), pages, ring = cache.state, cache.tail, cache.pages, shape.ring
    _, z_at, b_at, a_at, end = shape.columns
    tokens, dk, dv, heads = len(x), shape.key_dim, shape.value_dim, shape.value_heads
    active = convolved(x[:, :z_at], weights.taps, None, pages, row, before, inputs, ring)
    q, k, v = active.split([shape.key_width, shape.key_width, shape.value_width], 1)
    q, k = (each.reshape(tokens, shape.key_heads, dk) for each in (q, k))
    q, k = by_token(unit, q), by_token(unit, k)
    k = k.to(keys.dtype).to(active.dtype)  # rounded as later steps read it
    gate = by_token(lambda a: gates_of(a, weights, shape), x[:, a_at:end])
    beta = by_token(torch.sigmoid, x[:, b_at:a_at].to(active.dtype))
    held = [row.read_tail(pages, place, ring).to(active.dtype) for place in (keys, deltas, gates)]
    row.write_tail(pages, keys, ring, k.flatten(1))
    row.write_tail(pages, gates, ring, gate.flatten(1))
    shares = heads // shape.key_heads
    k = torch.cat([held[0].view(-1, shape.key_heads, dk), k]).repeat_interleave(shares, 1)
    q = q.repeat_interleave(shares, 1) * dk**-0.5
    decay = by_token(torch.exp, torch.cat([held[2].view(-1, *gate.shape[1:]), gate]))
    v, known, found, outs = v.view(tokens, heads, dv), held[1].view(-1, heads, dv), [], []
    empty = active.new_zeros(heads, dk, dv)
    state = state_part.read(pages, row.base_blocks).view(heads, dk, dv).to(active.dtype) if row.base else empty
    for position in range(row.base, row.end):
        token, place = position - row.start, position - row.base
        state = state * decay[place, :, :, None]
        if token < 0:
            u = known[place]
        else:
            u = beta[token, :, None] * (v[token] - torch.einsum("hkv,hk->hv", state, k[place]))
            u = u.to(deltas.dtype).to(state.dtype)
            found.append(u)
        state = state + k[place, :, :, None] * u[:, None]
        if token >= 0:
            outs.append(torch.einsum("hkv,hk->hv", state, q[token]))
        for blocks in row.targets.get(position + 1, ()):
            state_part.write(pages, blocks, state.reshape(-1, dv))
    row.write_tail(pages, deltas, ring, torch.stack(found).flatten(1))
    return by_token(lambda o, z: gated_norm(o, z, weights.norm, shape), torch.stack(outs), x[:, z_at:b_at]).flatten(1)


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, shape: DeltaShape) -> Tensor:
    """o [value_heads, value_dim], z [value_width] of a token -> norm(o) * silu(z), or sigmoid(z)."""
    z = z.to(o.dtype).view_as(o)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + shape.eps) * weight.to(o.dtype)
    return o * (z.sigmoid() if shape.sigmoid else silu(z))
