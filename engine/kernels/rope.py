"""Rotary positions: the table of cosines and sines of a step's tokens, by which rotate.py rotates heads.

angle[t, j] = position[t] * inv_freq[j]. With several rows of positions each section of the frequencies reads its own
row: time, height, width (Qwen2-VL, Qwen2.5-Omni), or place, width, height, picture (HunyuanOCR); or the frequencies
alternate between three rows (Qwen3-VL), or between height and width, and those of time follow (ERNIE 4.5 VL). Users:
decoders compute the table once per step and pass it to `qkv_rope_store`; towers compute their own and call
`apply_rope`. The table is float32 for every activation dtype.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.base.model_config import MropeTurns
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import tl, triton


@triton.jit(do_not_specialize=["num_tokens"])
def angle_kernel(
    cos,  # [num_tokens, half] float32
    sin,
    positions,  # [num_tokens], or [axes, num_tokens] for SEVERAL, rows axis_stride apart
    inv_freq,  # [half]
    num_tokens,
    half,
    axis_stride,
    first_end,  # SEVERAL: frequencies below first_end read row 0, frequencies from second_end on read row 2
    second_end,  # INTERLEAVED: 1, 4, 7 ... below first_end read row 1, and 2, 5, 8 ... below second_end row 2
    # SIDES: 0, 2, 4 ... below second_end read row 1, and 1, 3, 5 ... row 2; from second_end on row 0
    scaling,
    third_end,  # frequencies from third_end on read row 3; None: there are three rows
    SEVERAL: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SIDES: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two >= half
    OVERLAP: tl.constexpr,
):
    """A program computes all frequencies of TOKENS tokens."""
    grid_wait(OVERLAP)
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    inside = (token < num_tokens) & (pair < half)
    if INTERLEAVED:
        turn = pair % 3
        axis = tl.where(pair < tl.where(turn == 1, first_end, second_end), turn, 0)
    elif SIDES:
        axis = tl.where(pair < second_end, 1 + pair % 2, 0)
    else:
        axis = (pair >= first_end).to(tl.int32) + (pair >= second_end).to(tl.int32)
        if third_end is not None:
            axis += (pair >= third_end).to(tl.int32)
    place = token + (axis * axis_stride if SEVERAL else axis * 0)
    position = tl.load(positions + place, mask=inside, other=0).to(tl.float32)
    angle = position * tl.load(inv_freq + pair, mask=pair < half, other=0.0)
    target = token.to(tl.int64) * half + pair
    tl.store(cos + target, tl.cos(angle) * scaling, mask=inside)
    tl.store(sin + target, tl.sin(angle) * scaling, mask=inside)


def cos_sin(
    positions: Tensor,
    inv_freq: Tensor,
    mrope_section: Sequence[int] | None = None,
    scaling: float = 1.0,
    turns: MropeTurns = "",
) -> tuple[Tensor, Tensor]:
    """Return cos, sin [T, D_rot/2]; positions [T] or [axes, T] are integers or floats, inv_freq [D_rot/2] is float32.

    mrope_section: the number of frequencies that read each of three or four rows, in order; the sum is D_rot/2. Without
    it the rows are assumed to be equal. scaling multiplies both results (YaRN's attention factor). turns "all":
    frequencies alternate between time, height and width until the sections of height and width are used up. "sides":
    mrope_section is of height, width and time; frequencies alternate between height and width, and those of time
    follow. The results are float32.
    """
    if positions.is_cuda:
        return launch_cos_sin(positions, inv_freq, mrope_section, scaling, turns)
    return cos_sin_reference(positions, inv_freq, mrope_section, scaling, turns)


def launch_cos_sin(
    positions: Tensor,
    inv_freq: Tensor,
    mrope_section: Sequence[int] | None = None,
    scaling: float = 1.0,
    turns: MropeTurns = "",
) -> tuple[Tensor, Tensor]:
    """Launch the Triton kernel; positions have contiguous rows; other arguments as `cos_sin`."""
    half, tokens = inv_freq.numel(), positions.shape[-1]
    assert positions.stride(-1) == 1 and inv_freq.is_contiguous()
    several = positions.dim() == 2 and mrope_section is not None
    first, second, third = half, half, None
    if several and mrope_section is not None:
        axes = len(mrope_section)
        assert axes in ((3,) if turns else (3, 4)) and sum(mrope_section) == half, (
            f"mrope_section {list(mrope_section)}: three or four numbers that add up to {half}; three that take turns"
        )
        first, second = mrope_section[0], mrope_section[0] + mrope_section[1]
        third = second + mrope_section[2] if axes == 4 else None
        if turns == "all":
            first, second = 3 * mrope_section[1], 3 * mrope_section[2]
    cos, sin = torch.empty(2, tokens, half, dtype=torch.float32, device=positions.device).unbind(0)
    block = triton.next_power_of_2(half)
    rows = max(1, 256 // block)
    angle_kernel[(triton.cdiv(tokens, rows),)](
        cos, sin, positions, inv_freq, tokens, half, positions.stride(0), first, second, scaling, third,
        SEVERAL=several, INTERLEAVED=turns == "all", SIDES=turns == "sides", TOKENS=rows, BLOCK=block, num_warps=4,
        **launch_options(),
    )  # fmt: skip
    return cos, sin


def cos_sin_reference(
    positions: Tensor,
    inv_freq: Tensor,
    mrope_section: Sequence[int] | None = None,
    scaling: float = 1.0,
    turns: MropeTurns = "",
) -> tuple[Tensor, Tensor]:
    if positions.dim() == 2 and mrope_section is not None:
        assert sum(mrope_section) == inv_freq.numel(), (
            f"mrope_section {list(mrope_section)} must add up to {inv_freq.numel()}"
        )
        rows = positions.to(torch.float32)
        angle = rows[axes_of(mrope_section, turns)].T.contiguous() * inv_freq  # [num_tokens, D_rot/2]
    else:
        row = positions if positions.dim() == 1 else positions[0]
        angle = row.to(torch.float32)[:, None] * inv_freq  # [num_tokens, D_rot/2]
    cos, sin = angle.cos(), angle.sin()
    if scaling != 1.0:
        cos, sin = cos * scaling, sin * scaling
    return cos, sin


def axes_of(sections: Sequence[int], turns: MropeTurns) -> list[int]:
    """Return the row of positions that each frequency reads."""
    if turns == "sides":
        return [1 + pair % 2 if pair < sum(sections[:2]) else 0 for pair in range(sum(sections))]
    if not turns:
        return [axis for axis, size in enumerate(sections) for _ in range(size)]
    pairs = range(sum(sections))
    return [pair % 3 if pair % 3 and pair < 3 * sections[pair % 3] else 0 for pair in pairs]
