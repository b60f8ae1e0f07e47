"""Choosing tokens on the accelerator: cases for tests/bench/gpu_kernels.py's table.

Peaked logits are a model's: a few dozen tokens hold the mass. Flat ones (top-p over a normal distribution's whole
vocabulary) are the worst that top-p meets. Bytes are one reading of the logits: the least that any method moves.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.kernels.sampling.choose import choose, choose_room
from tests.kernels.sampling import rows_of

VOCAB = 151936  # Qwen3
GREEDY, DRAWN = (0.0, 0, 1.0, 0.0), (0.8, 0, 1.0, 0.0)
TOP_P, TOP_K_P = (0.8, 0, 0.95, 0.0), (0.6, 20, 0.95, 0.0)


def peaked(rows: int) -> torch.Tensor:
    """Logits as of a language model: a wide bell, and forty tokens that stand out by steps."""
    logits = torch.randn(rows, VOCAB, device="cuda") * 2.5
    place = torch.randint(0, VOCAB, (rows, 40), device="cuda")
    logits.scatter_(1, place, 22 - 0.25 * torch.arange(40, device="cuda").float().expand(rows, -1))
    return logits.bfloat16()


def flat(rows: int) -> torch.Tensor:
    """A normal distribution of deviation 1."""
    return torch.randn(rows, VOCAB, device="cuda").bfloat16()


def case(time_of: Callable, name: str, kind: tuple[float, int, float, float], logits: list[torch.Tensor]) -> dict:
    """One line of the table: every row of each of `logits` chosen by `kind`."""
    rows = len(logits[0])
    step, room = rows_of(rows, [kind], "cuda"), choose_room(rows, VOCAB, "cuda")

    def call(x: torch.Tensor) -> None:
        choose(step.tokens, step.slots, room, x, step.row, step.slot, step.place)

    times = time_of([lambda x=x: call(x) for x in logits])
    return {"name": f"choose {rows}, {name}", "times": times, "bytes": rows * VOCAB * 2}


def sampling_cases(time_of: Callable, sizes: tuple[int, ...] = (1, 32, 256)) -> list[dict]:
    """Rows (name, times, bytes); `time_of` takes calls that differ in their inputs only."""
    found = []
    for rows in sizes:
        sets = max(2, min(4, (60 << 20) // (rows * VOCAB * 2) + 1))
        model, normal = ([make(rows) for _ in range(sets)] for make in (peaked, flat))
        found += [
            case(time_of, "greedy", GREEDY, model),
            case(time_of, "drawn", DRAWN, model),
            case(time_of, "top-p", TOP_P, model),
            case(time_of, "top-k and top-p", TOP_K_P, model),
            case(time_of, "top-p, flat", TOP_P, normal),
        ]
    return found
