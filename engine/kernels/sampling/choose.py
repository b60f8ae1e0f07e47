"""Token choice on the device, one per row of logits: rules, then greedy or a draw with min-p, top-k, top-p; no sort.

    groups (one pass over the logits; applies the rules of rows that have rules)
        -> pick (draws from the whole row: greedy, temperature, most rows with top-p)
        -> cut (draws above a threshold: top-k, min-p, and rows that pick left open; counts tokens for the rules)

A row's token depends only on its logits, its slot's parameters and rules, and its place in the answer, not on the
number of rows or on the row's position. Rows whose logits contain NaN or +inf, or no finite value, get -1; -inf is a
ban. User: engine/sampling/device.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from _fast.layout import SlotWord
from engine.kernels.sampling.cut import CHUNK, cut_kernel, draw_reference, threshold_reference
from engine.kernels.sampling.groups import GROUP, groups, groups_reference
from engine.kernels.sampling.pick import OPEN, is_tried_reference, pick_kernel, pick_reference
from engine.kernels.sampling.rules import RuleTables, count_reference
from engine.kernels.sampling.top_p_rejection import LANES, LEAST_P, TRIALS, WIDE
from engine.kernels.step_tensors import SlotTensors
from engine.kernels.target import triton


@dataclass(frozen=True, slots=True, eq=False)
class ChooseRoom:
    """Workspace of `choose`, allocated once; a call's results in it are valid until the next call."""

    best: Tensor  # [max_rows, num_groups] float32: each group's largest logit
    mass: Tensor  # [max_rows, num_groups] float32
    chosen: Tensor  # [max_rows, num_groups] int32: groups that reach the row's bound
    threshold: Tensor  # [max_rows] float32: the smallest logit that can be drawn, if requested; else -inf
    work: Tensor  # [max_rows, vocab] float32: logits of rows with rules, after the rules


def choose_room(max_rows: int, vocab: int, device: str | torch.device) -> ChooseRoom:
    """Allocate the workspace for steps of up to max_rows rows: per row 4 bytes per token, and 12 per GROUP tokens."""

    def lines(dtype: torch.dtype) -> Tensor:
        return torch.zeros(max_rows, -(-vocab // GROUP), dtype=dtype, device=device)

    line = torch.full((max_rows,), float("-inf"), device=device)
    work = torch.zeros(max_rows, vocab, device=device)
    return ChooseRoom(lines(torch.float32), lines(torch.float32), lines(torch.int32), line, work)


def choose(
    tokens_out: Tensor,
    slots: SlotTensors,
    tables: RuleTables,
    room: ChooseRoom,
    logits: Tensor,
    sample_row: Tensor,
    sample_slot: Tensor,
    sample_place: Tensor,
    thresholds: bool = False,
) -> None:
    """Write tokens_out[sample_row] and SlotWord.LAST_TOKEN of sample_slot (0 for -1); sample_row -1 writes nothing.

    tokens_out int32 [max_rows]; logits [rows, vocab], bfloat16, float16 or float32; sample_* int32 [rows or more].
    thresholds: fill room.threshold with the smallest logit of every row that can be drawn, which rows with only top-p
    do not need otherwise. The tokens are the same.
    """
    if not logits.is_cuda:
        choose_reference(tokens_out, slots, tables, room, logits, sample_row, sample_slot, sample_place, thresholds)
        return
    launch_choose(tokens_out, slots, tables, room, logits, sample_row, sample_slot, sample_place, thresholds)


def launch_choose(
    tokens_out: Tensor,
    slots: SlotTensors,
    tables: RuleTables,
    room: ChooseRoom,
    logits: Tensor,
    sample_row: Tensor,
    sample_slot: Tensor,
    sample_place: Tensor,
    thresholds: bool = False,
) -> None:
    """Launch the three kernels on grids that depend only on shapes."""
    rows, vocab = logits.shape
    if rows == 0:
        return
    num_groups = room.best.shape[1]
    assert len(sample_place) >= rows and len(room.best) >= rows and tokens_out.is_contiguous()
    sampled = sample_row, sample_slot, sample_place
    groups(room.best, room.mass, room.work, logits, slots, tables, *sampled)
    first = tokens_out, room.threshold, room.chosen, room.best, room.mass, room.work, logits, slots.words
    last = *sampled, vocab, logits.stride(0), num_groups
    same = {"OPEN": OPEN, "TRIALS": TRIALS, "GROUP": GROUP, "num_warps": 8}
    pick_kernel[(rows,)](*first, *last, **same, LEAST_P=LEAST_P, LANES=LANES, CHUNK=WIDE)
    lanes, shift = triton.next_power_of_2(num_groups), 16 if logits.dtype is torch.bfloat16 else 0
    cut_kernel[(rows,)](
        *first, tables.counts, tables.seen, *last, **same, EXACT=thresholds, SHIFT=shift, LANES=lanes, CHUNK=CHUNK
    )


def choose_reference(
    tokens_out: Tensor,
    slots: SlotTensors,
    tables: RuleTables,
    room: ChooseRoom,
    logits: Tensor,
    sample_row: Tensor,
    sample_slot: Tensor,
    sample_place: Tensor,
    thresholds: bool = False,
) -> None:
    vocab = logits.shape[1]
    sampled = sample_row, sample_slot, sample_place
    groups_reference(room.best, room.mass, room.work, logits, slots, tables, *sampled)
    heats, seeds, top_k = slots.real(SlotWord.TEMPERATURE), slots.seed, slots.word(SlotWord.TOP_K)
    top_p, min_p = slots.real(SlotWord.TOP_P), slots.real(SlotWord.MIN_P)
    for row, (target, slot) in enumerate(zip(sample_row.tolist()[: len(logits)], sample_slot.tolist())):
        if target < 0:
            continue
        rules = int(slots.word(SlotWord.RULE_LINE)[slot])
        line = room.work[row] if rules else logits[row].float()
        token, least = -1, float("-inf")
        if bool((line < float("inf")).all()) and float(line.max()) > float("-inf"):
            heat, seed, place = float(heats[slot]), int(seeds[slot]), int(sample_place[row])
            limits = int(top_k[slot]), float(top_p[slot]), float(min_p[slot])
            if heat > 0 and (0 < limits[0] < vocab or limits[1] < 1 or limits[2] > 0):
                token, least = cut_reference(line, room.best[row], room.mass[row], heat, limits, seed, place)
            else:
                token = pick_reference(line, room.best[row], room.mass[row], heat, seed, place)
        tokens_out[target] = token
        slots.word(SlotWord.LAST_TOKEN)[slot] = max(token, 0)
        room.threshold[row] = least
        if rules and token >= 0:
            count_reference(token, tables, slots, slot)


def cut_reference(
    line: Tensor, best: Tensor, mass: Tensor, heat: float, limits: tuple[int, float, float], seed: int, place: int
) -> tuple[int, float]:
    """Return token and threshold of a row with limits (top-k, top-p, min-p); line, best and mass as for
    pick_reference."""
    least = threshold_reference(line, heat, *limits)
    for trial in range(TRIALS if is_tried_reference(*limits, len(line)) else 0):
        token = pick_reference(line, best, mass, heat, seed, place, trial)
        if float(line[token]) >= least:
            return token, least
    return draw_reference(line, least, heat, seed, place), least
