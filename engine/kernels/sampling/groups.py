"""One pass over the logits: of every GROUP neighbouring tokens, the largest logit and the mass relative to it.

    best_g = max x_i;  mass_g = sum 2^((x_i - best_g) * scale),  i in g,  scale = log2(e) / temperature (greedy: 1)

Everything that chooses a token reads these [rows, vocab / GROUP] numbers and then only the groups it needs. A group's
sum is taken in the same order at any number of rows. mass is NaN where the group holds NaN or +inf, and 0 where it
holds -inf (a ban) only. Users: engine/kernels/sampling/choose.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import math

import torch
from torch import Tensor

from _fast.layout import SlotWord
from engine.kernels.step_tensors import SlotTensors, real
from engine.kernels.target import tl, triton

TEMPERATURE = tl.constexpr(int(SlotWord.TEMPERATURE))
GROUP = 64  # tokens
TILE = 64  # groups of one program
LEAST_HEAT = 1e-30  # colder rows are drawn as this warm, so that 1 / temperature stays finite


@triton.jit
def scale_of(heat):
    """log2(e) / temperature."""
    return tl.where(heat > 0.0, 1.4426950408889634 / tl.maximum(heat, 1e-30), 1.4426950408889634)


@triton.jit
def groups_kernel(
    best,  # [rows, num_groups] float32
    mass,  # [rows, num_groups] float32
    logits,  # [rows, vocab]
    words,  # [slots, SLOT_WORDS]
    sample_row,  # [rows]
    sample_slot,  # [rows]
    vocab,
    logits_stride,
    num_groups,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """TILE groups of one row per program."""
    row = tl.program_id(1)
    if tl.load(sample_row + row) >= 0:
        scale = scale_of(real(words, tl.load(sample_slot + row), TEMPERATURE))
        group = tl.program_id(0) * TILE + tl.arange(0, TILE)
        token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        at = logits + row.to(tl.int64) * logits_stride
        x = tl.load(at + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        top = tl.max(x, 1)
        anchor = tl.where(top == float("-inf"), 0.0, top)
        part = tl.sum(tl.exp2((x - anchor[:, None]) * scale), 1)
        place = row.to(tl.int64) * num_groups + group
        tl.store(best + place, top, mask=group < num_groups)
        tl.store(mass + place, part, mask=group < num_groups)


def groups(
    best: Tensor, mass: Tensor, logits: Tensor, slots: SlotTensors, sample_row: Tensor, sample_slot: Tensor
) -> None:
    """Writes best and mass float32 [rows, num_groups], all but the lines of rows whose sample_row is -1.

    logits [rows, vocab], bfloat16, float16 or float32, unit stride along the row; the rest as in StepInputs.
    """
    rows, vocab = logits.shape
    num_groups = best.shape[1]
    assert logits.stride(1) == 1 and best.is_contiguous() and mass.shape == best.shape and mass.is_contiguous()
    assert num_groups == -(-vocab // GROUP) and min(len(best), len(sample_row), len(sample_slot)) >= rows
    groups_kernel[(triton.cdiv(num_groups, TILE), rows)](
        best, mass, logits, slots.words, sample_row, sample_slot, vocab, logits.stride(0), num_groups,
        GROUP=GROUP, TILE=TILE, num_warps=4,
    )  # fmt: skip


def groups_reference(
    best: Tensor, mass: Tensor, logits: Tensor, slots: SlotTensors, sample_row: Tensor, sample_slot: Tensor
) -> None:
    rows, vocab = logits.shape
    num_groups = best.shape[1]
    heat = slots.real(SlotWord.TEMPERATURE)
    for row in range(rows):
        if int(sample_row[row]) < 0:
            continue
        line = torch.full((num_groups * GROUP,), float("-inf"))
        line[:vocab] = logits[row].float()
        line = line.view(num_groups, GROUP)
        top = line.amax(1)
        anchor = torch.where(top == float("-inf"), 0.0, top)
        best[row] = top
        mass[row] = torch.exp2((line - anchor[:, None]) * scale_reference(float(heat[sample_slot[row]]))).sum(1)


def scale_reference(heat: float) -> float:
    return math.log2(math.e) / max(heat, LEAST_HEAT) if heat > 0 else math.log2(math.e)
