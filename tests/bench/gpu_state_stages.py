"""Compares each stage of a delta rule's scan with torch in float64, applied to the previous stage's results.

A wrong number is then an error of the stage in its line. In: rows that start from an empty state, a device. Out: lines
with name, error and ok, as in tests/bench/gpu_state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from engine.kernels.state.chunks import with_work
from engine.kernels.state.delta import DeltaShape, DeltaWeights, cut, gates_of, unit
from engine.kernels.state.delta_prepare import SIZE, launch_prepare
from engine.kernels.state.delta_rule import convolved_heads
from engine.kernels.state.delta_scan import launch_core
from tests.kernels.states import Row, delta_weights, drawn_cache, meta_of, on

LIMIT = 1.5e-2


def convolved(x: Tensor, weights: DeltaWeights, shape: DeltaShape) -> Tensor:
    """Returns q, k, v of a row from its first position on."""
    line = pad(x[:, : shape.conv_width], (0, 0, shape.taps - 1, 0))
    taps = weights.taps.double().flip(0)
    made = silu(sum(line[tap : tap + len(x)] * taps[tap] for tap in range(shape.taps)))
    q, k, v = made.split([shape.key_width, shape.key_width, shape.value_width], 1)
    q, k = (unit(each.unflatten(1, (-1, shape.key_dim))).flatten(1) for each in (q, k))
    return torch.cat([q * shape.key_dim**-0.5, k, v], 1)


def triangles(q: Tensor, k: Tensor, gate: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (X, M) [heads, n, n] of a chunk; q, k [n, heads, dim], gate and beta [n, heads]."""
    level = gate.cumsum(0).t()
    decay = (level[:, :, None] - level[:, None, :]).tril().exp()
    keyed = torch.einsum("ihc,jhc->hij", k, k) * decay * beta.t()[:, :, None]
    inverse = torch.linalg.inv(torch.eye(len(q), dtype=q.dtype) + keyed.tril(-1))
    return inverse, (torch.einsum("ihc,jhc->hij", q, k) * decay).tril()


def stages(
    shape: DeltaShape, dtype: torch.dtype, device: str, page_bytes: int, tuning: dict[str, Any] | None = None
) -> list[dict]:
    """Checks conv, prepare and carry of two rows; one row is part of a chunk, the other has three chunks."""
    torch.manual_seed(1)
    rows, found = [Row(0, 63, 0, 48), Row(0, 141, 0, 128, (64,))], []
    parts, tail = shape.parts(dtype, torch.float32)
    places, table = drawn_cache(parts, tail, shape.ring, 8 * len(rows), page_bytes)
    meta, weights = on(meta_of(rows, table), device), delta_weights(shape)
    held = DeltaWeights(*(getattr(weights, name).to(device) for name in DeltaWeights.__slots__))
    projected = torch.randn(sum(row.end for row in rows), shape.columns[-1]).to(dtype)
    given, cache = projected.to(device), cut(places.pages.to(device, copy=True), parts, tail, shape.ring)
    meta = with_work(meta, len(given), shape.ring, SIZE)
    active = convolved_heads(given, held, shape, cache, meta, short=False)
    inverse, mixed, *_ = (each.cpu().double() for each in launch_prepare(active, given, held, shape, meta.work))
    out = given.new_zeros(len(given), shape.value_width)
    launch_core(active, given, held, shape, cache, meta, out, tuning)
    active, out, pages = active.cpu().double(), out.cpu().double(), cache.pages.cpu()

    def compare(name: str, mine: Tensor, theirs: Tensor) -> None:
        error = float((mine.double() - theirs.double()).norm() / theirs.double().norm())
        found.append({"name": f"{dtype} {tuning or ''} {name}", "error": error, "ok": error < LIMIT})

    first = 0
    for number, row in enumerate(rows):
        mine = slice(first, first + row.end)
        x = projected[mine].double()
        compare(f"conv of row {number}", active[mine], convolved(x, weights, shape))
        gate = torch.stack([gates_of(each, weights, shape)[:, 0] for each in x[:, shape.columns[3] :]])
        beta = x[:, shape.columns[2] : shape.columns[3]].sigmoid()
        q, k, v = active[mine].split([shape.key_width, shape.key_width, shape.value_width], 1)
        shares = shape.value_heads // shape.key_heads
        q, k = (each.unflatten(1, (-1, shape.key_dim)).repeat_interleave(shares, 1) for each in (q, k))
        v, state = v.unflatten(1, (-1, shape.value_dim)), q.new_zeros(shape.value_heads, shape.key_dim, shape.value_dim)
        for begin in range(0, row.end, SIZE):
            at = slice(begin, min(begin + SIZE, row.end))
            size, wanted = at.stop - begin, triangles(q[at], k[at], gate[at], beta[at])
            for name, made, want in zip(("inverse", "mixed"), (inverse, mixed), wanted):
                got = made[mine][at].transpose(0, 1)
                compare(f"prepare of row {number} at {begin}, {name}", got, pad(want, (0, SIZE - size)))
            level = gate[at].cumsum(0)
            far = torch.einsum("hcv,ihc->ihv", state, k[at]) * level.exp()[:, :, None]
            u = torch.einsum("hij,jhv->ihv", wanted[0], beta[at][:, :, None] * (v[at] - far))
            o = torch.einsum("hcv,ihc->ihv", state, q[at]) * level.exp()[:, :, None]
            o += torch.einsum("hij,jhv->ihv", wanted[1], u)
            compare(f"carry of row {number} at {begin}, o", out[mine][at], o.flatten(1))
            decayed = k[at] * (level[-1] - level).exp()[:, :, None]
            state = state * level[-1].exp()[:, None, None] + torch.einsum("ihc,ihv->hcv", decayed, u)
            if at.stop in (row.new_base, *row.checkpoints):
                run = meta.write_run[number] if at.stop == row.new_base else meta.checkpoint_run[number, 0]
                got = places.state[0].read(pages, table[int(run)])
                compare(f"carry of row {number}, state at {at.stop}", got, state.flatten(0, 1))
        first += row.end
    return found
