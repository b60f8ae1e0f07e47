"""Adapters (LoRA) on a card: steps with them against steps of the same model without, swaps, first tokens, start.

Random weights of real shapes, one engine per process, without HTTP. Engines with and without places alternate, --rounds
times each. Step times as in gpu_step. `unused`: places, but no row has an adapter. Adapters change every layer that may
have one; they share their matrices in host memory and differ in their hash. Prints each case with its ratio to the
engine without places, and writes gpu_lora.json into --out.
Run: python -m tests.bench.gpu_lora [--only 8b,gpt-oss-20b,30b-a3b] [--rounds 2] [--out DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from engine import Engine, EngineConfig, Request, SamplingParams
from engine.base.config import LoraConfig
from engine.layers.moe import Experts
from engine.lora.adapter import Adapter, PackedExperts, PackedSite
from engine.lora.sites import changed
from engine.step.parts.adapters import Adapters
from tests.bench.gpu_step import SWITCH_INTERVAL_S, WINDOW, measured_in, steps_of
from tests.bench.shapes import SHAPES, write_folder

PLACES, REPEATS, LONG = 8, 3, 8192
ARRIVAL = 0.05  # mean seconds between requests: about half of the places are in use at a time


class Case(NamedTuple):
    """Rows of a step, and how many adapters they have."""

    rows: int
    adapters: int

    @property
    def name(self) -> str:
        return f"{self.rows} rows, " + (f"{self.adapters} adapters" if self.adapters else "unused")


def cases_of(shape: str) -> list[Case]:
    """The cases of a shape; on a CPU, for which "tiny" is meant, few rows."""
    rows = (1, 4) if shape == "tiny" else (1, 32, 256)
    return [Case(count, adapters) for count in rows for adapters in (0, 1, min(8, rows[-1])) if adapters <= count]


RANKS = {"8b": 16, "gpt-oss-20b": 32, "30b-a3b": 16, "0.6b": 16, "tiny": 4}


def drawn(runtime: Any, rank: int, count: int) -> list[Adapter]:
    """Adapters of every layer, with the same matrices and different hashes."""
    sites: dict[str, PackedSite | PackedExperts] = {}
    for path, layer in changed(runtime.model, LoraConfig()):
        if isinstance(layer, Experts):
            a = torch.empty(layer.num_experts, len(layer.pieces) * rank, layer.in_features, dtype=runtime.model.dtype)
            b = tuple(torch.empty(layer.num_experts, rows, rank, dtype=a.dtype) for rows in layer.pieces)
            sites[path] = PackedExperts(a.uniform_(-0.01, 0.01), tuple(each.uniform_(-0.01, 0.01) for each in b))
        else:
            a = torch.empty(len(layer.out_features) * rank, layer.in_features, dtype=runtime.model.dtype)
            b = tuple(torch.empty(rows, rank, dtype=a.dtype) for rows in layer.out_features)
            sites[path] = PackedSite(a.uniform_(-0.01, 0.01), tuple(each.uniform_(-0.01, 0.01) for each in b))
    nbytes = sum(site.nbytes for site in sites.values())
    names = [f"adapter {number}" for number in range(count)]
    return [Adapter(name, hashlib.sha256(f"{name}, {rank}".encode()).digest(), rank, sites, nbytes) for name in names]


async def measured(shape: str, folder: str, device: str, places: bool) -> dict[str, float]:
    """Numbers of one engine, by case."""
    rank = RANKS[shape]
    lora = LoraConfig(
        max_loras=PLACES,
        max_rank=rank,
        max_cpu_loras=1 if SHAPES[shape].get("num_experts") or "gpt" in shape else 2 * PLACES,
    )
    begun = time.perf_counter()
    config = EngineConfig(folder, load_format="dummy", device=device, enable_prefix_caching=False)
    engine = Engine(replace(config, lora=lora if places else None))
    await engine.start()
    seen = {"start, s": [time.perf_counter() - begun]}
    seen |= {f"start: {phase}, s": [seconds] for phase, seconds in engine.startup.items()}
    window = 16 if shape == "tiny" else WINDOW
    draw, vocab = np.random.default_rng(0), engine.limits.vocab_size
    adapters, long = list[Adapter](), min(LONG, engine.limits.max_model_len - 8)
    if places:
        adapters = await engine.on_device(lambda runtime: drawn(runtime, rank, 2 * PLACES))
        seen["adapter, MB"] = [adapters[0].nbytes / 1e6]

    def requests(rows: int, of: list[Adapter], length: int = 128, tokens: int = 0) -> list[Request]:
        prompts = draw.integers(2, vocab, (rows, length), dtype=np.int32)
        sampling = SamplingParams(max_tokens=tokens or window + 2 * rows // 8, temperature=0.0, ignore_eos=True)
        made = [Request(prompt, sampling) for prompt in prompts]
        return [replace(each, lora=of[k % len(of)]) for k, each in enumerate(made)] if of else made

    for _ in range(REPEATS):
        for case in cases_of(shape):
            if places or not case.adapters:
                step_s, _ = await steps_of(engine, requests(case.rows, adapters[: case.adapters]))
                seen.setdefault(f"{case.name}, ms", []).append(1e3 * step_s)
        for number in (0, 1) if places else (0,):
            _, first_s = await steps_of(engine, requests(1, adapters[:number], long, 2))
            seen.setdefault(f"prompt of {long} tokens, {'one adapter' if number else 'unused'}, ms", []).append(
                1e3 * first_s
            )
    if places:
        seen |= await swapped(engine, adapters, requests)
    await engine.stop()
    return {name: min(values[1:]) if len(values) > 1 else values[0] for name, values in seen.items()}


async def swapped(engine: Engine, adapters: list[Adapter], requests: Any) -> dict[str, list[float]]:
    """Seconds of a swap, first tokens with all adapters resident and with twice as many, and others' gaps."""
    part = await engine.on_device(lambda runtime: runtime.executor.part(Adapters))
    found: dict[str, list[float]] = {}
    arrivals = np.random.default_rng(1).exponential(ARRIVAL, 8 * PLACES)
    for label, of in (("all resident", adapters[:PLACES]), ("twice as many as places", adapters)):
        before = part.counts

        async def first(request: Request) -> float:
            begun, at = time.perf_counter(), 0.0
            async for _ in engine.submit(request):
                at = at or time.perf_counter() - begun
            return at

        sent = []
        for each in requests(4 * PLACES * 2, of, 128, 32):  # the same arrivals for both
            sent.append(asyncio.ensure_future(first(each)))
            await asyncio.sleep(arrivals[len(sent) - 1])
        firsts = await asyncio.gather(*sent)
        found[f"first token p50, {label}, ms"] = [1e3 * statistics.median(firsts)]
        after = part.counts
        if swaps := after.swaps - before.swaps:
            found["swap, ms"] = [1e3 * (after.swap_seconds - before.swap_seconds) / swaps]
    ends: list[float] = []
    engine.on_step = lambda stats: ends.append(stats.ended_at)
    resident = adapters[:PLACES]
    for each in resident:
        await first(requests(1, [each], 16, 2)[0])
    for label, of in (("without swaps", 2 * resident), ("while adapters are swapped", adapters[PLACES:] + resident)):
        ends.clear()
        others = [asyncio.ensure_future(first(each)) for each in requests(16, [], 128, 8000)]  # more than they get
        for each in of:
            await first(requests(1, [each], 16, 2)[0])
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        found[f"gap of others p99, {label}, ms"] = [1e3 * float(np.percentile(np.diff(ends), 99))]
    return found


def run_in(shape: str, folder: str, device: str, places: bool) -> dict[str, float]:
    """Runs one engine in a process of its own."""
    command = [sys.executable, "-m", "tests.bench.gpu_lora", "--inside", shape, "--folder", folder]
    command += ["--device", device, *(["--places"] if places else [])]
    return measured_in(command, timeout=560)


def main() -> None:
    """Runs the benchmark and prints each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="8b", help=", ".join(RANKS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--places", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        print(json.dumps(asyncio.run(measured(args.inside, args.folder, args.device, args.places))))
        return
    seen: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        for shape in args.only.split(","):
            folder = Path(name) / shape
            write_folder(folder, SHAPES[shape])
            for _ in range(args.rounds):
                for places in (False, True):
                    for case, value in run_in(shape, str(folder), args.device, places).items():
                        label = "places" if places else "base"
                        seen.setdefault(f"{shape}, {case}", {}).setdefault(label, []).append(value)
    for case in seen:
        print(line(case, seen), flush=True)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "gpu_lora.json").write_text(json.dumps(seen, indent=1))


def line(case: str, seen: dict[str, dict[str, list[float]]]) -> str:
    """The median of the rounds, and its ratio to the same rows of the engine without places."""
    value = statistics.median(next(iter(reversed(seen[case].values()))))
    rows = ", ".join(case.split(", ")[:2])
    base = next((found["base"] for name, found in seen.items() if name.startswith(f"{rows}, ") and "base" in found), [])
    return f"{case}: {value:.3f}" + (f", {value / statistics.median(base):.3f} x base" if base else "")


if __name__ == "__main__":
    main()
