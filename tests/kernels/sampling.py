"""Steps for the sampling kernels: slots with parameters of every kind, rows in any order, and float64 definitions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from _fast.layout import SamplerWord, SlotWord
from engine.base.limits import MAX_EDITS
from engine.kernels.sampling.rules import ALLOWED, COUNTED, SEEN, RuleTables, rule_tables
from engine.kernels.sampling.xtc import xtc_of_reference
from engine.kernels.step_tensors import SlotTensors, empty_slots

# temperature, top_k, top_p, min_p
KINDS = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (0.6, 20, 0.95, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.0, 0, 0.3, 0.0),
    (1.3, 200, 1.0, 0.0),
    (0.8, 0, 1.0, 0.05),
    (1.2, 50, 0.8, 0.02),
    (1.0, 0, 0.7, 0.01),
    (2.0, 0, 0.999, 0.0),
    (0.01, 5, 0.5, 0.0),
]


# one of the kinds above, top_n_sigma, xtc_probability, xtc_threshold
NARROW = [
    ((0.0, 0, 1.0, 0.0), 1.0, 1.0, 0.1),
    ((1.0, 0, 1.0, 0.0), 1.0, 0.0, 0.1),
    ((0.7, 0, 1.0, 0.0), 0.0, 1.0, 0.05),
    ((1.0, 0, 0.9, 0.0), 0.0, 0.5, 0.02),
    ((0.6, 20, 0.95, 0.0), 1.5, 0.5, 0.1),
    ((1.3, 200, 1.0, 0.0), 2.5, 1.0, 0.01),
    ((0.8, 0, 1.0, 0.05), 0.7, 1.0, 0.5),
    ((1.0, 0, 0.9, 0.0), 2.0, 0.0, 0.1),
    ((1.2, 0, 1.0, 0.0), 0.0, 1.0, 0.0),
    ((2.0, 0, 1.0, 0.0), 0.0, 1.0, 0.6),
    ((1.0, 0, 0.3, 0.001), 1.2, 0.5, 0.001),
]

# presence, frequency, repetition, kinds, edits (token, value, until)
RULES = [
    (0.0, 0.0, 1.0, 0, ((3, 2.5, 0), (-1, -4.0, 0), (7, 0.5, 9))),
    (0.5, 0.3, 1.0, COUNTED, ()),
    (0.0, 0.0, 1.3, SEEN, ((1, 9.0, 100), (2, 3.0, 0))),
    (-0.4, 0.0, 0.7, SEEN | COUNTED, ()),
    (0.0, 0.0, 1.0, ALLOWED, ((5, 30.0, 0),)),
    (1.5, -0.2, 1.1, SEEN | COUNTED | ALLOWED, ((4, -1.0, 0), (6, 0.0, 2))),
]


@dataclass
class Rows:
    """Inputs of `choose` besides the logits; row r belongs to slot `slot[r]` and plan row `row[r]`."""

    slots: SlotTensors
    row: Tensor
    slot: Tensor
    place: Tensor
    tokens: Tensor
    tables: RuleTables


def rows_of(
    count: int, kinds: list[tuple[float, int, float, float]], device: str = "cpu", vocab: int = 32, lines: int = 1
) -> Rows:
    """Row r has kind r modulo the number of kinds, and its own seed and place; no row has rules."""
    slots = empty_slots(count, 1, 1, device)
    fields = (
        slots.real(SlotWord.TEMPERATURE),
        slots.word(SlotWord.TOP_K),
        slots.real(SlotWord.TOP_P),
        slots.real(SlotWord.MIN_P),
    )
    for number, field in enumerate(fields):
        field[:count] = torch.tensor([kinds[r % len(kinds)][number] for r in range(count)], device=device)
    slots.seed[:count] = torch.arange(count, device=device) * 0x1234_5678_9ABC + 7
    row = torch.arange(count, dtype=torch.int32, device=device)
    tokens = torch.full((count + 2,), -7, dtype=torch.int32, device=device)
    return Rows(slots, row + 1, row.clone(), row * 3 + 1, tokens, rule_tables(lines, vocab, device))


def narrow_rows(rows: Rows) -> Rows:
    """The same rows; row r has top-n-sigma and XTC of NARROW's entry r modulo their number."""
    count = len(rows.row)
    for number, word in enumerate((SamplerWord.TOP_N_SIGMA, SamplerWord.XTC_PROBABILITY, SamplerWord.XTC_THRESHOLD), 1):
        rows.slots.real(word)[:count] = torch.tensor(
            [NARROW[r % len(NARROW)][number] for r in range(count)], device=rows.row.device
        )
    return rows


def applies_to(rows: Rows, row: int) -> bool:
    """Whether XTC applies to the row's token, if its probability is above 0."""
    seed, place = int(rows.slots.seed[row]), int(rows.place[row])
    chance, threshold = NARROW[row % len(NARROW)][2:]
    return xtc_of_reference(chance, threshold, 1.0, seed, place) < 1


def narrowed_tokens(
    line: Tensor, kind: tuple[float, int, float, float], sigmas: float, chance: float, threshold: float, applies: bool
) -> np.ndarray:
    """The tokens that may be drawn, by the definitions of top-n-sigma and XTC, over float64; every token of greedy rows
    that top-n-sigma keeps."""
    x = line.double().cpu().numpy()
    finite = x[np.isfinite(x)]
    keep = np.isfinite(x) & (x >= (finite.max() - sigmas * finite.std() if sigmas else -np.inf))
    if kind[0] == 0:
        return keep
    keep &= allowed_tokens(torch.from_numpy(np.where(keep, x, -np.inf)), *kind)
    weight = np.where(keep, np.exp((x - finite.max()) / kind[0]), 0)
    likely = keep & (weight >= threshold * weight.sum())
    if applies and chance and threshold <= 0.5 and likely.sum() > 1:
        keep &= x <= x[likely].min()
    return keep


def with_rules(rows: Rows, vocab: int, every: int = 2) -> Rows:
    """The same rows; every `every`-th slot has one of RULES and a line; lines are assigned in reverse order."""
    slots = rows.slots
    ruled = list(range(0, len(rows.row), every))
    device = slots.words.device
    tables = rule_tables(len(ruled), vocab, device)
    draw = torch.Generator().manual_seed(5)
    tables.counts.copy_((torch.randint(0, 9, tables.counts.shape, generator=draw) - 5).clamp(min=0))
    for table in (tables.seen, tables.allowed):
        table.copy_(torch.randint(-(2**31), 2**31 - 1, table.shape, generator=draw))
    for line, token in (tables.counts > 0).nonzero().tolist():  # tokens of the answer count as seen
        tables.seen[line, token >> 5] |= torch.tensor(1 << (token & 31)).to(torch.int32).to(device)
    for number, slot in enumerate(ruled):
        presence, frequency, repetition, kinds, edits = RULES[number % len(RULES)]
        line = len(ruled) - 1 - number
        for word, value in (
            (SlotWord.RULE_LINE, 1 + line),
            (SlotWord.RULE_KINDS, kinds),
            (SlotWord.NUM_EDITS, len(edits)),
        ):
            slots.word(word)[slot] = value
        for word, value in (
            (SlotWord.PRESENCE, presence),
            (SlotWord.FREQUENCY, frequency),
            (SlotWord.REPETITION, repetition),
        ):
            slots.real(word)[slot] = value
        for place, (token, value, until) in enumerate(edits):
            bits = int(torch.tensor(value).view(torch.int32))
            tables.edits[line, place] = torch.tensor([token % vocab, bits, until], dtype=torch.int32)
        tables.edits[line, len(edits) : len(edits) + 2] = MAX_EDITS  # entries beyond the count must not be read
    return replace(rows, tables=tables)


def allowed_tokens(line: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The tokens that may be drawn, by the definition, over sorted float64."""
    x = line.double().cpu().numpy()
    scaled = x / temperature
    probs = np.exp(scaled - scaled.max())
    keep = (probs >= min_p * probs.max()) & np.isfinite(x)
    if top_k:
        ordered = np.sort(np.where(keep, x, -np.inf))[::-1]
        keep &= x >= ordered[min(top_k, len(x)) - 1]
    if top_p < 1:
        order = np.sort(x[keep])[::-1]
        weight = np.exp(order / temperature - scaled.max())
        larger = np.cumsum(weight) - weight
        keep &= x >= order[larger < top_p * weight.sum()].min()
    return keep


def fits(seen: np.ndarray, weight: np.ndarray) -> bool:
    """Whether the counts fit draws with these weights: chi-square at 0.1 %; tokens of weight 0 must not occur."""
    if seen[weight == 0].any():
        return False
    wanted = weight / weight.sum() * seen.sum()
    used = wanted >= 5
    parts = [((seen[used] - wanted[used]) ** 2 / wanted[used]).sum()]
    if wanted[~used].sum() >= 5:
        parts.append((seen[~used].sum() - wanted[~used].sum()) ** 2 / wanted[~used].sum())
    freedom = used.sum() + len(parts) - 2
    if freedom == 0:  # only one token has a weight
        return True
    return bool(sum(parts) <= freedom * (1 - 2 / (9 * freedom) + 3.09 * np.sqrt(2 / (9 * freedom))) ** 3)
