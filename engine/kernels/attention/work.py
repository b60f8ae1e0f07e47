"""The work lists of a step's attention: rows with few queries are cut into context parts, other rows into query tiles.

    few queries:  ceil(queries / stripe) stripes; of each stripe ceil(context / part) parts, ascending, equal except the
                  last; a short remainder is merged
    more:         ceil(queries / tile) tiles, the tile with the most keys first; for pages of codes also large tiles

Few is one query, and with drafts up to WorkList.most_cut: the queries of a verify step would be one tile, whose program
alone would read the whole context. A part's lines are the query heads of a group times the queries of its stripe.

The device derives the length of a part from the step's total context: enough parts for every unit, and never more than
the list can hold. An invariant list makes tiles of every row, so that a token's bits depend neither on the step's other
rows nor on the cut of its prompt. `line` is the row's line of the block tables. The lists are made once per step and
read by every layer; the host does not know them. Users: engine/step, engine/kernels/attention/paged on accelerators.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.meta import AttentionMeta, WorkList
from engine.kernels.attention.tiles import KEYS, stripe_of, tile_tokens
from engine.kernels.target import target, tl, triton

MIN_PART = 64  # keys; the length of parts is a multiple of it
# Target of parts times KV heads per unit of the device. For 16-bit pages two keep the memory busy. Codes need as much
# work per round of keys with half the bytes, so more rounds must run at once to hide latency: with two, an H100 took as
# long for FP8 pages as for bfloat16 pages.
PARTS_PER_UNIT = 2
PARTS_OF_CODES = 8


@triton.jit(do_not_specialize=["aim"])  # aim depends on the size of the cache
def work_kernel(
    parts,
    num_parts,
    tiles,
    num_tiles,
    large_tiles,  # or None
    num_large_tiles,
    query_start,  # [num_rows + 1]
    context_len,  # [num_rows]
    table_row,  # [num_rows], or None: line r
    num_rows,
    aim,  # parts that the step's total context is cut into
    first_key,
    MOST: tl.constexpr,  # most queries of rows that are cut into parts; 0 for an invariant list
    WHOLE: tl.constexpr,  # queries see all keys of their row
    STRIPE: tl.constexpr,  # queries
    STEP: tl.constexpr,  # the step's part length is a multiple of STEP
    KEYS: tl.constexpr,  # a row's part length is a multiple of KEYS
    TILE: tl.constexpr,  # tokens
    LARGE_TILE: tl.constexpr,
    ROWS: tl.constexpr,  # power of two >= num_rows
):
    """A single program: one vector lane per row, a loop over the items of the rows."""
    row = tl.arange(0, ROWS)
    here = row < num_rows
    start = tl.load(query_start + row, mask=here, other=0)
    length = tl.load(query_start + row + 1, mask=here, other=0) - start
    context = tl.load(context_len + row, mask=here, other=0)
    line = row
    if table_row is not None:
        line = tl.load(table_row + row, mask=here, other=0)
    few = here & (length > 0) & (length <= MOST)
    stripes = (length + STRIPE - 1) // STRIPE
    total = tl.sum(tl.where(few, context * stripes, 0).to(tl.int64), 0)
    part = tl.maximum((total + aim * STEP - 1) // (aim * STEP), 1).to(tl.int32) * STEP
    # If a row would end with a short part, its other parts become up to an eighth longer instead.
    fewer = tl.maximum((context + part // 8 * 7) // part, 1) * KEYS
    longer = (context + fewer - 1) // fewer * KEYS
    part = tl.where((longer > part) & (longer <= part // 8 * 9), longer, part)
    each = (context + part - 1) // part  # parts of a stripe; the last one of an early stripe may be without keys
    count = tl.where(few, each * stripes, 0)
    end = tl.cumsum(count, 0)
    tl.store(num_parts, tl.sum(count, 0))
    for number in range(tl.max(count, 0)):
        place = parts + (end - count + number) * 8
        more = number < count
        stripe = number // tl.maximum(each, 1)
        first = stripe * STRIPE
        queries = tl.minimum(length - first, STRIPE)
        reach = context - length + first + queries  # the context of the stripe's last query
        begin = (number - stripe * each) * part
        tl.store(place, start + first, mask=more)
        tl.store(place + 1, tl.maximum(begin, first_key), mask=more)
        tl.store(place + 2, tl.minimum(context if WHOLE else reach, begin + part), mask=more)
        tl.store(place + 3, reach, mask=more)
        tl.store(place + 4, line, mask=more)
        tl.store(place + 5, end - count + stripe * each, mask=more)
        tl.store(place + 6, end - count + (stripe + 1) * each, mask=more)
        tl.store(place + 7, queries, mask=more)
    length = tl.where(here & (length > MOST), length, 0)
    write_tiles(tiles, num_tiles, start, length, context, line, TILE)
    if large_tiles is not None:
        write_tiles(large_tiles, num_large_tiles, start, length, context, line, LARGE_TILE)


@triton.jit
def write_tiles(tiles, num_tiles, start, length, context, line, TILE: tl.constexpr):
    """Writes the tiles of rows with `length` tokens; no tiles for 0 tokens."""
    count = (length + TILE - 1) // TILE
    end = tl.cumsum(count, 0)
    tl.store(num_tiles, tl.sum(count, 0))
    for number in range(tl.max(count, 0)):
        place = tiles + (end - 1 - number) * 4
        more = number < count
        tl.store(place, start + number * TILE, mask=more)
        tl.store(place + 1, tl.minimum(length - number * TILE, TILE), mask=more)
        tl.store(place + 2, context - length + number * TILE, mask=more)
        tl.store(place + 3, line, mask=more)


def max_parts(num_blocks: int, block_size: int, max_rows: int, per_unit: int = PARTS_PER_UNIT) -> int:
    """Capacity for parts: one per row, or per stripe of all rows, plus the target number of parts, bounded by the size
    of the cache."""
    most = -(-num_blocks * block_size // MIN_PART) * max_rows  # rows may share blocks
    return max_rows + max(1, min(most, per_unit * target().num_units))


def empty_list(
    max_rows: int,
    max_tokens: int,
    max_parts: int,
    heads: int,
    head_dim: int,
    device: str | torch.device,
    per_unit: int = PARTS_PER_UNIT,
    large: bool = False,
    most_cut: int = 1,
    group: int = 1,
) -> WorkList:
    """Allocates lists for any step within these bounds; `max_parts`: from the function of that name.

    `large`: with large tiles, see `has_large_tiles`. `most_cut`: see WorkList; above 1, `group` is the number of query
    heads per KV head, and max_rows counts the stripes of all rows.
    """
    stripe = stripe_of(group, most_cut)
    assert max_parts > max_rows, f"max_parts={max_parts}: {max_rows} rows need more than one part each"
    lines = stripe * heads
    assert max_parts * lines * head_dim < 1 << 31, f"max_parts={max_parts} for {lines} lines of {head_dim}: too many"

    def room(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    sums = torch.empty(max_parts, lines, head_dim, dtype=torch.float32, device=device)
    stats = torch.empty(max_parts, lines, 2, dtype=torch.float32, device=device)
    # A row of n queries makes at most n tiles, so the step's tokens bound the number of tiles.
    parts, tiles = room(max_parts, 8), room(max_tokens, 4)
    arrived = room(max_parts, heads).zero_()
    larger = (room(max_tokens, 4), room(1)) if large else (None, None)
    counts = max_rows, per_unit, most_cut, stripe
    return WorkList(parts, room(1), tiles, room(1), arrived, sums, stats, *counts, *larger)


def fill_list(work: WorkList, meta: AttentionMeta, group: int, invariant: bool = False) -> None:
    """Writes the step's lists; `group`: query heads per KV head. Rows without tokens have no items."""
    if meta.context_len.is_cpu:
        fill_list_reference(work, meta, group, invariant)
    else:
        launch_list(work, meta, group, invariant)


def launch_list(work: WorkList, meta: AttentionMeta, group: int, invariant: bool) -> None:
    rows, dim = meta.context_len.shape[0], work.sums.shape[2]
    assert work.max_rows >= rows
    work_kernel[(1,)](
        work.parts, work.num_parts, work.tiles, work.num_tiles, work.large_tiles, work.num_large_tiles,
        meta.query_start, meta.context_len, meta.table_row, rows, aim_of(work, group), meta.first_key,
        MOST=0 if invariant else work.most_cut, WHOLE=meta.whole, STRIPE=work.stripe, STEP=MIN_PART, KEYS=KEYS,
        TILE=tile_tokens(group, dim), LARGE_TILE=tile_tokens(group, dim, True), ROWS=triton.next_power_of_2(rows),
        num_warps=4,
    )  # fmt: skip


def aim_of(work: WorkList, group: int) -> int:
    """The target number of parts of a step, such that one more part per row fits into the list."""
    kv_heads = work.arrived.shape[1] // group
    return max(1, min(work.parts.shape[0] - work.max_rows, work.per_unit * target().num_units // kv_heads))


def fill_list_reference(work: WorkList, meta: AttentionMeta, group: int, invariant: bool = False) -> None:
    parts: list[tuple[int, ...]] = []
    more: list[tuple[int, int, int, int]] = []  # first token, tokens, context, line
    starts, contexts = meta.query_start.tolist(), meta.context_len.tolist()
    lines = list(range(len(contexts))) if meta.table_row is None else meta.table_row.tolist()
    most = 0 if invariant else work.most_cut
    lengths = [starts[row + 1] - starts[row] for row in range(len(contexts))]
    stripes = [-(-length // work.stripe) if length <= most else 0 for length in lengths]
    total = sum(context * count for context, count in zip(contexts, stripes))
    whole = max(1, -(-total // (aim_of(work, group) * MIN_PART))) * MIN_PART
    for row, context in enumerate(contexts):
        begin, length = starts[row], lengths[row]
        if stripes[row]:
            fewer = max(1, (context + whole // 8 * 7) // whole) * KEYS
            longer = -(-context // fewer) * KEYS
            part = longer if whole < longer <= whole // 8 * 9 else whole
            for first in range(0, length, work.stripe):
                queries = min(work.stripe, length - first)
                places, reach = (len(parts), len(parts) - (-context // part)), context - length + first + queries
                last = context if meta.whole else reach
                keys = [(max(low, meta.first_key), min(last, low + part)) for low in range(0, context, part)]
                parts += [(begin + first, *bounds, reach, lines[row], *places, queries) for bounds in keys]
        else:
            more.append((begin, length, context, lines[row]))
    work.num_parts[0] = len(parts)
    work.parts[: len(parts)] = torch.tensor(parts, dtype=torch.int32).view(-1, 8)
    for large, place, count in ((False, work.tiles, work.num_tiles), (True, work.large_tiles, work.num_large_tiles)):
        if place is None or count is None:
            continue
        tile = tile_tokens(group, work.sums.shape[2], large)
        tiles = [
            (begin + first, min(tile, length - first), context - length + first, line)
            for begin, length, context, line in more
            for first in reversed(range(0, length, tile))
        ]
        count[0] = len(tiles)
        place[: len(tiles)] = torch.tensor(tiles, dtype=torch.int32).view(-1, 4)
