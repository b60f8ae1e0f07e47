"""One pass over the logits: applies rules, then finds the largest logit and the mass of each group of GROUP tokens.

    best_g = max x_i;  mass_g = sum 2^((x_i - best_g) * scale),  i in g,  scale = log2(e) / temperature (greedy: 1)

The kernels that choose tokens read these [rows, vocab / GROUP] numbers and then only the groups that they need. The
order of a group's sum does not depend on the number of rows. mass is NaN if the group contains NaN or +inf, and 0 if it
contains only -inf (a ban). For a slot with rules, x are the logits after the rules (rules.py); they are also written to
`work`, from which the row is read afterwards; so are rows with top-n-sigma, which also get their moments, or XTC. Other
rows pay for one predicate. User: choose.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import math

import torch
from torch import Tensor

from _fast.layout import SamplerWord, SlotWord
from engine.kernels.sampling.dry import HEAD, PARTS_OF_LINE, scatter
from engine.kernels.sampling.rules import (
    IS_REPEATS,
    RULE_KINDS,
    RuleTables,
    lengths_in,
    line_of,
    mask_of,
    mask_reference,
    ruled,
    ruled_reference,
)
from engine.kernels.sampling.top_n_sigma import (
    LINE_OF_MOMENTS,
    MOMENTS,
    TOP_N_SIGMA,
    join_moments,
    moments_of,
    moments_reference,
)
from engine.kernels.sampling.xtc import is_narrowed
from engine.kernels.step_tensors import SlotTensors, real, word
from engine.kernels.target import tl, triton

TEMPERATURE = tl.constexpr(int(SlotWord.TEMPERATURE))
GROUP = 64  # tokens
TILE = 64  # groups per program
PART = tl.constexpr(
    16
)  # groups at a time in rows that are written to `work`; few registers, so that other rows keep occupancy
LEAST_HEAT = 1e-30  # lower temperatures are raised to this value, so that 1 / temperature stays finite


@triton.jit
def scale_of(heat):
    """log2(e) / temperature."""
    return tl.where(heat > 0.0, 1.4426950408889634 / tl.maximum(heat, 1e-30), 1.4426950408889634)


@triton.jit
def sum_up(best, mass, x, group, num_groups, scale):
    """Write to best and mass, the row's lines, the numbers of some groups with logits x [groups, GROUP]."""
    top = tl.max(x, 1)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    part = tl.sum(tl.exp2((x - anchor[:, None]) * scale), 1)
    tl.store(best + group, top, mask=group < num_groups)
    tl.store(mass + group, part, mask=group < num_groups)


@triton.jit
def groups_kernel(
    best,  # [rows, num_groups] float32
    mass,  # [rows, num_groups] float32
    moments,  # [rows, num_tiles, MOMENTS] float32
    work,  # [rows, vocab] float32
    logits,  # [rows, vocab]
    words,  # [slots, SLOT_WORDS]
    counts,  # [lines, vocab], as the next four in RuleTables
    seen,
    allowed,
    edits,
    repeats,
    sample_row,  # [rows], as are the next two
    sample_slot,
    sample_place,
    drafts,  # [slots, WIDTH - 2] int32, for runs; None: a row chooses one token
    vocab,
    logits_stride,
    num_groups,
    along,  # the first line of `allowed` of those by line of logits; -1: drafts are guessed
    WIDTH: tl.constexpr,  # of a run
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    HISTORY: tl.constexpr,
):
    """A program handles TILE groups of one row."""
    row = tl.program_id(1)
    target = tl.load(sample_row + row)
    if target >= 0:
        slot = tl.load(sample_slot + row)
        scale, line = scale_of(real(words, slot, TEMPERATURE)), line_of(words, slot)
        sigma = real(words, slot, TOP_N_SIGMA)
        at, own = logits + row.to(tl.int64) * logits_stride, row.to(tl.int64) * num_groups
        if (line < 0) & (is_narrowed(words, slot) == 0):
            group = tl.program_id(0) * TILE + tl.arange(0, TILE)
            token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            x = tl.load(at + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
            sum_up(best + own, mass + own, x, group, num_groups, scale)
        else:
            place = tl.load(sample_place + row)
            guesses, mask = drafts, line
            if drafts is not None:
                guesses, mask = drafts + slot * (WIDTH - 2), mask_of(words, slot, line, row, target % WIDTH > 0, along)
            count, mean, square = 0.0, 0.0, 0.0
            if (line >= 0) & ((tl.load(word(words, slot, RULE_KINDS)) & IS_REPEATS) != 0):
                first = tl.program_id(0) * TILE * GROUP
                mine = repeats + line.to(tl.int64) * (HEAD + PARTS_OF_LINE * HISTORY)
                count_here = tl.minimum(TILE * GROUP, vocab - first)
                scatter(lengths_in(work + row.to(tl.int64) * vocab), mine, first, count_here, HISTORY, PART * GROUP)
            for part in range(0, TILE, PART):
                group = tl.program_id(0) * TILE + part + tl.arange(0, PART)
                token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
                x = tl.load(at + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
                first = (tl.program_id(0) * TILE + part) * GROUP
                x = ruled(
                    x, token, first, first + PART * GROUP, vocab, work + row.to(tl.int64) * vocab, words, slot, line,
                    place, counts, seen, allowed, mask, edits, guesses, target % WIDTH,
                )  # fmt: skip
                sum_up(best + own, mass + own, x, group, num_groups, scale)
                if sigma > 0.0:
                    count_b, mean_b, square_b = moments_of(x)
                    count, mean, square = join_moments(count, mean, square, count_b, mean_b, square_b)
            if sigma > 0.0:
                tile = row.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
                at_moments = moments + tile * LINE_OF_MOMENTS
                tl.store(at_moments, count)
                tl.store(at_moments + 1, mean)
                tl.store(at_moments + 2, square)


def groups(
    best: Tensor,
    mass: Tensor,
    moments: Tensor,
    work: Tensor,
    logits: Tensor,
    slots: SlotTensors,
    tables: RuleTables,
    sample_row: Tensor,
    sample_slot: Tensor,
    sample_place: Tensor,
    width: int = 1,
    guesses: bool = False,
) -> None:
    """Write best and mass float32 [rows, num_groups], except lines of rows whose sample_row is -1.

    moments float32 [rows or more, ceil(num_groups / TILE), MOMENTS]: receives those of rows with top-n-sigma.
    work float32 [rows or more, vocab]: receives logits of rows with rules, after the rules. logits [rows, vocab],
    bfloat16, float16 or float32, unit stride along the row; width: places of a run; guesses: tokens of drafts are
    chosen, without the masks that change with each token; the rest as in StepInputs.
    """
    rows, vocab = logits.shape
    num_groups = best.shape[1]
    assert logits.stride(1) == 1 and best.is_contiguous() and mass.shape == best.shape and mass.is_contiguous()
    assert num_groups == -(-vocab // GROUP) and min(len(best), len(work), len(sample_row), len(sample_place)) >= rows
    assert work.is_contiguous() and work.shape[1] == tables.counts.shape[1] == vocab
    assert moments.is_contiguous() and moments.shape[1:] == (triton.cdiv(num_groups, TILE), MOMENTS)
    groups_kernel[(triton.cdiv(num_groups, TILE), rows)](
        best, mass, moments, work, logits, slots.words, tables.counts, tables.seen, tables.allowed, tables.edits,
        tables.repeats, sample_row, sample_slot, sample_place, slots.drafts if width > 1 else None, vocab,
        logits.stride(0), num_groups, -1 if guesses else len(tables.counts),
        WIDTH=width, GROUP=GROUP, TILE=TILE, HISTORY=tables.history, num_warps=4,
    )  # fmt: skip


def groups_reference(
    best: Tensor,
    mass: Tensor,
    moments: Tensor,
    work: Tensor,
    logits: Tensor,
    slots: SlotTensors,
    tables: RuleTables,
    sample_row: Tensor,
    sample_slot: Tensor,
    sample_place: Tensor,
    width: int = 1,
    guesses: bool = False,
) -> None:
    rows, vocab = logits.shape
    num_groups = best.shape[1]
    heat, rule_line = slots.real(SlotWord.TEMPERATURE), slots.word(SlotWord.RULE_LINE)
    for row in range(rows):
        if int(sample_row[row]) < 0:
            continue
        x, slot = logits[row].float(), int(sample_slot[row])
        if int(rule_line[slot]):
            before = int(sample_row[row]) % width
            along = -1 if guesses else len(tables.counts)
            mask = mask_reference(slots, slot, row, before > 0, along) if width > 1 else int(rule_line[slot]) - 1
            x = work[row] = ruled_reference(x, tables, slots, slot, int(sample_place[row]), mask, before)
        if float(slots.real(SamplerWord.TOP_N_SIGMA)[slot]) > 0:
            moments[row] = moments_reference(x, TILE * GROUP)
        line = torch.full((num_groups * GROUP,), float("-inf"))
        line[:vocab] = x
        line = line.view(num_groups, GROUP)
        top = line.amax(1)
        anchor = torch.where(top == float("-inf"), 0.0, top)
        best[row] = top
        mass[row] = torch.exp2((line - anchor[:, None]) * scale_reference(float(heat[slot]))).sum(1)


def scale_reference(heat: float) -> float:
    return math.log2(math.e) / max(heat, LEAST_HEAT) if heat > 0 else math.log2(math.e)
