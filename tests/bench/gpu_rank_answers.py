"""How many greedy answers differ between one GPU and several, and between one row and four rows a step on one GPU.

Random weights of a real shape, whose nearly equal logits make many choices close; prompts and answers are the same
everywhere. Sums in another order change the nearest choices, so several GPUs may differ in at most 1.5 times as many
answers as more rows a step do on one. With --deterministic a further engine on all ranks answers one at a time, four at
a time, and again from the prefix cache, and no token may differ. A process per engine; the numbers are printed and
written into --out (gpu_rank_answers.json). On two H200 the 8B takes about five minutes.
Run: python -m tests.bench.gpu_rank_answers [--shape 8b] [--ranks 2] [--answers 200] [--deterministic] [--out DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine import Engine, EngineConfig, Request, SamplingParams
from tests.bench import targets
from tests.bench.gpu_offline import TINY_ENGINE, device_name
from tests.bench.shapes import SHAPES, write_folder

FILE = "gpu_rank_answers.json"
ROWS = 4  # of a step
MOST = 1.5  # times the answers that differ between one row and ROWS on one GPU
SHORTEST, LONGEST = 16, 200  # tokens of a prompt

Answers = list[list[int]]  # tokens of each answer


async def answers(folder: str, args: argparse.Namespace, ranks: int, deterministic: bool) -> dict[str, Answers]:
    """The answers of one engine: one at a time, and ROWS at a time; of a deterministic one also from its cache."""
    tiny = TINY_ENGINE if args.shape == "tiny" else {}
    settings: dict[str, Any] = {**tiny, "max_num_seqs": ROWS, "tensor_parallel": ranks, "deterministic": deterministic}
    settings |= {"enable_prefix_caching": deterministic, "device": args.device, "load_format": "dummy"}
    engine = Engine(EngineConfig(folder, **settings))
    await engine.start()
    draw, found = np.random.default_rng(0), dict[str, Answers]()
    prompts = [
        draw.integers(2, engine.limits.vocab_size, draw.integers(SHORTEST, LONGEST), dtype=np.int32)
        for _ in range(args.answers)
    ]
    try:
        for name, rows in (("alone", 1), ("together", ROWS), ("cached", ROWS)):
            if name == "cached" and not deterministic:
                continue
            if name == "together":
                await engine.reset_prefix_cache()
            places = asyncio.Semaphore(rows)
            found[name] = await asyncio.gather(*(answer(engine, prompt, args.tokens, places) for prompt in prompts))
    finally:
        await engine.stop(5)
    return found


async def answer(engine: Engine, prompt: np.ndarray, tokens: int, places: asyncio.Semaphore) -> list[int]:
    """The greedy tokens of one answer."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    async with places, engine.submit(Request(prompt, sampling)) as stream:
        return [token async for delta in stream for token in delta.token_ids]


def differing(one: Answers, other: Answers) -> int:
    """How many answers have other tokens."""
    return sum(a != b for a, b in zip(one, other, strict=True))


def compared(ranks: int, found: dict[str, dict[str, Answers]]) -> dict[str, Any]:
    """The numbers of answers that differ, and whether they are allowed; `found`: by engine, then by circumstance."""
    one, several = found["one"], found["several"]
    rows, gpus = differing(one["alone"], one["together"]), differing(one["alone"], several["alone"])
    line = {
        "answers": len(one["alone"]),
        f"differ between 1 and {ROWS} rows": rows,
        f"differ between 1 and {ranks} ranks": gpus,
        "met": gpus <= MOST * rows,
    }
    if "deterministic" in found:
        same = found["deterministic"]
        others = sum(differing(same["alone"], same[name]) for name in ("together", "cached"))
        line |= {"deterministic answers that differ": others, "met": line["met"] and not others}
    return line


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b", choices=sorted(SHAPES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--deterministic", action="store_true", help="also answers of a deterministic engine")
    parser.add_argument("--limit", type=float, default=240, help="seconds of one engine")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.inside:
        ranks = 1 if args.inside == "one" else args.ranks
        print(json.dumps(asyncio.run(answers(args.folder, args, ranks, args.inside == "deterministic"))))
        return 0
    flags = list(sys.argv[1:] if argv is None else argv)
    with tempfile.TemporaryDirectory() as folder:
        model, found = write_folder(Path(folder) / "model", SHAPES[args.shape]), {}
        for name in ("one", "several", *["deterministic"] * args.deterministic):
            command = [sys.executable, "-m", "tests.bench.gpu_rank_answers", *flags]
            command += ["--inside", name, "--folder", str(model)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=args.limit, check=True)
            found[name] = json.loads(done.stdout.splitlines()[-1])
            print(f"{name}: {', '.join(found[name])}", flush=True)
    line = compared(args.ranks, found)
    print(json.dumps(line))
    name = f"{args.shape}, {args.ranks} ranks, {args.tokens} tokens"
    targets.keep(args.out, FILE, name, {"device": device_name(args.device), **line})
    return int(not line["met"])


if __name__ == "__main__":
    sys.exit(main())
