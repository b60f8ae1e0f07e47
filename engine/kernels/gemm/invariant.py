"""Products whose bits for a row do not depend on other rows: y = x W^T (+ bias) (+ residual).

The vendor's library chooses its algorithm, and so the order of sums, by the number of rows. Here tile, parts and order
depend only on the weight: columns are divided into parts, each output is one chain of matrix-unit steps per part, and
the parts are added in their order. With few rows each part is a separate program, and the program that arrives last
adds up the parts (as in gemm/split_k); with many rows one program computes the parts in sequence, with equal bits.
Missing rows of a tile are zeros.
Users: layers of accelerators with --deterministic, whose weights have this form.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.gemm.split_k import arrivals
from engine.kernels.gemm.weight import Weight, rows_of
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import tl, triton

GROUP = 8  # tiles of weight rows that are processed together, for the cache
UNITS = 128  # target of programs per product; equal on all cards, because bits depend on the parts


class Tile(NamedTuple):
    """How a product is divided, for any number of rows."""

    block_m: int  # tokens
    block_n: int  # weight rows
    block_k: int  # columns read at a time
    part_len: int  # columns of a part
    stages: int
    warps: int


@dataclass(frozen=True, slots=True, eq=False)
class InvariantWeight(Weight):
    """The float weight of one layer."""

    weight: Tensor  # [out_features, in_features], contiguous
    bias: Tensor | None  # [out_features] of the weight's dtype

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def dense(self) -> Tensor:
        return self.weight

    def dense_bias(self) -> Tensor | None:
        return self.bias

    def linear(self, x: Tensor, out: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        rows, width = rows_of(x, self.weight), len(self.weight)
        y = rows.new_empty(len(rows), width) if out is None else out.view(-1, width)
        added = None if residual is None else residual.view(-1, width)
        invariant_linear(rows, self.weight, self.bias, added, y)
        return y.view(*x.shape[:-1], width) if out is None else out


@triton.jit(do_not_specialize=["rows"])
def invariant_kernel(
    out,  # [rows, width]
    partial,  # [tiles, parts, BLOCK_N, BLOCK_M] float32 when APART
    arrived,  # [MAX_TILES] int32 when APART; zero before and after
    x,  # [rows, depth], rows x_stride apart
    weight,  # [width, depth]
    bias,  # [width] when BIAS
    residual,  # [rows, width] when RESIDUAL; may be out
    rows,
    width,
    depth,
    x_stride,
    parts,
    part_len,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    APART: tl.constexpr,  # one part per program
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,  # depth is a multiple of BLOCK_K
    OVERLAP: tl.constexpr,
):
    """A program computes one tile: all parts of its depth, or one part. Programs take GROUP tiles of weight rows first,
    then the next tokens."""
    program, m_tiles, n_tiles = tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(width, BLOCK_N)
    group = program // (GROUP * m_tiles)
    here = tl.minimum(n_tiles - group * GROUP, GROUP)
    inner = program - group * GROUP * m_tiles
    n = (group * GROUP + inner % here) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = inner // here * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    n_in, m_in = (n < width)[:, None], (m < rows)[None, :]
    first_part = tl.program_id(1)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    grid_wait(OVERLAP)
    for part in range(first_part, first_part + 1 if APART else parts):
        start = part * part_len
        w_at = weight + n.to(tl.int64)[:, None] * depth + start + k[None, :]
        x_at = x + m.to(tl.int64)[None, :] * x_stride + start + k[:, None]
        sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for first in range(start, tl.minimum(start + part_len, depth), BLOCK_K):
            w_mask, x_mask = n_in, m_in
            if not EVEN:
                k_in = first + k < depth
                w_mask, x_mask = n_in & k_in[None, :], m_in & k_in[:, None]
            tokens = tl.load(x_at, mask=x_mask, other=0.0)
            sums = tl.dot(tl.load(w_at, mask=w_mask, other=0.0), tokens, sums, input_precision="ieee")
            w_at += BLOCK_K
            x_at += BLOCK_K
        total += sums
    last = True
    if APART:
        size: tl.constexpr = BLOCK_N * BLOCK_M
        mine = partial + (program * parts).to(tl.int64) * size
        mine += tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        tl.store(mine + first_part * size, total, mask=m_in)
        tl.debug_barrier()  # every thread's part is written before the arrival is counted
        last = tl.atomic_add(arrived + program, 1, sem="acq_rel") == parts - 1
        if last:
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for part in range(parts):
                total += tl.load(mine + part * size, mask=m_in, other=0.0, cache_modifier=".cg")
            tl.store(arrived + program, 0)
    if last:
        inside = n_in & m_in
        if BIAS:
            total += tl.load(bias + n, mask=n < width, other=0.0).to(tl.float32)[:, None]
        target = m.to(tl.int64)[None, :] * width + n[:, None]
        if RESIDUAL:
            total += tl.load(residual + target, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + target, total.to(out.dtype.element_ty), mask=inside)


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> None:
    """x [M, K] with contiguous rows times weight [N, K] into out [M, N]; bias [N]; residual [M, N], may be out itself.

    All tensors have the same dtype; all but x are contiguous. Capture works after `arrivals` was called on the device.
    """
    if x.is_cuda:
        launch_invariant(x, weight, bias, residual, out)
    else:
        invariant_linear_reference(x, weight, bias, residual, out)


def launch_invariant(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> None:
    """The Triton kernel; arguments as `invariant_linear`."""
    rows, depth = x.shape
    width = weight.shape[0]
    assert x.stride(1) == 1 and weight.is_contiguous() and out.is_contiguous() and out.shape == (rows, width)
    assert weight.shape[1] == depth, f"x has {depth} features; this layer takes {weight.shape[1]}"
    if rows == 0:
        return
    tile = tile_of(width, depth, x.element_size())
    tiles, parts = triton.cdiv(rows, tile.block_m) * triton.cdiv(width, tile.block_n), triton.cdiv(depth, tile.part_len)
    apart = parts > 1 and tiles < UNITS
    partial = out
    if apart:
        size = tiles * parts * tile.block_m * tile.block_n
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
    invariant_kernel[(tiles, parts if apart else 1)](
        out, partial, arrivals(x.device) if apart else out, x, weight, out if bias is None else bias,
        out if residual is None else residual, rows, width, depth, x.stride(0), parts, tile.part_len,
        BIAS=bias is not None, RESIDUAL=residual is not None, APART=apart, GROUP=GROUP, BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, EVEN=depth % tile.block_k == 0,
        num_warps=tile.warps, num_stages=tile.stages, **launch_options(),
    )  # fmt: skip


def tile_of(width: int, depth: int, size: int) -> Tile:
    """The tile for a weight [width, depth] of `size` bytes per value; it does not depend on the number of rows."""
    block_m, block_n, block_k, stages, warps = (128, 128, 64, 3, 8) if size == 2 else (64, 64, 32, 2, 4)
    parts = max(1, min(UNITS // triton.cdiv(width, block_n), depth // 512))
    part_len = triton.cdiv(triton.cdiv(depth, parts), block_k) * block_k
    return Tile(block_m, block_n, block_k, part_len, stages, warps)


def invariant_linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor
) -> None:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = torch.nn.functional.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
    out.copy_(y if residual is None else y + residual)
