"""bench sample: times a step's sampling of tokens by rows and kind, against one reading of the logits and torch.

Owner: main thread. It calls the kernels' `choose` on an accelerator, and the sampler of the CPU's steps on a CPU. The
logits are like a model's: normally distributed, plus forty tokens with high logits. The floor is one reading of the
logits at a copy's rate; the reference is torch's argmax, or softmax, sort, cut and multinomial.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from _fast.layout import SlotWord
from engine.base.request import SamplingParams
from engine.kernels.sampling.choose import choose, choose_room
from engine.kernels.sampling.rules import rule_tables
from engine.kernels.step_tensors import empty_slots
from engine.sampling.sampler import Sampler
from server.bench.options import SampleOptions
from server.bench.output import finish
from server.bench.timing import chosen_device, rates, time_of

STANDING_OUT = 40


@dataclass(frozen=True, slots=True)
class Kind:
    """How a row's token is chosen."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


KINDS = {
    "greedy": Kind(0.0),
    "drawn": Kind(0.8),
    "top_p": Kind(0.8, top_p=0.95),
    "top_k_top_p": Kind(0.6, top_k=20, top_p=0.95),
    "min_p": Kind(0.8, min_p=0.05),
}


def run(options: SampleOptions) -> int:
    """The command's exit status."""
    try:
        device = chosen_device(options.device)
    except ValueError as error:
        print(f"omniloop: {error}", file=sys.stderr)
        return 2
    with torch.inference_mode():
        return finish(options, measure(options, device))


def measure(options: SampleOptions, device: str) -> dict[str, float]:
    """Microseconds by rows and kind."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    copied, _ = rates(device, dtype)
    found = {"copy_gigabytes_per_s": copied / 1e9}
    for rows in options.rows:
        logits = logits_of(rows, options.vocab, device, dtype)
        floor = logits.numel() * dtype.itemsize / copied
        found[f"{rows}_floor_us"] = floor * 1e6
        for name, kind in KINDS.items():
            call = chooser(kind, logits) if device == "cuda" else host_chooser(kind, logits)
            found[f"{rows}_{name}_us"] = time_of([call], device) * 1e6
            found[f"{rows}_{name}_torch_us"] = time_of([partial(reference, kind, logits)], device) * 1e6
    return found


def logits_of(rows: int, vocab: int, device: str, dtype: torch.dtype) -> Tensor:
    """Logits [rows, vocab] like those of a language model."""
    logits = torch.randn(rows, vocab, device=device) * 2.5
    places = torch.randint(0, vocab, (rows, STANDING_OUT), device=device)
    steps = 22 - 0.25 * torch.arange(STANDING_OUT, device=device).float()
    return logits.scatter_(1, places, steps.expand(rows, -1)).to(dtype)


def chooser(kind: Kind, logits: Tensor) -> Callable[[], object]:
    """A call of the kernels' sampling."""
    rows, vocab = logits.shape
    slots, numbers = empty_slots(rows, 1, 1, logits.device), torch.arange(rows, dtype=torch.int32, device=logits.device)
    slots.real(SlotWord.TEMPERATURE)[:rows] = kind.temperature
    slots.word(SlotWord.TOP_K)[:rows] = kind.top_k
    slots.real(SlotWord.TOP_P)[:rows] = kind.top_p
    slots.real(SlotWord.MIN_P)[:rows] = kind.min_p
    slots.seed[:rows] = numbers + 7
    room, tables = choose_room(rows, vocab, logits.device), rule_tables(1, vocab, logits.device)
    tokens = torch.zeros(rows, dtype=torch.int32, device=logits.device)
    return lambda: choose(tokens, slots, tables, room, logits, numbers, numbers, numbers)


def host_chooser(kind: Kind, logits: Tensor) -> Callable[[], object]:
    """A call of the CPU's sampling. The sampler may change the logits, so the time includes a copy for each call."""
    rows, vocab = logits.shape
    sampler, slots = Sampler(rows, vocab), np.arange(rows)
    params = SamplingParams(temperature=kind.temperature, top_k=kind.top_k, top_p=kind.top_p, min_p=kind.min_p)
    for slot in range(rows):
        sampler.admit(slot, params, np.zeros(1, np.int32), slot + 7)
    return lambda: sampler.sample(logits.clone(), slots, slots)


def reference(kind: Kind, logits: Tensor) -> Tensor:
    """Sampling with torch."""
    if kind.temperature == 0:
        return logits.argmax(dim=-1)
    probs = torch.softmax(logits.float() / kind.temperature, dim=-1)
    if kind.top_k or kind.top_p < 1 or kind.min_p:
        probs, order = probs.sort(dim=-1, descending=True)
        cut = probs.cumsum(dim=-1) - probs >= kind.top_p
        cut |= probs < kind.min_p * probs[:, :1]
        if kind.top_k:
            cut[:, kind.top_k :] = True
        probs = probs.masked_fill(cut, 0.0)
        return order.gather(1, torch.multinomial(probs, 1))
    return torch.multinomial(probs, 1)
