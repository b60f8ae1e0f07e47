"""Steps for the sampling kernels: slots with parameters of every kind, rows in any order, and float64 definitions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from _fast.layout import SlotWord
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


@dataclass
class Rows:
    """What `choose` reads besides the logits; row r belongs to slot `slot[r]` and plan row `row[r]`."""

    slots: SlotTensors
    row: Tensor
    slot: Tensor
    place: Tensor
    tokens: Tensor


def rows_of(count: int, kinds: list[tuple[float, int, float, float]], device: str = "cpu") -> Rows:
    """Row r has kind r modulo their number, and seed and place of its own."""
    slots = empty_slots(count, 1, 1, device)
    fields = (
        slots.real(SlotWord.TEMPERATURE), slots.word(SlotWord.TOP_K), slots.real(SlotWord.TOP_P),
        slots.real(SlotWord.MIN_P),
    )  # fmt: skip
    for number, field in enumerate(fields):
        field[:count] = torch.tensor([kinds[r % len(kinds)][number] for r in range(count)], device=device)
    slots.seed[:count] = torch.arange(count, device=device) * 0x1234_5678_9ABC + 7
    row = torch.arange(count, dtype=torch.int32, device=device)
    tokens = torch.full((count + 2,), -7, dtype=torch.int32, device=device)
    return Rows(slots, row + 1, row.clone(), row * 3 + 1, tokens)


def kept(line: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The tokens that may be drawn: the definition, over sorted float64."""
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
    """Whether counts by token may be of draws by weight, some of it 0: by chi-square, at one in a thousand."""
    if seen[weight == 0].any():
        return False
    wanted = weight / weight.sum() * seen.sum()
    used = wanted >= 5
    parts = [((seen[used] - wanted[used]) ** 2 / wanted[used]).sum()]
    if wanted[~used].sum() >= 5:
        parts.append((seen[~used].sum() - wanted[~used].sum()) ** 2 / wanted[~used].sum())
    freedom = used.sum() + len(parts) - 2
    return bool(sum(parts) <= freedom * (1 - 2 / (9 * freedom) + 3.09 * np.sqrt(2 / (9 * freedom))) ** 3)
