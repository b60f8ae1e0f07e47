"""Gated convolution over a sequence's last tokens, which are in a paged cache (LFM2).

    projected  [T, 3 H]: b | c | x of each token
    stored     b * x, at the token's place in the cache
    out        c * (bias + sum over j of taps[j] * stored value of the token j places before); 0 before the first token

b * x is rounded to the cache's dtype before any use, so a token's bits do not depend on whether earlier tokens are
in this step or in the cache. Sums are float32. Users: engine/layers/convolution.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.meta import AttentionMeta
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import tl, triton

COLUMNS = 256  # columns per program
TOKENS = 8  # tokens per program in steps with many tokens


@triton.jit(do_not_specialize=["num_rows"])
def convolution_kernel(
    out,  # [T, width]
    projected,  # [T, 3 * width]
    cache,  # [num_blocks, BLOCK_SIZE, width], blocks block_stride apart
    taps,  # [TAPS, width] float32
    bias,  # [width] float32, or None
    query_start,  # [num_rows + 1]
    context_len,  # [num_rows]
    table_row,  # [num_rows], or None: line r
    block_tables,  # [lines, max_blocks]
    slot_mapping,  # [T]
    num_rows,
    width,
    max_blocks,
    block_stride,
    BLOCK_SIZE: tl.constexpr,
    TAPS: tl.constexpr,
    STEPS: tl.constexpr,  # 2 ** STEPS >= num_rows
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes TOKENS tokens and COLUMNS columns; each token finds its row by bisection of query_start."""
    grid_wait(OVERLAP)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here, inside = token < tl.load(query_start + num_rows), column < width
    row = tl.zeros([TOKENS], tl.int32)  # the last row that begins at or before the token
    for step in tl.static_range(STEPS):
        next_row = row + (1 << (STEPS - 1 - step))
        begin = tl.load(query_start + next_row, mask=here & (next_row < num_rows), other=0x7FFFFFFF)
        row = tl.where(begin <= token, next_row, row)
    start = tl.load(query_start + row, mask=here, other=0)
    end = tl.load(query_start + row + 1, mask=here, other=0)
    position = tl.load(context_len + row, mask=here, other=0) - end + token
    line = row
    if table_row is not None:
        line = tl.load(table_row + row, mask=here, other=0)
    line = line.to(tl.int64) * max_blocks
    both = here[:, None] & inside[None, :]
    at = projected + token.to(tl.int64)[:, None] * (3 * width) + column[None, :]
    total = tl.zeros([TOKENS, COLUMNS], tl.float32)
    if bias is not None:
        total += tl.load(bias + column, mask=inside, other=0.0)[None, :]
    for tap in tl.static_range(TAPS):
        own = (here & (token - tap >= start))[:, None] & inside[None, :]
        gate = tl.load(at - tap * 3 * width, mask=own, other=0.0).to(tl.float32)
        value = tl.load(at - tap * 3 * width + 2 * width, mask=own, other=0.0).to(tl.float32)
        value = (gate * value).to(cache.dtype.element_ty)
        if tap == 0:
            slot = tl.load(slot_mapping + token, mask=here, other=-1)
            place = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * width
            tl.store(cache + place[:, None] + column[None, :], value, mask=own & (slot >= 0)[:, None])
        else:
            behind = position - tap
            held = here & (token - tap < start) & (behind >= 0)
            block = tl.load(block_tables + line + behind // BLOCK_SIZE, mask=held, other=0).to(tl.int64)
            place = block * block_stride + behind % BLOCK_SIZE * width
            held = held[:, None] & inside[None, :]
            value = tl.where(held, tl.load(cache + place[:, None] + column[None, :], mask=held, other=0.0), value)
        weight = tl.load(taps + tap * width + column, mask=inside, other=0.0)
        total += value.to(tl.float32) * weight[None, :]
    carry = tl.load(at + width, mask=both, other=0.0).to(tl.float32)
    place = out + token.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(place, (carry * total).to(out.dtype.element_ty), mask=both)


def gated_convolution(
    projected: Tensor, taps: Tensor, bias: Tensor | None, cache: Tensor, meta: AttentionMeta
) -> Tensor:
    """projected [T, 3 H], taps [L, H] and bias [H] float32, cache [num_blocks, block_size, H] (written) -> [T, H], new.

    taps[0] is the token's own factor. T may exceed the tokens of `meta`: tokens without a row are not written.
    """
    convolve = launch_convolution if projected.is_cuda else gated_convolution_reference
    return convolve(projected, taps, bias, cache, meta)


def launch_convolution(
    projected: Tensor, taps: Tensor, bias: Tensor | None, cache: Tensor, meta: AttentionMeta
) -> Tensor:
    """The Triton kernel."""
    tokens, width = len(projected), taps.shape[1]
    rows, (_, block_size, held) = len(meta.context_len), cache.shape
    assert projected.shape == (tokens, 3 * width), f"{list(projected.shape)}: three times {width} columns were due"
    assert projected.is_contiguous(), "the products must be contiguous"
    assert held == width, f"the cache has {held} columns, the taps {width}"
    assert cache.stride()[1:] == (width, 1), f"a block's numbers are apart: strides {cache.stride()}"
    assert cache.dtype is projected.dtype, f"the cache has {cache.dtype}, the products {projected.dtype}"
    out = projected.new_empty(tokens, width)
    each = 1 if tokens <= 64 else TOKENS
    grid = (triton.cdiv(tokens, each), triton.cdiv(width, COLUMNS))
    convolution_kernel[grid](
        out, projected, cache, taps, bias, meta.query_start, meta.context_len, meta.table_row, meta.block_tables,
        meta.slot_mapping, rows, width, meta.block_tables.shape[1], cache.stride(0), BLOCK_SIZE=block_size,
        TAPS=len(taps), STEPS=max(1, (rows - 1).bit_length()), TOKENS=each, COLUMNS=COLUMNS, num_warps=4,
        **launch_options(),
    )  # fmt: skip
    return out


def gated_convolution_reference(
    projected: Tensor, taps: Tensor, bias: Tensor | None, cache: Tensor, meta: AttentionMeta
) -> Tensor:
    count, rows, size = int(meta.query_start[-1]), len(meta.context_len), cache.shape[1]
    gate, carry, x = projected[:count].chunk(3, 1)
    slots = meta.slot_mapping[:count]
    named = slots >= 0
    cache[slots[named] // size, slots[named] % size] = (gate * x)[named].to(cache.dtype)
    lens = meta.query_start.diff()
    row = torch.repeat_interleave(torch.arange(rows), lens)
    position = (meta.context_len - meta.query_start[1:])[row] + torch.arange(count)
    line = row if meta.table_row is None else meta.table_row[row].long()
    wide = torch.promote_types(projected.dtype, torch.float32)
    total = torch.zeros(count, taps.shape[1], dtype=wide) if bias is None else bias.to(wide).repeat(count, 1)
    for tap, weight in enumerate(taps.to(wide)):
        behind = (position - tap).clamp(min=-1)
        block = meta.block_tables[line, behind.clamp(min=0) // size].long()
        held = cache[block, behind.clamp(min=0) % size].to(wide)
        total += torch.where(behind[:, None] >= 0, held * weight, 0.0)
    out = projected.new_zeros(len(projected), taps.shape[1])
    out[:count] = (carry.to(wide) * total).to(out.dtype)
    return out
