"""Triton kernel of one step of Mamba-2 for short rows: positions after the base fit in the ring.

A program computes one head of one row. It reads the state once, reads x, B and dt from the tail, and computes:

    y_t = e^{G_t} h C_t + sum over j <= t of e^{G_t - G_j} (B_j.C_t) dt_j x_j + D x_t        G: sums of dt A

The last program of a row and group to finish gates and normalises the group's channels. The kernel writes dt of each
token into the tail; conv has written x, B and inputs. If the step leaves a later base, the kernel writes its state.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from engine.attention.state_meta import StateMeta
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.state.delta import StatePages
from engine.kernels.state.folds import exact_rows
from engine.kernels.state.runs import decay_between, is_short, row_at, run_of, sigmoid, softplus
from engine.kernels.state.ssd import SsdShape, SsdWeights
from engine.kernels.target import tl, triton

ORDERS = {"none": 0, "before gate": 1, "behind gate": 2, "bare": 3}


@triton.jit
def gated_group(y, z, gain, eps, width, ORDER: tl.constexpr):
    """Gates and normalises y by z in the order ORDER; y, z [lanes] hold a group of `width` channels, then zeros."""
    gate = z * sigmoid(z)
    if ORDER == 2:
        y *= gate
    if ORDER == 1 or ORDER == 2:
        y *= tl.rsqrt(tl.sum(y * y, 0) / width + eps) * gain
    if ORDER < 2:
        y *= gate
    return y


@triton.jit
def ssd_step_kernel(
    out,  # [T, HEADS * HEAD_DIM]
    arrived,  # [rows, GROUPS], zero between launches
    active,  # [T, x | B | C]
    projected,  # [T, z | x | B | C | dt]
    a_log, dt_bias, skip,  # [HEADS]
    norm,  # [HEADS * HEAD_DIM], or None
    states, again, steps,  # the pages in the dtypes of these parts
    runs, base_run, write_run, tail_run, base, new_base, start, query_start, checkpoint_run,
    eps, runs_stride, projected_stride, state_stride, again_stride, step_stride,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr, ORDER: tl.constexpr,
    RING: tl.constexpr,
    STATE_FIRST: tl.constexpr, STATE_EACH: tl.constexpr, AGAIN_FIRST: tl.constexpr, AGAIN_EACH: tl.constexpr,
    STEP_FIRST: tl.constexpr, STEP_EACH: tl.constexpr,
    PLACES: tl.constexpr,  # power of two >= RING
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_G: tl.constexpr,  # power of two >= channels of a group
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program computes one head of one row."""
    grid_wait(OVERLAP)
    head, row = tl.program_id(0), tl.program_id(1)
    inner: tl.constexpr = HEADS * HEAD_DIM
    again_width: tl.constexpr = inner + GROUPS * STATE
    first = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - first
    behind = tl.load(base + row)
    held = tl.load(start + row) - behind
    if (count > 0) & is_short(row, base, start, query_start, checkpoint_run, count > 0, RING):
        total, group = held + count, head // (HEADS // GROUPS)
        n, p, j = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_P), tl.arange(0, PLACES)
        in_state, in_head, there, fresh, old = n < STATE, p < HEAD_DIM, j < total, j >= held, j < held
        tail, base_blocks = (
            run_of(runs, tail_run, row, runs_stride, count > 0), run_of(runs, base_run, row, runs_stride, count > 0)
        )  # fmt: skip
        has = n < tl.where(behind > 0, STATE, 0)
        state_at = row_at(base_blocks, head * STATE + n, state_stride, has, STATE_FIRST, STATE_EACH, HEAD_DIM)
        state = tl.load(states + state_at[:, None] + p[None, :], mask=has[:, None] & in_head[None, :], other=0.0)
        state = state.to(tl.float32)
        slot = (behind + j) % RING
        at = row_at(tail, slot, again_stride, there, AGAIN_FIRST, AGAIN_EACH, again_width)[:, None]
        past = tl.load(
            again + at + inner + group * STATE + n[None, :], mask=there[:, None] & in_state[None, :], other=0
        )
        change = tl.load(again + at + head * HEAD_DIM + p[None, :], mask=there[:, None] & in_head[None, :], other=0)
        place = steps + row_at(tail, slot, step_stride, there, STEP_FIRST, STEP_EACH, HEADS) + head
        tokens = (first + j - held).to(tl.int64)
        dt = projected + tokens * projected_stride + 2 * inner + 2 * GROUPS * STATE + head
        made = softplus(tl.load(dt, mask=there & fresh, other=0.0).to(tl.float32) + tl.load(dt_bias + head))
        tl.store(place, made, mask=there & fresh)
        size = tl.where(there & fresh, made, tl.load(place, mask=old, other=0.0))
        level = tl.cumsum(-tl.exp(tl.load(a_log + head)) * size, 0)
        past, change = past.to(tl.float32), change.to(tl.float32) * size[:, None]
        direct = tl.load(skip + head)
        for t in range(held, total):
            token = (first + t - held).to(tl.int64)
            line = active + token * (again_width + GROUPS * STATE)
            c = tl.load(line + again_width + group * STATE + n, mask=in_state, other=0.0).to(tl.float32)
            x = tl.load(line + head * HEAD_DIM + p, mask=in_head, other=0.0).to(tl.float32)
            now = tl.sum(tl.where(j == t, level, 0.0), 0)
            near = tl.sum(past * c[None, :], 1) * decay_between(now, level, j <= t)
            y = tl.sum(state * c[:, None], 0) * tl.exp(now) + tl.sum(change * near[:, None], 0) + direct * x
            tl.store(out + token * inner + head * HEAD_DIM + p, y.to(out.dtype.element_ty), mask=in_head)
        settled = tl.load(new_base + row) - behind
        if settled > 0:
            last = tl.sum(tl.where(j == settled - 1, level, 0.0), 0)
            chosen = j < settled
            lines = row_at(tail, slot, again_stride, chosen, AGAIN_FIRST, AGAIN_EACH, again_width)[None, :]
            lines += inner + group * STATE + n[:, None]
            turned = tl.load(again + lines, mask=chosen[None, :] & in_state[:, None], other=0.0)
            change *= decay_between(last, level, chosen)[:, None]
            state = state * tl.exp(last) + exact_rows(turned, change)
            write_blocks = run_of(runs, write_run, row, runs_stride, settled > 0)
            state_at = row_at(write_blocks, head * STATE + n, state_stride, in_state, STATE_FIRST, STATE_EACH, HEAD_DIM)
            whole = in_state[:, None] & in_head[None, :]
            tl.store(states + state_at[:, None] + p[None, :], state.to(states.dtype.element_ty), mask=whole)
        tl.debug_barrier()
        lane, width = tl.arange(0, BLOCK_G), inner // GROUPS
        counter = arrived + row * GROUPS + group
        if tl.atomic_add(counter, 1, sem="acq_rel") == HEADS // GROUPS - 1:
            tl.debug_barrier()
            gain = tl.zeros([BLOCK_G], tl.float32)
            if norm is not None:
                gain += tl.load(norm + group * width + lane, mask=lane < width, other=0.0)
            for t in range(count):
                token = (first + t).to(tl.int64)
                line = out + token * inner + group * width + lane
                y = tl.load(line, mask=lane < width, other=0.0, cache_modifier=".cg").to(tl.float32)
                z = tl.load(projected + token * projected_stride + group * width + lane, mask=lane < width, other=0.0)
                y = gated_group(y, z.to(tl.float32), gain, eps, width, ORDER)
                tl.store(line, y.to(out.dtype.element_ty), mask=lane < width)
            tl.store(counter, 0)


def places_of(cache: StatePages, meta: StateMeta) -> tuple[tuple[Tensor, ...], tuple[int, ...], dict[str, int]]:
    """Views of the pages as states, x | B and dt; strides; constants of the parts' places in a run."""
    parts = dict(zip(("STATE", "AGAIN", "STEP"), (cache.state[0], *cache.tail[:2])))
    views = tuple(cache.pages.view(place.dtype) for place in parts.values())
    found = {f"{name}_FIRST": place.first for name, place in parts.items()}
    found |= {f"{name}_EACH": place.per_page for name, place in parts.items()}
    return views, (meta.runs.stride(0), *(view.stride(0) for view in views)), found


def dims_of(shape: SsdShape) -> dict[str, int]:
    """Sizes that both kernels of Mamba-2 take as constants."""
    dims = {"HEADS": shape.heads, "HEAD_DIM": shape.head_dim, "GROUPS": shape.groups, "STATE": shape.state_size}
    return {**dims, "RING": shape.ring}


@functools.lru_cache(maxsize=64)
def arrivals(count: int, device: torch.device) -> Tensor:
    """Counters [count] int32, zero between launches; launches share them because a stream runs them in order."""
    return torch.zeros(count, dtype=torch.int32, device=device)


def launch_ssd_step(
    active: Tensor,
    projected: Tensor,
    weights: SsdWeights,
    shape: SsdShape,
    cache: StatePages,
    meta: StateMeta,
    out: Tensor,
) -> None:
    """Writes the tokens of short rows into `out` [T, inner]; `active`: the result of `launch_conv`."""
    views, (runs_stride, *strides), found = places_of(cache, meta)
    rows = len(meta.base)
    block_n, block_p = (max(16, triton.next_power_of_2(size)) for size in (shape.state_size, shape.head_dim))
    ssd_step_kernel[shape.heads, rows](
        out, arrivals(rows * shape.groups, out.device), active, projected, weights.a_log, weights.dt_bias, weights.d,
        weights.norm, *views, meta.runs, meta.base_run, meta.write_run, meta.tail_run, meta.base, meta.new_base,
        meta.start, meta.query_start, meta.checkpoint_run, shape.eps, runs_stride, projected.stride(0), *strides,
        **dims_of(shape), ORDER=ORDERS[shape.norm], **found, PLACES=max(16, triton.next_power_of_2(shape.ring)),
        BLOCK_N=block_n, BLOCK_P=block_p, BLOCK_G=triton.next_power_of_2(shape.inner // shape.groups),
        num_warps=max(1, min(8, block_n * block_p // 2048)), **launch_options(),
    )  # fmt: skip
