"""Streams of one model in one process, without HTTP: rates, first tokens, long prompts, dtypes of states.

Random weights of a real shape, greedy, all prompts different, prefix cache off. Streams begin at once, so that the rate
includes their prompts, as a client sees it. Cases of a shape:

    streams  --streams streams of 1,024 tokens in and 256 out: tokens per second, first token p50, time per token p50
    prompts  the first token of one prompt of 8,192 tokens, and of one of 65,536
    states   with --states float32,bfloat16: a step of 64 rows, and how far the second dtype changes the distribution:
             answers drawn at temperature 1 with the first dtype are scored as prompts by both engines; the mean
             difference of their log-probabilities is an estimate of the divergence (KL) of the second from the first

An engine per shape and dtype, in a process. Prints a line per case, and writes gpu_streams.json into --out.
Run: python -m tests.bench.gpu_streams [--shapes qwen-35b-a3b-fp8,qwen-27b-fp8] [--streams 1,16,64,256]
         [--prompts 8192,65536] [--states float32,bfloat16] [--out DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np

from engine import Engine, EngineConfig, Request, SamplingParams
from engine.base.config import StateConfig
from tests.bench.gpu_offline import TINY_ENGINE
from tests.bench.gpu_step import SWITCH_INTERVAL_S, WINDOW, measured_in, steps_of
from tests.bench.shapes import SHAPES, write_folder

TOKENS_IN, TOKENS_OUT = 1024, 256
DRAWN, SCORED = 16, 256  # answers, and their tokens
TINY = 16  # every length of a trial is divided by this
DType = Literal["auto", "float32", "bfloat16"]
DTYPES = get_args(DType)


def drawn(vocab: int, tokens_in: int, **sampling: Any) -> Iterator[Request]:
    """Requests with random prompts."""
    draw = np.random.default_rng(0)
    while True:
        params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling})
        yield Request(draw.integers(2, vocab, tokens_in, dtype=np.int32), params)


async def read(engine: Engine, request: Request) -> tuple[float, float, list[int]]:
    """Seconds to the first token, seconds to the last token, the tokens."""
    begun, first, tokens = time.perf_counter(), 0.0, list[int]()
    async for delta in engine.submit(request):
        first = first or time.perf_counter() - begun
        tokens += delta.token_ids
    return first, time.perf_counter() - begun, tokens


async def streams(engine: Engine, count: int, scale: int) -> dict[str, float]:
    """Rate, first token and time per token of streams that begin at once."""
    each = drawn(engine.limits.vocab_size, TOKENS_IN // scale, max_tokens=TOKENS_OUT // scale)
    begun = time.perf_counter()
    found = await asyncio.gather(*(read(engine, next(each)) for _ in range(count)))
    tokens = sum(len(tokens) for _, _, tokens in found)
    return {
        f"{count} streams, tok/s": tokens / (time.perf_counter() - begun),
        f"{count} streams, first token p50, ms": 1e3 * statistics.median(first for first, _, _ in found),
        f"{count} streams, time per token p50, ms": 1e3
        * statistics.median((last - first) / (len(tokens) - 1) for first, last, tokens in found),
    }


async def scored(engine: Engine, answers: str, scale: int) -> dict[str, float]:
    """Draws the answers if there are none yet, and scores them: the mean log-probability of their tokens."""
    length, vocab = TOKENS_IN // scale, engine.limits.vocab_size
    if not await asyncio.to_thread(os.path.exists, answers):
        each = drawn(vocab, length, max_tokens=SCORED // scale, temperature=1.0, seed=1)
        asked = [next(each) for _ in range(DRAWN)]
        found = await asyncio.gather(*(read(engine, request) for request in asked))
        np.save(answers, [np.concatenate([one.prompt_token_ids, np.int32(two[2])]) for one, two in zip(asked, found)])
    total, count = 0.0, 0
    for row in np.load(answers):
        sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        async for delta in engine.submit(Request(row, sampling)):
            if delta.prompt_logprobs is not None:
                given = [entry.logprob for entry in delta.prompt_logprobs[length:] if entry is not None]
                total, count = total + sum(given), count + len(given)
    return {"mean log-probability of answers": total / count}


async def measured(args: argparse.Namespace, dtype: str) -> dict[str, float]:
    """Numbers of one engine, by case."""
    scale = TINY if args.device == "cpu" else 1
    counts = [int(each) for each in args.streams.split(",") if each]
    prompts = [int(each) // scale for each in args.prompts.split(",") if each]
    longest = max([(TOKENS_IN + TOKENS_OUT) // scale, *prompts]) + 64
    settings: dict[str, Any] = {"max_model_len": longest, "max_num_seqs": max([64, *counts])}
    if scale > 1:
        settings = {**TINY_ENGINE, **settings}
    if args.states:
        settings["max_num_batched_tokens"] = 256 // scale  # a state is rounded where a step ends
    states = StateConfig(dtype=cast(DType, dtype))
    config = EngineConfig(
        args.folder, load_format="dummy", device=args.device, enable_prefix_caching=False, states=states, **settings
    )
    engine = Engine(config)
    await engine.start()
    each = drawn(engine.limits.vocab_size, 64 // scale, max_tokens=4)
    await read(engine, next(each))
    seen: dict[str, float] = {}
    for count in counts:
        seen |= await streams(engine, count, scale)
    for length in prompts:
        each = drawn(engine.limits.vocab_size, length, max_tokens=1)
        seen[f"prompt of {length}, first token, ms"] = 1e3 * min([(await read(engine, next(each)))[0] for _ in "abc"])
    if args.states:
        each = drawn(engine.limits.vocab_size, 128 // scale, max_tokens=WINDOW if scale == 1 else 12)
        step, _ = await steps_of(engine, [next(each) for _ in range(64 if scale == 1 else 4)])
        seen |= {"64 rows, ms": 1e3 * step, **await scored(engine, args.answers, scale)}
    await engine.stop()
    return seen


def main() -> None:
    """Runs the engines and prints the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen-35b-a3b-fp8,qwen-27b-fp8")
    parser.add_argument("--streams", default="1,16,64,256")
    parser.add_argument("--prompts", default="8192,65536")
    parser.add_argument("--states", default="", help="dtypes of states to compare; empty: the model's own")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--answers", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        print(json.dumps(asyncio.run(measured(args, args.inside))))
        return
    for flag, given, allowed in (("shapes", args.shapes, SHAPES), ("states", args.states, DTYPES)):
        for each in filter(None, given.split(",")):
            if each not in allowed:
                parser.error(f"--{flag} {each}: must be of {', '.join(allowed)}")
    found: dict[str, dict[str, float]] = {}
    for shape in args.shapes.split(","):
        with tempfile.TemporaryDirectory() as name:
            folder = write_folder(Path(name) / shape, SHAPES[shape])
            for dtype in (args.states or "auto").split(","):
                command = [sys.executable, "-m", "tests.bench.gpu_streams", "--inside", dtype, "--folder", str(folder)]
                command += ["--answers", str(folder / "answers.npy")]
                for flag in ("streams", "prompts", "states", "device"):
                    command += [f"--{flag}", getattr(args, flag)]
                seen = measured_in(command, timeout=560)
                case = found[f"{shape}, states {dtype}"] = seen
                for what, value in case.items():
                    print(f"{shape}, states {dtype}, {what}: {value:.4g}", flush=True)
                if args.out:
                    args.out.mkdir(parents=True, exist_ok=True)
                    (args.out / "gpu_streams.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
