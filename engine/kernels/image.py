"""Turns decoded pictures and frames into patches of Qwen's vision towers: scales, normalises and cuts on the device.

    [frames, H, W, 3 or 4] uint8 --one axis--> planes uint8 --the other, normalise, cut--> [patches, numbers]

Both passes add integers by the tables of mm/transform (`resize_table`), in Pillow's order, so a scaled picture has the
same bits as on a CPU; only the last rounding of value * scale - shift may differ. The last frame is repeated to fill
its temporal patch. Users: `engine/encoders/qwen_vl`. Tables are not trusted: reads outside of a picture are clamped to
its border.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import tl, triton

BLOCK = 256  # columns of a program


@dataclass(frozen=True, slots=True)
class PatchLayout:
    """The format of a tower's patches."""

    patch_size: int  # pixels along a side
    merge_size: int  # patches along a side of a block; a block's patches are adjacent
    temporal: int  # frames in a patch
    dtype: torch.dtype

    @property
    def numbers(self) -> int:
        """Values of a patch: channels, frames, lines, columns."""
        return 3 * self.temporal * self.patch_size**2


@triton.jit
def resample(
    source,  # uint8: one channel of one frame, with a stride of `step` bytes between pixels
    table,  # [1 + taps, new_size] int32: each new pixel's first source pixel, then the weights of `taps` source pixels
    line,
    column,  # [BLOCK]: columns of the result
    width,  # pixels in an old line
    size,  # source pixels along the axis
    new_size,
    taps,
    step,
    ROWS: tl.constexpr,  # resample along lines, else along columns
):
    """The resampled bytes, int32 [BLOCK]."""
    place = line if ROWS else column
    first = tl.load(table + place)
    total = column * 0 + (1 << 21)  # one half: weights have 22 fractional bits
    for tap in range(taps):
        weight = tl.load(table + (1 + tap) * new_size + place)
        at = tl.minimum(tl.maximum(first + tap, 0), size - 1)
        old = at.to(tl.int64) * width + column if ROWS else line.to(tl.int64) * width + at
        total += tl.load(source + old * step).to(tl.int32) * weight
    return tl.minimum(tl.maximum(total >> 22, 0), 255)


# These numbers differ between pictures, and must not cause recompilation.
@triton.jit(do_not_specialize=["height", "width", "new_height", "new_width", "taps"])
def planes_kernel(
    planes,  # [frames, 3, new_height, new_width] uint8; one of the two sizes is still the source's
    pixels,  # [frames, height, width, 3] uint8
    table,
    height,
    width,
    new_height,
    new_width,
    taps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes BLOCK columns of one new line of one frame, all three channels."""
    grid_wait(OVERLAP)
    line, frame = tl.program_id(0) % new_height, (tl.program_id(0) // new_height).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    read = tl.minimum(column, new_width - 1)
    source = pixels + frame * height * width * 3
    target = planes + (frame * 3 * new_height + line) * new_width + column
    for channel in tl.static_range(3):
        byte = resample(
            source + channel, table, line, read, width, height if ROWS else width,
            new_height if ROWS else new_width, taps, 3, ROWS,
        )  # fmt: skip
        tl.store(target, byte.to(tl.uint8), mask=column < new_width)
        target += new_height.to(tl.int64) * new_width


@triton.jit(do_not_specialize=["frames", "height", "width", "new_height", "new_width", "taps"])
def patches_kernel(
    patches,  # [patches, 3 * TEMPORAL * PATCH * PATCH]
    planes,  # [frames, 3, height, width] uint8
    table,
    frames,
    height,
    width,
    new_height,
    new_width,
    taps,
    red_scale,
    green_scale,
    blue_scale,
    red_shift,
    green_shift,
    blue_shift,
    ROWS: tl.constexpr,
    PATCH: tl.constexpr,
    MERGE: tl.constexpr,
    TEMPORAL: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes BLOCK columns of one new line of one channel of one frame, and stores them to their patches."""
    grid_wait(OVERLAP)
    line, plane = tl.program_id(0) % new_height, tl.program_id(0) // new_height
    frame, channel = plane // 3, plane % 3
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    byte = resample(
        planes + plane.to(tl.int64) * height * width, table, line, tl.minimum(column, new_width - 1), width,
        height if ROWS else width, new_height if ROWS else new_width, taps, 1, ROWS,
    )  # fmt: skip
    scale = tl.where(channel == 0, red_scale, tl.where(channel == 1, green_scale, blue_scale))
    shift = tl.where(channel == 0, red_shift, tl.where(channel == 1, green_shift, blue_shift))
    value = (byte.to(tl.float32) * scale - shift).to(patches.dtype.element_ty)
    # A patch's place: time, then blocks of MERGE x MERGE neighbours, row by row.
    down, across, wide = line // PATCH, column // PATCH, new_width // PATCH
    block = (down // MERGE) * (wide // MERGE) + across // MERGE
    patch = (frame // TEMPORAL) * (new_height // PATCH) * wide + block * MERGE * MERGE
    patch += down % MERGE * MERGE + across % MERGE
    step = frame % TEMPORAL
    within = ((channel * TEMPORAL + step) * PATCH + line % PATCH) * PATCH + column % PATCH
    target = patches + patch.to(tl.int64) * (3 * TEMPORAL * PATCH * PATCH) + within
    copies = tl.where(frame == frames - 1, TEMPORAL - step, 1)
    for copy in range(copies):
        tl.store(target + copy * PATCH * PATCH, value, mask=column < new_width)


def pixels_to_patches(
    pixels: Tensor, columns: Tensor, rows: Tensor, normal: Sequence[float], layout: PatchLayout
) -> Tensor:
    """pixels uint8 [frames, H, W, 3] -> [ceil(frames / temporal) * (height / patch) * (width / patch), numbers].

    columns [1 + taps, width] and rows [1 + taps, height], int32: each new pixel's first source pixel, then the weights
    of `taps` source pixels, in units of 2**-22. normal: scales of red, green and blue, then their shifts.
    """
    assert pixels.dtype is torch.uint8 and pixels.dim() == 4 and pixels.shape[3] == 3 and pixels.is_contiguous()
    assert columns.dtype is rows.dtype is torch.int32 and columns.is_contiguous() and rows.is_contiguous()
    assert min(len(columns), len(rows)) > 1 and len(normal) == 6
    unit = layout.patch_size * layout.merge_size
    assert rows.shape[1] % unit == 0 and columns.shape[1] % unit == 0, f"new sides must be multiples of {unit}"
    make = launch_patches if pixels.is_cuda else pixels_to_patches_reference
    return make(pixels, columns, rows, normal, layout)


def launch_patches(
    pixels: Tensor, columns: Tensor, rows: Tensor, normal: Sequence[float], layout: PatchLayout
) -> Tensor:
    """The Triton kernels; arguments as `pixels_to_patches`."""
    frames, height, width, _ = pixels.shape
    new_height, new_width = rows.shape[1], columns.shape[1]
    down_first = rows_first(height, width, new_height, new_width)
    first, second = (rows, columns) if down_first else (columns, rows)
    half_height, half_width = (new_height, width) if down_first else (height, new_width)
    planes = torch.empty(frames, 3, half_height, half_width, dtype=torch.uint8, device=pixels.device)
    count = -(-frames // layout.temporal) * (new_height // layout.patch_size) * (new_width // layout.patch_size)
    patches = torch.empty(count, layout.numbers, dtype=layout.dtype, device=pixels.device)
    planes_kernel[(frames * half_height, triton.cdiv(half_width, BLOCK))](
        planes, pixels, first, height, width, half_height, half_width, len(first) - 1,
        ROWS=down_first, BLOCK=BLOCK, num_warps=4, **launch_options(),
    )  # fmt: skip
    patches_kernel[(frames * 3 * new_height, triton.cdiv(new_width, BLOCK))](
        patches, planes, second, frames, half_height, half_width, new_height, new_width, len(second) - 1, *normal,
        ROWS=not down_first, PATCH=layout.patch_size, MERGE=layout.merge_size, TEMPORAL=layout.temporal, BLOCK=BLOCK,
        num_warps=4, **launch_options(),
    )  # fmt: skip
    return patches


def rows_first(height: int, width: int, new_height: int, new_width: int) -> bool:
    """Whether Pillow 13 resamples along the height first, which it does only if that reduces the picture much more."""
    return new_height < height and height - new_height > 2 * (width - new_width)


def pixels_to_patches_reference(
    pixels: Tensor, columns: Tensor, rows: Tensor, normal: Sequence[float], layout: PatchLayout
) -> Tensor:
    wide = torch.float64 if layout.dtype == torch.float64 else torch.float32
    frames, height, width, _ = pixels.shape
    planes = pixels.permute(0, 3, 1, 2)
    if rows_first(height, width, rows.shape[1], columns.shape[1]):
        planes = _resampled(_resampled(planes.mT, rows).mT, columns)
    else:
        planes = _resampled(_resampled(planes, columns).mT, rows).mT  # [frames, 3, new_height, new_width]
    scale, shift = torch.tensor(normal, dtype=wide, device=pixels.device).view(2, 1, 3, 1, 1)
    values = planes.to(wide) * scale - shift
    values = torch.cat([values, values[-1:].expand(-frames % layout.temporal, -1, -1, -1)])
    patch, merge = layout.patch_size, layout.merge_size
    down, across = values.shape[2] // patch // merge, values.shape[3] // patch // merge
    view = values.view(-1, layout.temporal, 3, down, merge, patch, across, merge, patch)
    # -> time, block rows, block columns, merge, merge, channel, frame, patch, patch
    return view.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, layout.numbers).to(layout.dtype)


def _resampled(x: Tensor, table: Tensor) -> Tensor:
    """uint8 [..., size] -> uint8 [..., new_size]."""
    first, last = table[0].long(), x.shape[-1] - 1
    total = torch.full((*x.shape[:-1], table.shape[1]), 1 << 21, dtype=torch.int32, device=x.device)
    for tap, weight in enumerate(table[1:]):
        total += x[..., (first + tap).clamp(0, last)].int() * weight
    return (total >> 22).clamp(0, 255).to(torch.uint8)
