"""Tables of grids for attention in Qwen's vision tower: window order, windows, frames, rotations, positions.

Owner: device thread. In: grids (frames, height, width in patches) of items that run together, and a Room, the sizes of
the tables. Out: views of one array of 32-bit numbers, so that one copy moves all tables to the device, or to the fixed
buffer that a graph reads. Items are concatenated, and no frame holds patches of two items. If the room has more patches
than the items, the padding patches form separate windows and a separate frame, so no real patch attends to them.

    flat  | order | restore | windows | frames | cos | sin | places | shares |  each begins at a multiple of 256 bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.encoders.qwen_vl.config import VisionConfig

ALIGNED = 64  # numbers; Triton compiles separate kernels for tensors not aligned to 16 bytes
Grid = tuple[int, int, int]
MOST_BLOCKS = 1 << 20  # along a side of a picture


@dataclass(frozen=True, slots=True)
class Room:
    """Sizes of the tables."""

    patches: int
    windows: int
    frames: int
    window: int  # most patches of a window
    unit: int  # patches of a block, which becomes one row
    half: int  # rotated pairs of a head
    taps: int = 0  # learned positions interpolated per patch
    graphed: bool = False  # the room of a graph, which may be larger than needed

    def holds(self, patches: int, windows: int, frames: int) -> bool:
        """Whether these counts fit, together with the windows and the frame of the padding patches."""
        left = self.patches - patches
        return left >= 0 and windows - (-left // self.window) <= self.windows and frames + bool(left) <= self.frames

    @property
    def blocks(self) -> int:
        return self.patches // self.unit

    @property
    def lengths(self) -> tuple[int, ...]:
        """The length of each table in 32-bit numbers; order and restore have 64-bit numbers."""
        turned, taken = self.patches * self.half, self.patches * self.taps
        return 2 * self.blocks, 2 * self.blocks, self.windows + 1, self.frames + 1, turned, turned, taken, taken

    @property
    def numbers(self) -> int:
        return sum(-(-length // ALIGNED) * ALIGNED for length in self.lengths)


class GridTables:
    """The tables; rows are patches in window order."""

    __slots__ = ("cos", "flat", "frames", "order", "places", "restore", "room", "shares", "sin", "windows")

    def __init__(self, flat: Tensor, room: Room) -> None:
        """`flat` int32 [room.numbers]: the memory of all tables."""
        pieces, start = [], 0
        for length in room.lengths:
            pieces.append(flat[start : start + length])
            start += -(-length // ALIGNED) * ALIGNED
        order, restore, windows, frames, cos, sin, places, shares = pieces
        self.flat = flat
        self.room = room
        self.order = order.view(torch.int64)  # [blocks] window order -> processor order
        self.restore = restore.view(torch.int64)  # [blocks] processor order -> window order
        self.windows = windows  # [windows + 1] int32
        self.frames = frames  # [frames + 1] int32
        self.cos = cos.view(torch.float32).view(room.patches, room.half)
        self.sin = sin.view(torch.float32).view(room.patches, room.half)
        self.places = places.view(room.patches, room.taps)  # int32: learned positions per patch, in processor order
        self.shares = shares.view(torch.float32).view(room.patches, room.taps)


@dataclass(frozen=True, slots=True)
class GridParts:
    """One grid's part of the tables, on the host."""

    order: Tensor  # int64 [blocks]
    windows: list[int]  # patches of each
    frames: list[int]
    cos: Tensor  # float32 [patches, half]
    sin: Tensor
    places: Tensor | None  # int32 [patches, taps]
    shares: Tensor | None  # float32 [patches, taps]

    @property
    def patches(self) -> int:
        return len(self.cos)


def grid_parts(grid: Grid, config: VisionConfig) -> GridParts:
    """The table parts of one picture or video."""
    t, h, w = grid
    merge, count = config.merge_size, t * h * w
    side, unit = window_side(config), merge**2
    frame = torch.arange(h * w // unit).view(h // merge, w // merge)
    tiles = [tile.reshape(-1) for band in frame.split(side, 0) for tile in band.split(side, 1)]
    one = torch.cat(tiles)  # block numbers of a frame, window by window
    first = torch.arange(t)[:, None] * (h * w // unit)
    cos, sin = _rotations(h, w, config)
    blocks = one.repeat(t)
    places = shares = None
    if config.position_side:
        places, shares = (part.repeat(t, 1) for part in interpolation(h, w, config.position_side, merge))
    return GridParts(
        (first + one).view(-1),
        [tile.numel() * unit for tile in tiles] * t,
        [h * w] * t,
        cos[blocks].view(count, -1),
        sin[blocks].view(count, -1),
        places,
        shares,
    )


def exact_room(parts: Sequence[GridParts], config: VisionConfig) -> Room:
    """The smallest room for these parts."""
    patches, windows, frames = needs(parts)
    side, unit = window_side(config), config.merge_size**2
    return Room(patches, windows, frames, side * side * unit, unit, head_half(config), taps_of(config))


def needs(parts: Sequence[GridParts]) -> tuple[int, int, int]:
    """The total patches, windows and frames of these parts."""
    numbers = ((part.patches, len(part.windows), len(part.frames)) for part in parts)
    patches, windows, frames = (sum(column) for column in zip(*numbers))
    return patches, windows, frames


def grid_tables(parts: Sequence[GridParts], room: Room, device: str) -> GridTables:
    """The tables, in a `room` that is large enough for the grids."""
    count = sum(part.patches for part in parts)
    windows = [size for part in parts for size in part.windows] + _cut(room.patches - count, room.window)
    frames = [size for part in parts for size in part.frames] + _cut(room.patches - count, room.patches)
    tables = GridTables(torch.zeros(room.numbers, dtype=torch.int32, pin_memory=device != "cpu"), room)
    at = 0
    for part in parts:
        end = at + part.patches
        torch.add(part.order, at // room.unit, out=tables.order[at // room.unit : end // room.unit])
        tables.cos[at:end], tables.sin[at:end] = part.cos, part.sin
        if part.places is not None and part.shares is not None:
            tables.places[at:end], tables.shares[at:end] = part.places, part.shares
        at = end
    torch.arange(count // room.unit, room.blocks, out=tables.order[count // room.unit :])
    tables.restore[tables.order] = torch.arange(room.blocks)
    _bounds(windows, tables.windows)
    _bounds(frames, tables.frames)
    return GridTables(tables.flat.to(device, non_blocking=True), room)


def window_side(config: VisionConfig) -> int:
    """Blocks along a side of a window; without windows, more than any picture has."""
    if not config.window_size:
        return MOST_BLOCKS
    return config.window_size // config.merge_size // config.patch_size


def head_half(config: VisionConfig) -> int:
    return config.hidden_size // config.num_heads // 2


def taps_of(config: VisionConfig) -> int:
    """Learned positions interpolated per patch."""
    return 4 if config.position_side else 0


def interpolation(h: int, w: int, side: int, merge: int) -> tuple[Tensor, Tensor]:
    """For a frame's patches, block by block: the four surrounding places in a square of `side`, and their weights.

    Bilinear; the corners of the grid coincide with those of the square.
    """
    axes = []
    for size in (h, w):
        at = torch.arange(size, dtype=torch.float32) * (side - 1) / max(size - 1, 1)
        low = at.floor()
        low_place = low.to(torch.int32)
        places = torch.stack([low_place, (low_place + 1).clamp(max=side - 1)], dim=1)
        axes.append((places, torch.stack([1 - (at - low), at - low], dim=1)))
    (rows, row_shares), (columns, column_shares) = axes
    places = rows[:, None, :, None] * side + columns[None, :, None, :]  # [h, w, 2, 2]
    shares = row_shares[:, None, :, None] * column_shares[None, :, None, :]
    return _by_block(places, merge), _by_block(shares, merge)


def _by_block(grid: Tensor, merge: int) -> Tensor:
    """[h, w, 2, 2] -> [h * w, 4], block after block."""
    h, w = grid.shape[:2]
    return grid.view(h // merge, merge, w // merge, merge, 4).transpose(1, 2).reshape(h * w, 4)


def _cut(count: int, size: int) -> list[int]:
    """`count` split into pieces of `size`, and the remainder."""
    whole, rest = divmod(count, size)
    return [size] * whole + ([rest] if rest else [])


def _bounds(sizes: list[int], out: Tensor) -> None:
    """Writes the boundaries of the segments, int32; unused entries become empty segments at the end."""
    torch.cumsum(torch.tensor(sizes), 0, dtype=torch.int32, out=out[1 : len(sizes) + 1])
    out[len(sizes) + 1 :] = out[len(sizes)]


def _rotations(h: int, w: int, config: VisionConfig) -> tuple[Tensor, Tensor]:
    """cos, sin of one frame, [blocks, merge^2, head_dim / 2]: half of the pairs rotate by the row, half by the
    column."""
    quarter = head_half(config) // 2
    inv_freq = 1.0 / config.rope_theta ** (torch.arange(quarter, dtype=torch.float32) / quarter)
    row, column = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    merge = config.merge_size
    angles = [
        axis.reshape(h // merge, merge, w // merge, merge).transpose(1, 2).reshape(-1, merge**2, 1) * inv_freq
        for axis in (row, column)
    ]
    angle = torch.cat(angles, dim=-1)
    return angle.cos(), angle.sin()
