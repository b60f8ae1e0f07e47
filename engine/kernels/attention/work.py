"""The work lists of a step's attention: decode rows cut into parts of their context, longer rows into tiles of queries.

    decode row (one query):   ceil(context / PART_LEN) items (row, 0, part), in order
    any other row:            ceil(queries / tile) items (row, first token, 0)

Made once per step, on the device, and read by every layer; nothing of it is known to the host. Users:
engine/kernels/attention/paged on accelerators.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.base import AttentionMeta
from engine.kernels.attention.attend import PART_LEN, prefill_tile
from engine.kernels.target import tl, triton


@dataclass(frozen=True, slots=True, eq=False)
class WorkList:
    """Device tensors, all int32; counts are on the device too, so a captured launch can read another step's list."""

    parts: Tensor  # [capacity, 3]: row, 0, part
    num_parts: Tensor  # [1]
    first_part: Tensor  # [num_rows + 1]
    token_of: Tensor  # [num_rows]: the row's only token, or -1
    tiles: Tensor  # [capacity, 3]: row, first token inside the row, 0
    num_tiles: Tensor  # [1]


@triton.jit
def work_kernel(
    parts,
    num_parts,
    first_part,
    token_of,
    tiles,
    num_tiles,
    query_start,
    context_len,
    num_rows,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,  # power of two >= num_rows
):
    """One program: rows side by side in a vector, their items below each other."""
    row = tl.arange(0, ROWS)
    here = row < num_rows
    start = tl.load(query_start + row, mask=here, other=0)
    length = tl.load(query_start + row + 1, mask=here, other=0) - start
    context = tl.load(context_len + row, mask=here, other=0)
    single = here & (length == 1)
    count = tl.where(single, (context + PART - 1) // PART, 0)
    end = tl.cumsum(count, 0)
    tl.store(first_part + row, end - count, mask=here)
    tl.store(first_part + num_rows, tl.sum(count, 0))
    tl.store(num_parts, tl.sum(count, 0))
    tl.store(token_of + row, tl.where(single, start, -1), mask=here)
    for part in range(tl.max(count, 0)):
        place = parts + (end - count + part) * 3
        more = part < count
        tl.store(place, row, mask=more)
        tl.store(place + 1, tl.zeros([ROWS], tl.int32), mask=more)
        tl.store(place + 2, tl.zeros([ROWS], tl.int32) + part, mask=more)
    count = tl.where(here & (length > 1), (length + TILE - 1) // TILE, 0)
    end = tl.cumsum(count, 0)
    tl.store(num_tiles, tl.sum(count, 0))
    for tile in range(tl.max(count, 0)):
        place = tiles + (end - count + tile) * 3
        more = tile < count
        tl.store(place, row, mask=more)
        tl.store(place + 1, tl.zeros([ROWS], tl.int32) + tile * TILE, mask=more)
        tl.store(place + 2, tl.zeros([ROWS], tl.int32), mask=more)


def empty_list(max_rows: int, max_tokens: int, max_parts: int, device: str | torch.device) -> WorkList:
    """Room for the lists of any step within these bounds."""

    def room(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    # A row of n queries makes at most n tiles, so the step's tokens bound them.
    return WorkList(room(max_parts, 3), room(1), room(max_rows + 1), room(max_rows), room(max_tokens, 3), room(1))


def fill_list(work: WorkList, meta: AttentionMeta, group: int) -> None:
    """Writes the step's lists; `group` is query heads per KV head. The room must suffice: counts are not checked."""
    rows = meta.context_len.shape[0]
    assert work.token_of.shape[0] >= rows
    work_kernel[(1,)](
        work.parts, work.num_parts, work.first_part, work.token_of, work.tiles, work.num_tiles,
        meta.query_start, meta.context_len, rows,
        PART=PART_LEN, TILE=tile_tokens(group), ROWS=triton.next_power_of_2(rows), num_warps=4,
    )  # fmt: skip


def tile_tokens(group: int) -> int:
    """Tokens in a prefill tile."""
    return prefill_tile(group) // group


def fill_list_reference(work: WorkList, meta: AttentionMeta, group: int) -> None:
    parts, tiles, firsts, token_of = [], [], [0], []
    starts = meta.query_start.tolist()
    for row, context in enumerate(meta.context_len.tolist()):
        length = starts[row + 1] - starts[row]
        if length == 1:
            parts += [(row, 0, part) for part in range(-(-context // PART_LEN))]
        else:
            tiles += [(row, first, 0) for first in range(0, length, tile_tokens(group))]
        token_of.append(starts[row] if length == 1 else -1)
        firsts.append(len(parts))
    work.num_parts[0], work.num_tiles[0] = len(parts), len(tiles)
    work.parts[: len(parts)] = torch.tensor(parts, dtype=torch.int32).view(-1, 3)
    work.tiles[: len(tiles)] = torch.tensor(tiles, dtype=torch.int32).view(-1, 3)
    work.first_part[: len(firsts)] = torch.tensor(firsts, dtype=torch.int32)
    work.token_of[: len(token_of)] = torch.tensor(token_of, dtype=torch.int32)
