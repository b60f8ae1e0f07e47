"""Adds up the parts of split decode attention.

    m = max_p m_p;  out = sum_p 2^(m_p - m) o_p / sum_p 2^(m_p - m) l_p

Parts of a row follow each other in the work list; they are added in ascending order, so a row's result does not depend
on its neighbours. Users: engine/kernels/attention/paged, after `attend_parts`.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.target import tl, triton


@triton.jit
def merge_kernel(
    out,  # [num_tokens, num_heads, HEAD_DIM]
    sums,  # float32 [num_items, num_heads, HEAD_DIM]
    stats,  # float32 [num_items, num_heads, 2]
    token_of,  # int32 [num_rows]: the token that takes the row's result; -1: none
    first_item,  # int32 [num_rows + 1]: where the row's parts begin
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One head of one row per program."""
    row, head = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(1)
    token = tl.load(token_of + row).to(tl.int64)
    if token >= 0:
        dim = tl.arange(0, BLOCK_D)
        inside = dim < HEAD_DIM
        best, total = float("-inf"), 0.0
        result = tl.zeros([BLOCK_D], tl.float32)
        for item in range(tl.load(first_item + row), tl.load(first_item + row + 1)):
            slot = (head + item * num_heads).to(tl.int64)
            part_best, part_total = tl.load(stats + slot * 2), tl.load(stats + slot * 2 + 1)
            higher = tl.maximum(best, part_best)
            anchor = tl.where(higher == float("-inf"), 0.0, higher)
            fade, grow = tl.exp2(best - anchor), tl.exp2(part_best - anchor)
            part = tl.load(sums + slot * HEAD_DIM + dim, mask=inside, other=0.0)
            result = result * fade + part * grow
            total = total * fade + part_total * grow
            best = higher
        result = result / tl.where(total > 0, total, 1.0)
        tl.store(out + (token * num_heads + head) * HEAD_DIM + dim, result.to(out.dtype.element_ty), mask=inside)


def merge(out: Tensor, sums: Tensor, stats: Tensor, token_of: Tensor, first_item: Tensor) -> None:
    """Writes the rows' tokens of out [T, Hq, D]; sums [items, Hq, D], stats [items, Hq, 2] float32, the rest int32."""
    heads, dim = out.shape[1], out.shape[2]
    rows = token_of.shape[0]
    assert sums.shape[1:] == (heads, dim) and first_item.shape == (rows + 1,) and out.is_contiguous()
    merge_kernel[(rows, heads)](
        out, sums, stats, token_of, first_item, HEAD_DIM=dim, BLOCK_D=triton.next_power_of_2(dim), num_warps=2
    )


def merge_reference(out: Tensor, sums: Tensor, stats: Tensor, token_of: Tensor, first_item: Tensor) -> None:
    bounds = first_item.tolist()
    for row, token in enumerate(token_of.tolist()):
        if token < 0:
            continue
        best, total = stats[bounds[row] : bounds[row + 1]].double().unbind(-1)  # [parts, num_heads]
        weight = torch.exp2(best - best.amax(0))
        summed = (sums[bounds[row] : bounds[row + 1]].double() * weight[..., None]).sum(0)
        out[token] = (summed / (total * weight).sum(0)[:, None]).to(out.dtype)
