"""Products whose result for a row has the same bits whatever rows come along: y = x W^T (+ bias) (+ residual).

The vendor's library picks its algorithm by the number of rows, and with it the order of every sum. Here tile and order
depend on the weight alone: each output is one chain of matrix-unit steps over k = 0..K-1, never split, and a row that
is not there is zeros in the same tile. Few rows cost what a full tile costs; that is the price.
Users: gemm/dense on accelerators, for weights packed while `set_invariant(True)` holds (--deterministic).
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.overlap import begin, launch_options
from engine.kernels.target import tl, triton

GROUP = 8  # tiles of weight rows that are worked on together, for the cache


@triton.jit(do_not_specialize=["rows"])
def invariant_kernel(
    out,  # [rows, width]
    x,  # [rows, depth], rows x_stride apart
    weight,  # [width, depth]
    bias,  # [width] when BIAS
    residual,  # [rows, width] when RESIDUAL; may be out
    rows,
    width,
    depth,
    x_stride,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,  # depth is a multiple of BLOCK_K
    OVERLAP: tl.constexpr,
):
    """One tile per program: GROUP tiles of weight rows side by side, then the next tokens."""
    program, m_tiles, n_tiles = tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(width, BLOCK_N)
    group = program // (GROUP * m_tiles)
    here = tl.minimum(n_tiles - group * GROUP, GROUP)
    inner = program - group * GROUP * m_tiles
    n = (group * GROUP + inner % here) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = inner // here * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    w_at = weight + n.to(tl.int64)[:, None] * depth + k[None, :]
    x_at = x + m.to(tl.int64)[None, :] * x_stride + k[:, None]
    n_in, m_in = (n < width)[:, None], (m < rows)[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    begin(OVERLAP)
    for first in range(0, depth, BLOCK_K):
        w_mask, x_mask = n_in, m_in
        if not EVEN:
            k_in = first + k < depth
            w_mask, x_mask = n_in & k_in[None, :], m_in & k_in[:, None]
        tokens = tl.load(x_at, mask=x_mask, other=0.0)
        sums = tl.dot(tl.load(w_at, mask=w_mask, other=0.0), tokens, sums, input_precision="ieee")
        w_at += BLOCK_K
        x_at += BLOCK_K
    inside = n_in & m_in
    if BIAS:
        sums += tl.load(bias + n, mask=n < width, other=0.0).to(tl.float32)[:, None]
    target = m.to(tl.int64)[None, :] * width + n[:, None]
    if RESIDUAL:
        sums += tl.load(residual + target, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + target, sums.to(out.dtype.element_ty), mask=inside)


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> None:
    """x [M, K] with contiguous rows times weight [N, K] into out [M, N]; bias [N]; residual [M, N], may be out itself.

    All of one dtype, contiguous but for x. Capturable.
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
    block_m, block_n, block_k, stages, warps = tile_of(width, x.element_size())
    invariant_kernel[(triton.cdiv(rows, block_m) * triton.cdiv(width, block_n),)](
        out, x, weight, out if bias is None else bias, out if residual is None else residual,
        rows, width, depth, x.stride(0), BIAS=bias is not None, RESIDUAL=residual is not None,
        GROUP=GROUP, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, EVEN=depth % block_k == 0,
        num_warps=warps, num_stages=stages, **launch_options(),
    )  # fmt: skip


def tile_of(width: int, size: int) -> tuple[int, int, int, int, int]:
    """(tokens, weight rows, columns, stages, warps) of a tile, from the weight alone: never from the number of rows."""
    if size != 2:
        return 64, 64, 32, 2, 4
    return (128, 128, 64, 3, 8) if width >= 8192 else (64, 64, 128, 3, 4)


def invariant_linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor
) -> None:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = torch.nn.functional.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
    out.copy_(y if residual is None else y + residual)
