"""Products of few rows (1 to 64), split along the summed axis: y = x W^T (+ bias) (+ residual), or silu(gate) * up.

A product of few rows reads every weight once and computes next to nothing, so all units must be reading all the time.
A small output has fewer tiles than the card has units: its sums are cut into parts, one program each. A program leaves
its partial sums in float32 behind; the one that arrives last adds them up in their order, so the result does not
depend on who was last. Weight rows are the tile's long side (a matrix unit wants 64), tokens its short one.

An RMSNorm between two such products needs no kernel: the first, which adds to the residual stream, also leaves the rows
times the norm's gain and the squares of each tile behind (`Unscaled`); the second multiplies those rows and divides its
sums by the root, since (r / rms * gain) W^T = (r * gain) W^T / rms.
Users: gemm/dense on accelerators, for the shapes that kernels/tune.py names.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.overlap import begin, launch_options, overlaps
from engine.kernels.target import tl, triton

MAX_ROWS = 64
AHEAD = 4  # lines of each weight row that a program fetches while the kernel before it still runs
MAX_SQUARES = 1 << 13  # that a program adds up: 64 registers of each thread
MAX_TILES = 1 << 14  # tiles of weight rows that one launch may have when it is split


class Split(NamedTuple):
    """How a product of few rows is cut."""

    block_n: int  # weight rows of a tile; of a gated product as many of gate and of up
    block_k: int  # columns read at a time
    splits: int  # programs that share a tile's sum
    stages: int  # loads in flight
    warps: int


class Unscaled(NamedTuple):
    """Rows r that a product left for the norm after it, all but divided by their root mean square."""

    rows: Tensor  # [M, K] r * gain, rounded as the norm would
    squares: Tensor  # [parts, M] float32: sums of r^2 over the columns of each tile
    gain: Tensor  # [K] float32
    eps: float


@triton.jit
def fetch(address, inside):
    """Brings lines into the second-level cache; nobody waits for them. [lines] pointers of 2-byte values."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ne.s32 p, $2, 0;
        @p prefetch.global.L2 [$1];
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [address, inside.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def fetch_ahead(weight, n, width, depth, start, GATED: tl.constexpr, AHEAD: tl.constexpr):
    """Asks for AHEAD lines of the weight rows n, from column `start` on."""
    if AHEAD:
        line = start + tl.arange(0, AHEAD) * 64
        inside = (n < width)[:, None] & (line < depth)[None, :]
        fetch(weight + n.to(tl.int64)[:, None] * depth + line[None, :], inside)
        if GATED:
            fetch(weight + (n.to(tl.int64) + width)[:, None] * depth + line[None, :], inside)


@triton.jit(do_not_specialize=["rows", "splits"])
def split_kernel(
    out,  # [rows, width]
    gained,  # [rows, width] out * gain when AFTER
    counted,  # [tiles, rows] float32 when AFTER
    partial,  # [tiles, splits, 1 or 2 when GATED, BLOCK_N, BLOCK_M] float32 when SPLIT
    arrived,  # [MAX_TILES] int32 when SPLIT; zero before and after
    x,  # [rows, depth], rows x_stride apart
    weight,  # [width, depth]; when GATED [2 * width, depth]
    bias,  # [width] or [2 * width] when BIAS
    residual,  # [rows, width] when RESIDUAL; may be out
    gain,  # [width] float32 when AFTER
    squares,  # [parts, rows] float32 when PARTS
    rows,
    width,
    depth,
    x_stride,
    splits,
    part_len,  # columns of a split, a multiple of BLOCK_K
    parts,
    eps,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    SPLIT: tl.constexpr,
    PARTS: tl.constexpr,  # 0: x is multiplied as it is; else it is Unscaled: power of two >= parts
    AFTER: tl.constexpr,  # out is left Unscaled for a norm
    BLOCK_M: tl.constexpr,  # power of two >= rows
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,  # depth is a multiple of BLOCK_K
    AHEAD: tl.constexpr,  # lines of 128 bytes of each weight row that are asked for before the rows are there
    OVERLAP: tl.constexpr,
):
    """One tile of weight rows and one part of the columns per program."""
    tile, split = tl.program_id(0), tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = split * part_len + tl.arange(0, BLOCK_K)
    w_at = weight + n.to(tl.int64)[:, None] * depth + k[None, :]
    u_at = weight + (n.to(tl.int64) + width)[:, None] * depth + k[None, :]  # of no use but when GATED
    x_at = x + m.to(tl.int64)[None, :] * x_stride + k[:, None]
    n_in, m_in = (n < width)[:, None], (m < rows)[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    fetch_ahead(weight, n, width, depth, split * part_len, GATED, AHEAD)
    begin(OVERLAP)
    if PARTS:  # asked for here, needed at the end
        piece = tl.arange(0, PARTS)[:, None]
        square = tl.load(squares + piece * rows + m[None, :], mask=(piece < parts) & m_in, other=0.0)
    for first in range(split * part_len, tl.minimum((split + 1) * part_len, depth), BLOCK_K):
        w_mask, x_mask = n_in, m_in
        if not EVEN:
            k_in = first + tl.arange(0, BLOCK_K) < depth
            w_mask, x_mask = n_in & k_in[None, :], m_in & k_in[:, None]
        tokens = tl.load(x_at, mask=x_mask, other=0.0)
        sums = tl.dot(tl.load(w_at, mask=w_mask, other=0.0), tokens, sums, input_precision="ieee")
        if GATED:
            ups = tl.dot(tl.load(u_at, mask=w_mask, other=0.0), tokens, ups, input_precision="ieee")
            u_at += BLOCK_K
        w_at += BLOCK_K
        x_at += BLOCK_K
    last = True
    if SPLIT:
        size: tl.constexpr = BLOCK_N * BLOCK_M * (2 if GATED else 1)
        place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        mine = partial + (tile * splits).to(tl.int64) * size + place
        tl.store(mine + split * size, sums)
        if GATED:
            tl.store(mine + split * size + BLOCK_N * BLOCK_M, ups)
        tl.debug_barrier()  # every thread's part is written before the arrival is told
        last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == splits - 1
        if last:
            sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            ups = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for part in range(splits):
                sums += tl.load(mine + part * size, cache_modifier=".cg")
                if GATED:
                    ups += tl.load(mine + part * size + BLOCK_N * BLOCK_M, cache_modifier=".cg")
            tl.store(arrived + tile, 0)
    if last:
        inside = n_in & m_in
        if PARTS:
            scale = 1.0 / tl.sqrt_rn(tl.sum(square, 0) / depth + eps)
            sums *= scale[None, :]
            ups *= scale[None, :]
        if BIAS:
            sums += tl.load(bias + n, mask=n < width, other=0.0).to(tl.float32)[:, None]
        if GATED:
            if BIAS:
                ups += tl.load(bias + width + n, mask=n < width, other=0.0).to(tl.float32)[:, None]
            sums = sums / (1.0 + tl.exp(-sums)) * ups
        target = m.to(tl.int64)[None, :] * width + n[:, None]
        if RESIDUAL:
            sums += tl.load(residual + target, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + target, sums.to(out.dtype.element_ty), mask=inside)
        if AFTER:
            kept = tl.where(inside, sums.to(out.dtype.element_ty).to(tl.float32), 0.0)
            tl.store(counted + tile * rows + m, tl.sum(kept * kept, 0), mask=m < rows)
            gains = tl.load(gain + n, mask=n < width, other=0.0)
            tl.store(gained + target, (kept * gains[:, None]).to(out.dtype.element_ty), mask=inside)


def split_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    gated: bool,
    cut: Split,
    before: Unscaled | None = None,
    after: Unscaled | None = None,
) -> None:
    """x [M, K] with contiguous rows, M <= 64, times weight [N, K] into out [M, N]; gated: weight [2N, K], gate first.

    bias [N] (gated: [2N]); residual [M, N], contiguous, may be out itself. All of one dtype. With `before`, x is its
    rows; `after`, from `room_after`, is filled with what the norm of out needs. Capturable once `arrivals` was called
    on the device.
    """
    launch = launch_split if x.is_cuda else split_linear_reference
    launch(x, weight, bias, residual, out, gated, cut, before, after)


def room_after(out: Tensor, cut: Split, gain: Tensor, eps: float) -> Unscaled | None:
    """Where a product into out [M, N] leaves its rows Unscaled; None where the one after it had too much to add up."""
    rows, width = out.shape
    parts = -(-width // cut.block_n)
    if padded(parts, 1) * padded(rows, 16) > MAX_SQUARES:
        return None
    squares = torch.empty(parts, rows, dtype=torch.float32, device=out.device)
    return Unscaled(torch.empty_like(out), squares, gain, eps)


def padded(count: int, least: int) -> int:
    """A tile's side: the power of two that holds `count`."""
    return max(least, 1 << (count - 1).bit_length())


def launch_split(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    gated: bool,
    cut: Split,
    before: Unscaled | None = None,
    after: Unscaled | None = None,
) -> None:
    """The Triton kernel; arguments as `split_linear`."""
    rows, depth = x.shape
    width = out.shape[1]
    assert rows <= MAX_ROWS and x.stride(1) == 1 and weight.is_contiguous() and out.is_contiguous()
    assert weight.shape == (2 * width if gated else width, depth), f"{tuple(weight.shape)} times {tuple(x.shape)}"
    assert after is None or (after.gain.shape == (width,) and after.rows.is_contiguous() and not gated)
    block_m = padded(rows, 16)
    tiles, steps = triton.cdiv(width, cut.block_n), triton.cdiv(depth, cut.block_k)
    part_len = triton.cdiv(steps, cut.splits) * cut.block_k
    splits = triton.cdiv(depth, part_len)  # none of them empty
    assert splits == 1 or tiles <= MAX_TILES
    partial = out
    if splits > 1:
        size = tiles * splits * cut.block_n * block_m * (2 if gated else 1)
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
    parts = 0 if before is None else len(before.squares)
    split_kernel[(tiles, splits)](
        out, out if after is None else after.rows, out if after is None else after.squares, partial,
        arrivals(x.device) if splits > 1 else out, x, weight, out if bias is None else bias,
        out if residual is None else residual, out if after is None else after.gain,
        out if before is None else before.squares, rows, width, depth, x.stride(0), splits, part_len,
        parts, 0.0 if before is None else before.eps,
        BIAS=bias is not None, RESIDUAL=residual is not None, GATED=gated, SPLIT=splits > 1,
        PARTS=padded(parts, 1) if parts else 0, AFTER=after is not None,
        BLOCK_M=block_m, BLOCK_N=cut.block_n, BLOCK_K=cut.block_k, EVEN=depth % cut.block_k == 0,
        AHEAD=AHEAD if overlaps() else 0, **launch_options(),
        num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip


def split_linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    gated: bool,
    cut: Split,
    before: Unscaled | None = None,
    after: Unscaled | None = None,
) -> None:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    x = x.to(wide)
    if before is not None:
        x = x * torch.rsqrt(before.squares.sum(0) / x.shape[1] + before.eps)[:, None]
    y = torch.nn.functional.linear(x, weight.to(wide), None if bias is None else bias.to(wide))
    if gated:
        gate, up = y.chunk(2, dim=1)
        y = torch.nn.functional.silu(gate) * up
    out.copy_(y if residual is None else y + residual)
    if after is not None:
        after.rows.copy_(out.to(wide) * after.gain)
        after.squares.zero_()[0] = out.to(wide).square().sum(1)


@functools.cache
def arrivals(device: torch.device) -> Tensor:
    """How many programs of each tile are done, [MAX_TILES] int32: zero between launches, so one serves them all.

    Launches that share it must follow each other on one stream. The first call allocates: before any capture.
    """
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
