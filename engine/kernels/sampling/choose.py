"""Token choice on the device, one per row of logits: rules, then greedy or a draw with its limits; no sort.

    groups (one pass over the logits; applies the rules of rows that have rules)
        -> pick (draws from the whole row: greedy, temperature, most rows with top-p)
        -> cut (draws between bounds: top-n-sigma, top-k, min-p, XTC, and rows that pick left open; counts tokens)

A row's token depends only on its logits, its slot's parameters and rules, and its place in the answer, not on the
number of rows or on the row's position. Rows whose logits contain NaN or +inf, or no finite value, get -1; -inf is a
ban. User: engine/sampling/device.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from _fast.layout import SamplerWord, SlotWord
from engine.kernels.sampling.cut import CHUNK, cut_kernel, draw_reference, most_reference, threshold_reference
from engine.kernels.sampling.groups import GROUP, TILE, groups, groups_reference
from engine.kernels.sampling.pick import OPEN, is_tried_reference, pick_kernel, pick_reference
from engine.kernels.sampling.rules import RuleTables, record_reference
from engine.kernels.sampling.top_n_sigma import MOMENTS, top_n_sigma_reference
from engine.kernels.sampling.top_p_rejection import LANES, LEAST_P, TRIALS, WIDE
from engine.kernels.sampling.xtc import xtc_of_reference
from engine.kernels.step_tensors import SlotTensors
from engine.kernels.target import triton


@dataclass(frozen=True, slots=True, eq=False)
class ChooseRoom:
    """Workspace of `choose`, allocated once; a call's results in it are valid until the next call."""

    best: Tensor  # [max_rows, num_groups] float32: each group's largest logit
    mass: Tensor  # [max_rows, num_groups] float32
    chosen: Tensor  # [max_rows, num_groups] int32: groups that reach the row's bound
    moments: Tensor  # [max_rows, num_tiles, MOMENTS] float32: of rows with top-n-sigma
    bounds: Tensor  # [max_rows, 2] float32: the smallest and the largest logit that can be drawn, if requested
    work: Tensor  # [max_rows, vocab] float32: logits of rows with rules, after the rules


def choose_room(max_rows: int, vocab: int, device: str | torch.device) -> ChooseRoom:
    """Allocate the workspace for steps of up to max_rows rows: per row 4 bytes per token, and 12 per GROUP tokens."""

    def lines(dtype: torch.dtype) -> Tensor:
        return torch.zeros(max_rows, -(-vocab // GROUP), dtype=dtype, device=device)

    bounds = torch.tensor([float("-inf"), float("inf")], device=device).repeat(max_rows, 1)
    moments = torch.zeros(max_rows, -(-vocab // (GROUP * TILE)), MOMENTS, device=device)
    work = torch.zeros(max_rows, vocab, device=device)
    return ChooseRoom(lines(torch.float32), lines(torch.float32), lines(torch.int32), moments, bounds, work)


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
    width: int = 1,
    guesses: bool = False,
) -> None:
    """Write tokens_out[sample_row] and SlotWord.LAST_TOKEN of sample_slot (0 for -1); sample_row -1 writes nothing.

    tokens_out int32 [max_rows]; logits [rows, vocab], bfloat16, float16 or float32; sample_* int32 [rows or more].
    thresholds: fill room.bounds of every row, which greedy rows and rows with only top-p do not need otherwise. The
    tokens are the same. width: places of a run; above 1, sample_row is a place among all runs, tokens_out are the runs
    int32 [max_rows * width], the slot's drafts before the place count for the rules, and LAST_TOKEN and the rules'
    counts are left to `verify`. guesses: the tokens are drafts, see `groups`.
    """
    run = launch_choose if logits.is_cuda else choose_reference
    run(tokens_out, slots, tables, room, logits, sample_row, sample_slot, sample_place, thresholds, width, guesses)


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
    width: int = 1,
    guesses: bool = False,
) -> None:
    """Launch the three kernels on grids that depend only on shapes."""
    rows, vocab = logits.shape
    if rows == 0:
        return
    num_groups = room.best.shape[1]
    assert len(sample_place) >= rows and len(room.best) >= rows and tokens_out.is_contiguous()
    sampled = sample_row, sample_slot, sample_place
    groups(room.best, room.mass, room.moments, room.work, logits, slots, tables, *sampled, width, guesses)
    first = tokens_out, room.bounds, room.chosen, room.best, room.mass, room.work, logits, slots.words
    last = *sampled, vocab, logits.stride(0), num_groups
    same = {"RUNS": width > 1, "OPEN": OPEN, "TRIALS": TRIALS, "GROUP": GROUP, "num_warps": 8}
    pick_kernel[(rows,)](*first, *last, **same, LEAST_P=LEAST_P, LANES=LANES, CHUNK=WIDE)
    lanes, shift = triton.next_power_of_2(num_groups), 16 if logits.dtype is torch.bfloat16 else 0
    tiles = room.moments.shape[1]
    cut_kernel[(rows,)](
        *first, room.moments, tables.counts, tables.seen, tables.repeats, tables.breakers, *last, tiles, **same,
        EXACT=thresholds, SHIFT=shift, LANES=lanes, TILES=triton.next_power_of_2(tiles), WIDE=LANES, CHUNK=CHUNK,
        HISTORY=tables.history,
    )  # fmt: skip


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
    width: int = 1,
    guesses: bool = False,
) -> None:
    sampled = sample_row, sample_slot, sample_place
    groups_reference(room.best, room.mass, room.moments, room.work, logits, slots, tables, *sampled, width, guesses)
    for row, (target, slot) in enumerate(zip(sample_row.tolist()[: len(logits)], sample_slot.tolist())):
        if target < 0:
            continue
        rules = int(slots.word(SlotWord.RULE_LINE)[slot])
        line = room.work[row] if rules else logits[row].float()
        token, least, most = -1, float("-inf"), float("inf")
        if bool((line < float("inf")).all()) and float(line.max()) > float("-inf"):
            token, least, most = cut_reference(
                line, room.best[row], room.mass[row], slots, slot, int(sample_place[row])
            )
        tokens_out[target] = token
        room.bounds[row] = torch.tensor([least, most])
        if width > 1:
            continue
        slots.word(SlotWord.LAST_TOKEN)[slot] = max(token, 0)
        if rules and token >= 0:
            record_reference(token, tables, slots, slot, int(sample_place[row]))


def cut_reference(
    line: Tensor, best: Tensor, mass: Tensor, slots: SlotTensors, slot: int, place: int
) -> tuple[int, float, float]:
    """Return token, smallest and largest possible logit of a row; line, best and mass as for pick_reference."""
    heat, seed, vocab = float(slots.real(SlotWord.TEMPERATURE)[slot]), int(slots.seed[slot]), len(line)
    sigmas = float(slots.real(SamplerWord.TOP_N_SIGMA)[slot])
    bound = top_n_sigma_reference(line, sigmas) if sigmas > 0 else float("-inf")
    if heat <= 0:
        return pick_reference(line, best, mass, heat, seed, place), bound, float("inf")
    top_k = int(slots.word(SlotWord.TOP_K)[slot])
    top_p, min_p = float(slots.real(SlotWord.TOP_P)[slot]), float(slots.real(SlotWord.MIN_P)[slot])
    chance, threshold = (
        float(slots.real(one)[slot]) for one in (SamplerWord.XTC_PROBABILITY, SamplerWord.XTC_THRESHOLD)
    )
    likely = xtc_of_reference(chance, threshold, heat, seed, place)
    limited = 0 < top_k < vocab or top_p < 1 or min_p > 0 or sigmas > 0
    if not limited and likely >= 1:
        return pick_reference(line, best, mass, heat, seed, place), float("-inf"), float("inf")
    least = threshold_reference(line, heat, top_k, top_p, min_p, bound)
    tried = is_tried_reference(top_k, top_p, min_p, vocab) and sigmas <= 0 and likely >= 1
    for trial in range(TRIALS if tried else 0):
        token = pick_reference(line, best, mass, heat, seed, place, trial)
        if float(line[token]) >= least:
            return token, least, float("inf")
    most = most_reference(line, least, heat, likely)
    return draw_reference(line, least, heat, seed, place, most), least, most
