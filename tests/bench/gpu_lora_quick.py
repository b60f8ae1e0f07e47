"""Adapters (LoRA) on a card in one short run: one row of gpt-oss-20b, streams of an 8B, and the start of an 8B.

Random weights of real shapes, one engine per process, without HTTP; adapters as in gpu_lora.

    row      one row of gpt-oss-20b without and with an adapter: milliseconds of a step; small engines start soon
    streams  --streams streams of 1,600 tokens in and 600 out, of the base, of one adapter and of eight
    ranks    32 rows of eight adapters of an 8B, all of rank 64, and half of them of rank 8: milliseconds of a step
    load     seconds to load a file of rank 16 for all layers of an 8B from the page cache, in the pool
    start    seconds of starts without and with eight places, twice each and in turn, after the streams' engines have
             filled the caches of compiled kernels; and of their phases

Prints medians and their ratio to the base's, and writes gpu_lora_quick.json into --out. A fresh machine compiles in the
first start of each kind, which is not counted. About 150 seconds; --streams 1,32,256 takes about 80 more.
Run: python -m tests.bench.gpu_lora_quick [--only row,streams,start; ranks,load] [--streams 1,32] [--out DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from engine import Engine, EngineConfig, Request, SamplingParams
from engine.base.config import LoraConfig
from engine.lora.adapter import Adapter
from engine.lora.config import CONFIG
from engine.lora.load import load_adapter
from engine.lora.source import Source
from engine.run.adapters import served
from engine.weights.files import ADAPTER
from tests.bench.gpu_lora import PLACES, RANKS, REPEATS, drawn
from tests.bench.gpu_step import SWITCH_INTERVAL_S, WINDOW, measured_in, steps_of
from tests.bench.shapes import SHAPES, write_folder

KINDS = ("row", "streams", "start")
TOKENS_IN, TOKENS_OUT = 1600, 600
HIGH, LOW = 64, 8  # ranks
SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 1024}  # few graphs, for one row


async def measured(kind: str, shape: str, folder: str, device: str, places: bool, streams: str) -> dict[str, float]:
    """Numbers of one engine, by case."""
    rank, begun = HIGH if kind == "ranks" else RANKS[shape], time.perf_counter()
    lora = LoraConfig(max_loras=PLACES, max_rank=rank, max_cpu_loras=int(kind == "row")) if places else None
    settings: dict[str, Any] = SMALL if kind == "row" else {}
    config = EngineConfig(folder, load_format="dummy", device=device, enable_prefix_caching=False, **settings)
    engine = Engine(replace(config, lora=lora))
    await engine.start()
    seen = {"start, s": time.perf_counter() - begun}
    seen |= {f"start: {phase}, s": seconds for phase, seconds in engine.startup.items()}
    adapters = await engine.on_device(lambda runtime: drawn(runtime, rank, PLACES)) if places else []
    draw, vocab = np.random.default_rng(0), engine.limits.vocab_size

    def asked(rows: int, of: list[Adapter], tokens_in: int, tokens_out: int) -> list[Request]:
        sampling = SamplingParams(max_tokens=tokens_out, temperature=0.0, ignore_eos=True)
        made = [Request(draw.integers(2, vocab, tokens_in, dtype=np.int32), sampling) for _ in range(rows)]
        return [replace(each, lora=of[k % len(of)]) for k, each in enumerate(made)] if of else made

    if kind == "row":
        steps = [(await steps_of(engine, asked(1, adapters[:1], 128, WINDOW)))[0] for _ in range(REPEATS)]
        seen["1 row, ms"] = 1e3 * min(steps[1:])
    if kind == "ranks" and places:
        low = await engine.on_device(lambda runtime: drawn(runtime, LOW, PLACES))
        halves = [each for both in zip(adapters[::2], low[::2]) for each in both]
        for case, of in ((f"rank {HIGH}", adapters), (f"ranks {LOW} and {HIGH}", halves)):
            steps = [(await steps_of(engine, asked(32, of, 128, WINDOW)))[0] for _ in range(REPEATS)]
            seen[f"32 rows, {case}, ms"] = 1e3 * min(steps[1:])
    if kind == "load" and places:
        rules = (await engine.on_device(served)).rules
        write_adapter(Path(folder), rank)
        for _ in range(REPEATS):
            begun = time.perf_counter()
            loaded = await asyncio.to_thread(load_adapter, Source(folder), "x", rules)
            seen["load, s"] = time.perf_counter() - begun
        seen["load, MB"] = loaded.nbytes / 1e6
    if kind == "streams":
        length, answer = (40, 10) if shape == "tiny" else (TOKENS_IN, TOKENS_OUT)
        await steps_of(engine, asked(PLACES, adapters, 16, 4))  # every adapter gets its place
        for count in map(int, streams.split(",")):
            for several in (1, PLACES) if places else (0,):
                if several <= count:
                    case = f"{count} streams, " + (f"{several} adapters" if several else "base")
                    rate, first_s = await streamed(engine, asked(count, adapters[:several], length, answer))
                    seen |= {f"{case}, tok/s": rate, f"{case}, first token p50, ms": 1e3 * first_s}
    await engine.stop()
    return seen


def write_adapter(folder: Path, rank: int) -> None:
    """Writes PEFT's files of an adapter of all layers, with random values, next to a model's config.json."""
    config = json.loads((folder / "config.json").read_text())
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    modules = {
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module, (rows, columns) in modules.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, columns).bfloat16()
            tensors[f"{name}.lora_B.weight"] = torch.randn(rows, rank).bfloat16()
    save_file(tensors, folder / ADAPTER)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))


async def streamed(engine: Engine, requests: list[Request]) -> tuple[float, float]:
    """Generated tokens per second of requests that arrive at once, and their median time to the first token."""
    begun, tokens = time.perf_counter(), 0

    async def read(request: Request) -> float:
        nonlocal tokens
        first = 0.0
        async for delta in engine.submit(request):
            first = first or time.perf_counter() - begun
            tokens += len(delta.token_ids)
        return first

    firsts = await asyncio.gather(*map(read, requests))
    return tokens / (time.perf_counter() - begun), statistics.median(firsts)


def main() -> None:
    """Runs the engines and prints the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(KINDS))
    parser.add_argument("--streams", default="1,32")
    parser.add_argument("--shape", help="instead of the real ones: tiny, for a trial on a CPU")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--places", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        print(
            json.dumps(
                asyncio.run(measured(args.inside, args.shape, args.folder, args.device, args.places, args.streams))
            )
        )
        return
    seen: dict[str, dict[str, list[float]]] = {}
    kinds, begun = args.only.split(","), time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        for kind in kinds:
            shape = args.shape or ("gpt-oss-20b" if kind == "row" else "8b")
            folder = Path(name) / shape
            write_folder(folder, SHAPES[shape])
            cold = kind == "start" and "streams" not in kinds  # these two only fill the caches of compiled kernels
            for turn in range((2 + cold) if kind == "start" else 1):
                for places in (True,) if kind in ("ranks", "load") else (False, True):
                    command = [sys.executable, "-m", "tests.bench.gpu_lora_quick", "--inside", kind, "--shape", shape]
                    command += ["--folder", str(folder), "--device", args.device, "--streams", args.streams]
                    command += ["--places"] if places else []
                    for case, value in measured_in(command, timeout=560).items():
                        if (kind == "start" and turn >= cold) or "start" not in case:
                            found = seen.setdefault(f"{shape}, {case}", {})
                            found.setdefault("places" if places else "base", []).append(value)
    for line in lines(seen):
        print(line, flush=True)
    print(f"{time.perf_counter() - begun:.0f} s")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "gpu_lora_quick.json").write_text(json.dumps(seen, indent=1))


def lines(seen: dict[str, dict[str, list[float]]]) -> list[str]:
    """The median of each case, with the difference to the base's start, or the ratio to the base's rows."""
    found = []
    for case, values in seen.items():
        medians = {label: statistics.median(each) for label, each in values.items()}
        text = f"{case}: " + ", ".join(f"{label} {value:.3f}" for label, value in medians.items())
        base = seen[re.sub(r"\d+ adapters", "base", case)].get("base")
        if base and "places" in medians:
            difference = medians["places"] - statistics.median(base)
            ratio = medians["places"] / (statistics.median(base) or 1.0)
            text += f", {difference:+.2f} s" if "start" in case else f", {ratio:.3f} x base"
        found.append(text)
    return found


if __name__ == "__main__":
    main()
