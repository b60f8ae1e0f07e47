"""Choosing tokens on the GPU: cases for the table of tests/bench/gpu_kernels.py.

Peaked logits are a model's: a few dozen tokens hold the mass. Flat logits (top-p over a normal distribution's whole
vocabulary) are the worst case of top-p. The bytes count one reading of the logits: the least that any method moves.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from _fast.layout import SlotWord
from engine.kernels.sampling.choose import ChooseRoom, choose, choose_room
from engine.kernels.sampling.top_logprobs import LINE, top_logprobs
from tests.kernels.sampling import Rows, rows_of, with_rules

VOCAB = 151936  # Qwen3
GREEDY, DRAWN = (0.0, 0, 1.0, 0.0), (0.8, 0, 1.0, 0.0)
TOP_P, TOP_K_P = (0.8, 0, 0.95, 0.0), (0.6, 20, 0.95, 0.0)


def peaked(rows: int) -> torch.Tensor:
    """Logits as of a language model: a wide bell, and forty tokens with clearly higher, graded logits."""
    logits = torch.randn(rows, VOCAB, device="cuda") * 2.5
    place = torch.randint(0, VOCAB, (rows, 40), device="cuda")
    logits.scatter_(1, place, 22 - 0.25 * torch.arange(40, device="cuda").float().expand(rows, -1))
    return logits.bfloat16()


def flat(rows: int) -> torch.Tensor:
    """Logits from a normal distribution with deviation 1."""
    return torch.randn(rows, VOCAB, device="cuda").bfloat16()


def case(time_of: Callable, name: str, kind: tuple[float, int, float, float], logits: list[torch.Tensor]) -> dict:
    """One line of the table: chooses a token by `kind` for every row of each of `logits`."""
    rows = len(logits[0])
    step, room = rows_of(rows, [kind], "cuda", VOCAB), choose_room(rows, VOCAB, "cuda")
    return timed(time_of, f"choose {rows}, {name}", step, room, logits)


def timed(time_of: Callable, name: str, step: Rows, room: ChooseRoom, logits: list[torch.Tensor]) -> dict:
    def call(x: torch.Tensor) -> None:
        choose(step.tokens, step.slots, step.tables, room, x, step.row, step.slot, step.place)

    times = time_of([lambda x=x: call(x) for x in logits])
    return {"name": name, "times": times, "bytes": len(step.row) * VOCAB * 2}


def ruled_case(time_of: Callable, name: str, every: int, logits: list[torch.Tensor]) -> dict:
    """Greedy rows; every `every`-th row has rules of some kind."""
    rows = len(logits[0])
    step = with_rules(rows_of(rows, [GREEDY], "cuda"), VOCAB, every)
    return timed(time_of, f"choose {rows}, {name}", step, choose_room(rows, VOCAB, "cuda"), logits)


def reporting_case(time_of: Callable, name: str, every: int, k: int, logits: list[torch.Tensor]) -> dict:
    """Log-probabilities for every `every`-th row."""
    rows = len(logits[0])
    step, room = rows_of(rows, [GREEDY], "cuda"), choose_room(rows, VOCAB, "cuda")
    step.slots.word(SlotWord.TOP_LOGPROBS)[:rows:every] = 1 + k if every <= rows else 0
    ring, home = torch.zeros(1, rows + 2, LINE, dtype=torch.int32, pin_memory=True), torch.zeros_like(step.row[:1])

    def call(x: torch.Tensor) -> None:
        top_logprobs(ring, room.chosen, x, step.slots, step.tokens, home, step.row, step.slot)

    times = time_of([lambda x=x: call(x) for x in logits])
    return {"name": f"log-probabilities {rows}, {name}", "times": times, "bytes": rows * VOCAB * 2 // every}


def sampling_cases(time_of: Callable, sizes: tuple[int, ...] = (1, 32, 256)) -> list[dict]:
    """Table rows (name, times, bytes); `time_of` takes calls that differ only in their inputs."""
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
            ruled_case(time_of, "greedy, rules on all", 1, model),
            ruled_case(time_of, "greedy, rules on 1 of 32", 32, model),
            reporting_case(time_of, "nobody asks", rows + 1, 5, model),
            reporting_case(time_of, "5 on all", 1, 5, model),
            reporting_case(time_of, "20 on all", 1, 20, model),
        ]
    return found
