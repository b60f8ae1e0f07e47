"""Attention of query tiles over the paged cache: prompts, chunks, and with invariant lists every row.

A tile has BLOCK_M lines: consecutive tokens of one row times the query heads that share one KV head, so a loaded key
serves all of them. Blocks of keys that all tokens of the tile see need no mask; blocks on the diagonal and at a
window's edge are masked. Tiles come from the step's work list (work.py), tiles with the most keys first. The list is on
the device, so that a launch depends only on shapes and can be captured in a graph. Users:
engine/kernels/attention/paged on accelerators.
"""

from __future__ import annotations

from torch import Tensor

from engine.attention.meta import WorkList
from engine.kernels.attention.attend import (
    attend_keys,
    materialised,
    powers,
    scaled,
    score_scales,
    softmax_init_with_sinks,
)
from engine.kernels.attention.tiles import WIDE_HEAD, tile_lines, tile_tokens
from engine.kernels.float8 import as_bytes, codes_of
from engine.kernels.pages import Scales, is_wide, stride_of
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import Target, target, tl, triton


@triton.jit
def prefill_kernel(
    out,  # [num_tokens, num_heads, HEAD_DIM]
    q,  # [num_tokens, num_heads, HEAD_DIM]
    k_cache,  # [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
    v_cache,
    k_scale,  # scales of codes: float32 [num_blocks, num_kv_heads, BLOCK_SIZE] or [num_kv_heads]; or None
    v_scale,
    block_tables,  # [lines, max_blocks] int32
    sinks,  # [num_heads] float32, or None
    last_keys,  # [num_tokens] int32: see AttentionMeta; None: each token sees up to itself
    tiles,  # [num_tiles, 4] int32: first token, tokens, position of the first token, line of the block tables
    num_tiles,  # [1] int32
    max_blocks,
    block_stride,  # stride between blocks of the caches, in elements; a block is contiguous
    scale_stride,  # stride between blocks of k_scale and v_scale; 0: one scale per head
    scale,
    bend,
    WINDOW: tl.constexpr,  # 0: none; below 0: chunks
    SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,  # power of two >= HEAD_DIM
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
    MATERIALISE: tl.constexpr,
    CODES: tl.constexpr,  # a constant of float8.py
    MADE: tl.constexpr,  # scales are per token
    FOLD: tl.constexpr,  # with MADE: scales multiply keys and values
    FIRST: tl.constexpr,  # earlier keys are hidden, as by a window that does not move, and never loaded
    OVERLAP: tl.constexpr,
):
    grid_wait(OVERLAP)
    SPAN: tl.constexpr = -WINDOW if WINDOW < 0 else WINDOW if WINDOW > 0 or FIRST == 0 else 1
    kv_head = tl.program_id(0)
    num_kv_heads = tl.num_programs(0)
    line = tl.arange(0, BLOCK_M)
    k_head = k_cache + kv_head * BLOCK_SIZE * HEAD_DIM
    v_head = v_cache + kv_head * BLOCK_SIZE * HEAD_DIM
    tile = tl.program_id(1)
    if tile < tl.load(num_tiles):
        token = tl.load(tiles + tile * 4)
        tokens = tl.load(tiles + tile * 4 + 1)
        first = tl.load(tiles + tile * 4 + 2)
        table = block_tables + tl.load(tiles + tile * 4 + 3).to(tl.int64) * max_blocks
        position = first + tl.minimum(line // GROUP, tokens - 1)
        where, inside = places(token, tokens, line, kv_head, num_kv_heads, GROUP, HEAD_DIM, BLOCK_D)
        query = tl.load(q + where, mask=inside, other=0.0)
        factor, curve = scale, bend
        if CODES:
            query, power = in_half(query, out + where, inside)
            factor, curve = scaled(scale, bend, power, SOFTCAP)
        best = tl.full([BLOCK_M], -1e30, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if sinks is not None:
            best, total = softmax_init_with_sinks(sinks, kv_head * GROUP + line % GROUP, line < tokens * GROUP)
        result = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        end = first + tokens  # one past the last position of the tile
        low = end * 0
        floor = tl.maximum(low, first - WINDOW + 1)
        newest = position
        seen = first
        if last_keys is not None:
            # last_keys never decrease along a row, so the values of the tile's first and last token bound the others.
            last = tl.load(last_keys + token + tl.minimum(line // GROUP, tokens - 1))
            newest = tl.where(last < 0, WINDOW - 1, position)
            position = tl.where(last < 0, -1 - last, last)
            last = tl.load(last_keys + token)
            floor = tl.where(last < 0, 0, floor)
            seen = tl.where(last < 0, -1 - last, last)
            last = tl.load(last_keys + token + tokens - 1)
            end = tl.where(last < 0, -last, last + 1)
        if WINDOW < 0:  # a chunk is a window that ends with the chunk
            floor = first // -WINDOW * -WINDOW
            newest = position // -WINDOW * -WINDOW - WINDOW - 1
        if FIRST > 0:
            newest = tl.maximum(newest if WINDOW != 0 else position * 0, FIRST + SPAN - 1)
            floor = tl.maximum(floor if WINDOW != 0 else low, FIRST)
        if SPAN != 0:
            low = floor // BLOCK_N * BLOCK_N
        seen = (seen + 1) // BLOCK_N * BLOCK_N  # keys that the first token sees
        if WINDOW < 0:
            seen = low  # the tile's lines may begin with different keys
        best, total, result = attend_keys(
            query, None, None, position, newest, best, total, result, k_head, v_head, table, None, low, seen, floor,
            end, k_scale, v_scale, scale_stride, kv_head, block_stride, factor, curve, True, SPAN, SOFTCAP, HEAD_DIM,
            BLOCK_SIZE, BLOCK_N, BLOCK_D, WIDE, STAGES, MATERIALISE, None, 0, CODES, MADE, FOLD,
        )  # fmt: skip
        # Lines and offsets are computed again here, because the loop has no registers to hold them.
        token = tl.load(tiles + tile * 4, volatile=True)
        tokens = tl.load(tiles + tile * 4 + 1, volatile=True)
        if MATERIALISE:
            line = materialised(line)
        where, inside = places(token, tokens, line, kv_head, num_kv_heads, GROUP, HEAD_DIM, BLOCK_D)
        if FIRST > 0:
            total = tl.maximum(total, 1e-30)  # a token before FIRST sees no key
        result = result / total[:, None]
        tl.store(out + where, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def in_half(query, scratch, inside):
    """Queries -> float16, divided by a power of two, unless they are float32; and the power of each line.

    The queries are stored to `scratch`, the result's memory, and loaded again: only loaded operands can be in shared
    memory, and queries in registers would leave too few for the rest.
    """
    power, over = powers(tl.max(tl.abs(query.to(tl.float32)), 1))
    query = query.to(tl.float32) * over[:, None]
    if scratch.dtype.element_ty != tl.float32:
        scratch = scratch.to(tl.pointer_type(tl.float16))
        tl.store(scratch, query.to(tl.float16), mask=inside)
        tl.debug_barrier()
        query = tl.load(scratch, mask=inside, other=0.0)
    return query, power


@triton.jit
def places(
    token,
    tokens,
    line,
    kv_head,
    num_kv_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Offsets of a tile's lines in q and out, and the mask of valid elements."""
    dim = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + line % GROUP
    where = ((token + line // GROUP).to(tl.int64) * (num_kv_heads * GROUP) + head) * HEAD_DIM
    return where[:, None] + dim[None, :], (line < tokens * GROUP)[:, None] & (dim < HEAD_DIM)[None, :]


def attend_tiles(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    work: WorkList,
    rows: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scales: Scales | None = None,
    last_keys: Tensor | None = None,
    first_key: int = 0,
) -> None:
    """Computes the work list's tiles into out [T, Hq, D]; shapes as `paged_attention`, `rows` bounds the grid."""
    tokens, heads, dim = q.shape
    _, kv_heads, block_size, _ = k_cache.shape
    group = heads // kv_heads
    codes, block_d = codes_of(k_cache, target()), max(16, triton.next_power_of_2(dim))
    programs = tokens // tile_tokens(group, dim) * kv_heads
    large = codes > 0 and work.large_tiles is not None and takes_large(target(), block_d, q.element_size(), programs)
    block_n, options = tuned(target(), block_d, q.element_size(), programs, large)
    tiles, num_tiles = (work.large_tiles, work.num_large_tiles) if large else (work.tiles, work.num_tiles)
    block_m = tile_lines(group, dim, large)
    full = tokens // (block_m // group)
    scale, bend = score_scales(scale, softcap)
    made = stride_of(scales) > 0
    # Upper bound of the tiles for these shapes: full tiles, and one partial tile per row.
    prefill_kernel[(kv_heads, min(tokens, full + rows))](
        out, q, as_bytes(k_cache), as_bytes(v_cache), *(scales or (None, None)), block_tables, sinks, last_keys,
        tiles, num_tiles, block_tables.shape[1], k_cache.stride(0), stride_of(scales), scale, bend,
        WINDOW=window, SOFTCAP=softcap > 0, GROUP=group, HEAD_DIM=dim, BLOCK_SIZE=block_size,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d, WIDE=is_wide(k_cache),
        STAGES=options["num_stages"], MATERIALISE=target().arch == "sm_90",
        CODES=codes, MADE=made,
        FOLD=made and target().arch != "sm_100",  # Triton 3.6 to 3.9 do not compile it there
        FIRST=first_key,
        **options, **launch_options(),
    )  # fmt: skip


def takes_large(device: Target, block_d: int, element_size: int, programs: int) -> bool:
    """Whether half as many programs, with tiles twice as large, would still fill the device.

    Microseconds of FP8 pages on one H100, 128 lines and LARGE: a prompt of 2,048 tokens 111.9 and 97.3, of 8,192 1,490
    and 1,241, but 512 tokens after 7,680 cached tokens 229 and 311.
    """
    return block_d <= 128 and element_size <= 2 and 2 * programs > 5 * device.num_units


def tuned(
    device: Target, block_d: int, element_size: int, programs: int, large: bool = False
) -> tuple[int, dict[str, int]]:
    """(keys per block, launch options). The block size affects a token's bits, so it does not depend on the launch's
    size.

    The number of a tile's lines does not affect bits, because each line is computed independently.
    """
    if block_d > WIDE_HEAD:  # a unit's shared memory holds no more keys of this width
        return 16, {"num_warps": 8, "num_stages": 2}
    if block_d > 128 or element_size > 2:
        return 32, {"num_warps": 8, "num_stages": 2}
    if large:
        return 64, {"num_warps": 16, "num_stages": 3}
    if device.arch == "sm_90" and 2 * programs > 5 * device.num_units:
        # Two tiles per unit hide each other's latency but share its registers. With only two or three tiles per unit,
        # running one tile at a time, the longest first, ends sooner.
        return 64, {"num_warps": 8, "num_stages": 2, "maxnreg": 128}
    return 64, {"num_warps": 8, "num_stages": 3 if device.arch == "sm_90" else 2}
