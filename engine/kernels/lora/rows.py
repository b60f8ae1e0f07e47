"""PlaceList: the rows of a forward by the place of their adapter, in tiles of at most `tile` rows with one place.

    order   rows without an adapter, ascending | rows of place 1 | rows of place 2 | ...
    tiles   (place or 0, first entry of `order`, number of rows); 0 rows: the tile is empty

For experts a row is a pair of a token and an expert, and a key `(place - 1) * experts + expert + 1` replaces the place.
Few pairs need no list: each is a tile, and its readers compute the key from the token's place and the chosen expert.
In: the place of each row, 0 for none. Each place has a program, which counts the rows of lower places and writes its
own rows and tiles behind theirs. Place p has the tiles from `rows of lower places // tile + p` on, which leaves room
for a partial tile of each place; so programs need no common counter. A forward makes one list, and another one
when it goes on with the sampled rows. With tiles of one row the order is that of the rows, and a row needs no matrix
unit. Users: kernels/lora/shrink and expand.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.pdl import grid_wait, launch_options, wait_alone
from engine.kernels.target import tl, triton

BLOCK = 1024  # rows per iteration
FEW, SOME = 64, 512  # rows
INVARIANT_TILE = 16  # rows of a tile, for any number of rows
MOST_RANK = 64  # of tiles of one row; a higher rank has blocks of LEAST_BLOCK rows
LEAST_BLOCK = 16
FEW_PAIRS = 512  # up to so many pairs are tiles of their own, because their experts are nearly all different


@dataclass(frozen=True, slots=True, eq=False)
class PlaceList:
    """The rows of a forward by place; of few pairs: the places of the tokens, and the pairs' experts, except in
    references, whose lists have all fields of tiles."""

    order: Tensor  # [rows] int32; when `each` [tokens] int32, places
    tiles: Tensor  # [num_tiles, 3] int32; when `each` [pairs] int32, experts
    tile: int  # the most rows of a tile
    each: int = 0  # pairs of a token, if each pair is a tile
    settled: bool = True  # readers may read the list before they wait for the previous kernel

    @property
    def count(self) -> int:
        """Rows of the list."""
        return (self.tiles if self.each else self.order).shape[0]


def tile_of(rows: int, places: int) -> int:
    """The most rows of a tile, for a forward of so many rows."""
    return 1 if rows <= min(places, BLOCK) else 16 if rows <= FEW else 32 if rows <= SOME else 64


def block_of(rows: PlaceList, rank: int) -> int:
    """Rows of a program's block for adapters of a padded rank."""
    return 1 if rows.tile == 1 and rank <= MOST_RANK else max(LEAST_BLOCK, rows.tile)


@triton.jit
def multiply(x, matrix):
    """The row x [K] times matrix [N, K], float32 [N].

    Both have the axes of memory, so that each thread multiplies the values that it has read. With another order Triton
    moves the matrix through shared memory, with a barrier for each 2 KB."""
    return tl.sum(matrix.to(tl.float32) * x.to(tl.float32)[None, :], 1)


@triton.jit
def tile_at(tiles, order, tile, experts, TILE: tl.constexpr, EACH: tl.constexpr):
    """Key, first entry and number of rows of a tile; loads bypass the unit's cache."""
    start, count = tile, 1
    if EACH:
        place = tl.load(order + tile // EACH, cache_modifier=".cg")
        key = key_of(place, tl.load(tiles + tile, cache_modifier=".cg"), experts)
    elif TILE == 1:
        key = tl.load(tiles + tile * 3, cache_modifier=".cg")
    else:
        key = tl.load(tiles + tile * 3, cache_modifier=".cg")
        start = tl.load(tiles + tile * 3 + 1, cache_modifier=".cg")
        count = tl.load(tiles + tile * 3 + 2, cache_modifier=".cg")
    return key, start, count


@triton.jit
def key_of(place, expert, experts):
    return tl.where((place > 0) & (expert < experts), (place - 1) * experts + expert + 1, 0)


@triton.jit
def rows_at(order, start, m, m_in, EACH: tl.constexpr):
    """The rows of a tile, [TILE]."""
    row = start + m
    if not EACH:
        row = tl.load(order + row, mask=m_in, other=0, cache_modifier=".cg")
    return row


@triton.jit(do_not_specialize=["rows", "num_tiles"])
def place_list_kernel(
    order,  # [rows] int32
    tiles,  # [num_tiles, 3] int32
    numbers,  # [rows] int32
    rows,
    num_tiles,
    places,
    tile,  # the most rows of a tile; 1 when SINGLE
    BLOCK: tl.constexpr,
    SINGLE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program writes the rows and tiles of one place; SINGLE: one program writes a tile for each row.

    Readers may read the list before they wait, so no kernel may start before this one ends."""
    place = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    wait_alone(OVERLAP)
    if SINGLE:
        inside = lane < rows
        tl.store(order + lane, lane, mask=inside)
        tl.store(tiles + lane * 3, tl.load(numbers + lane, mask=inside, other=0), mask=inside)
        tl.store(tiles + lane * 3 + 1, lane, mask=inside)
        tl.store(tiles + lane * 3 + 2, 1, mask=inside)
    else:
        lower = tl.zeros([BLOCK], tl.int32)
        for first in range(0, rows, BLOCK):
            each = tl.load(numbers + first + lane, mask=first + lane < rows, other=place)
            lower += (each < place).to(tl.int32)
        start = tl.sum(lower, 0)
        end = start
        for first in range(0, rows, BLOCK):
            mine = (tl.load(numbers + first + lane, mask=first + lane < rows, other=-1) == place).to(tl.int32)
            tl.store(order + end + tl.cumsum(mine, 0) - 1, first + lane, mask=mine > 0)
            end += tl.sum(mine, 0)
        begin = start // tile + place
        limit = tl.where(place == places, num_tiles, end // tile + place + 1)
        for first in range(begin, limit, BLOCK):
            number = first + lane
            at = start + (number - begin) * tile
            count = tl.minimum(tl.maximum(end - at, 0), tile)
            inside = number < limit
            tl.store(tiles + number * 3, tl.where(count > 0, place, 0), mask=inside)
            tl.store(tiles + number * 3 + 1, at, mask=inside)
            tl.store(tiles + number * 3 + 2, count, mask=inside)


@triton.jit(do_not_specialize=["pairs"])
def pair_keys_kernel(
    keys,  # [pairs] int32
    numbers,  # [tokens] int32
    chosen,  # [pairs] int32
    pairs,
    experts,
    top_k,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program computes BLOCK keys."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < pairs
    grid_wait(OVERLAP)
    place = tl.load(numbers + pair // top_k, mask=inside, other=0)
    expert = tl.load(chosen + pair, mask=inside, other=experts)
    tl.store(keys + pair, key_of(place, expert, experts), mask=inside)


def pair_list(numbers: Tensor, chosen: Tensor, places: int, experts: int, invariant: bool = False) -> PlaceList:
    """The list of the pairs of chosen [T, top_k] int32, `experts` for none; numbers int32 [T]: each token's place.

    invariant: a pair's bits do not depend on the number of pairs."""
    return (launch_pair_list if chosen.is_cuda else pair_list_reference)(numbers, chosen, places, experts, invariant)


def launch_pair_list(numbers: Tensor, chosen: Tensor, places: int, experts: int, invariant: bool = False) -> PlaceList:
    """Launches Triton kernels for many pairs."""
    assert chosen.is_contiguous(), "chosen is contiguous"
    assert numbers.is_contiguous(), "numbers are contiguous"
    pairs, top_k = chosen.numel(), chosen.shape[1]
    if pairs <= FEW_PAIRS:  # the router's kernel may still run when the list's first reader starts
        return PlaceList(numbers, chosen.flatten(), INVARIANT_TILE if invariant else 1, top_k, settled=False)
    keys = torch.empty(pairs, dtype=torch.int32, device=chosen.device)
    pair_keys_kernel[(triton.cdiv(pairs, BLOCK),)](
        keys, numbers, chosen, pairs, experts, top_k, BLOCK=BLOCK, num_warps=4, **launch_options()
    )
    return launch_place_list(keys, places * experts, INVARIANT_TILE)


def pair_list_reference(
    numbers: Tensor, chosen: Tensor, places: int, experts: int, invariant: bool = False
) -> PlaceList:
    experts_of, place = chosen.flatten(), numbers.repeat_interleave(chosen.shape[1])
    keys = ((place - 1) * experts + experts_of + 1).where((place > 0) & (experts_of < experts), 0).int()
    if len(keys) > FEW_PAIRS:
        return place_list_reference(keys, places * experts, INVARIANT_TILE)
    order = torch.arange(len(keys), dtype=torch.int32)
    tiles = torch.stack([keys, order, torch.ones_like(keys)], 1)
    return PlaceList(order, tiles, INVARIANT_TILE if invariant else 1, chosen.shape[1])


def place_list(numbers: Tensor, places: int, tile: int) -> PlaceList:
    """numbers int32 [rows], contiguous: each row's place, from 1 to `places`; 0: none."""
    return (launch_place_list if numbers.is_cuda else place_list_reference)(numbers, places, tile)


def launch_place_list(numbers: Tensor, places: int, tile: int) -> PlaceList:
    """Launches the Triton kernel."""
    assert numbers.is_contiguous(), "numbers are contiguous"
    assert numbers.dtype is torch.int32, f"numbers are {numbers.dtype}, not int32"
    rows = len(numbers)
    single = tile == 1
    num_tiles = rows if single else rows // tile + places + 1
    order = torch.empty(rows, dtype=torch.int32, device=numbers.device)
    tiles = torch.empty(num_tiles, 3, dtype=torch.int32, device=numbers.device)
    if num_tiles:
        assert not single or rows <= BLOCK, f"{rows} rows are no tiles of their own"
        place_list_kernel[(1 if single else places + 1,)](
            order, tiles, numbers, rows, num_tiles, places, tile, BLOCK=BLOCK, SINGLE=single, num_warps=4,
            **launch_options(),
        )  # fmt: skip
    return PlaceList(order, tiles, tile)


def place_list_reference(numbers: Tensor, places: int, tile: int) -> PlaceList:
    rows = len(numbers)
    if tile == 1:
        order = torch.arange(rows, dtype=torch.int32)
        return PlaceList(order, torch.stack([numbers, order, torch.ones_like(order)], 1), tile)
    order = torch.zeros(rows, dtype=torch.int32)
    tiles = torch.zeros(rows // tile + places + 1, 3, dtype=torch.int32)
    start = 0
    for place in torch.unique(numbers).tolist():
        mine = torch.nonzero(numbers == place).flatten().int()
        order[start : start + len(mine)] = mine
        for number, first in enumerate(range(0, len(mine), tile)):
            where = start // tile + place + number
            tiles[where] = torch.tensor([place, start + first, min(tile, len(mine) - first)])
        start += len(mine)
    return PlaceList(order, tiles, tile)
