"""The time of a step, in this checkout and in another one on the same card: plain rows, rows under a schema, pictures,
rows with samplers.

Random weights of real shapes, one engine per process, without HTTP. Checkouts alternate, --rounds times each, so that a
change of the card's clock affects both. A step's time is the median between the ends of consecutive steps in which all
rows decode. Pictures are timed from the first request to the last first token. Rows with samplers have prompts of 2,048
tokens from few words, which DRY finds again and again; their steps are compared with plain ones after the same prompts.
Prints both columns and their ratio, and writes gpu_step.json into --out. Run: python -m tests.bench.gpu_step
[--baseline CHECKOUT] [--only 0.6b,8b,vl-7b] [--rounds 2] [--samplers] [--out DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

CASES = {"0.6b": (1, 32, 256), "8b": (32,), "vl-7b": (), "tiny": (1, 4), "tiny-vl": ()}  # rows; none: pictures
CASES |= dict.fromkeys(("qwen-35b-a3b-fp8", "qwen-27b-fp8", "nano"), (1, 16, 64))
SCHEMA = {"type": "array", "minItems": 1000, "items": {"type": "string", "maxLength": 40}}
SAMPLED = {
    "greedy": {"temperature": 0.0},
    "greedy with DRY": {"temperature": 0.0, "dry_multiplier": 0.8},
    "drawn": {"temperature": 0.8},
    "drawn with DRY": {"temperature": 0.8, "dry_multiplier": 0.8},
    "drawn with top-n-sigma": {"temperature": 0.8, "top_n_sigma": 1.0},
    "drawn with XTC": {"temperature": 0.8, "xtc_probability": 0.5, "xtc_threshold": 0.1},
}
PICTURES, PICTURE_ROWS = 32, 1024
WINDOW, REPEATS = 192, 3  # steps per measurement; measurements per process
SWITCH_INTERVAL_S = 0.0005  # as in server/start/process: the loop passes the GIL to the device thread soon
VOCAB_WORDS = 2000  # tokens of one to three letters: a vocabulary for grammars with random weights


async def steps_of(engine: Any, requests: list[Any]) -> tuple[float, float]:
    """Sends requests at once. Median seconds of a step in which all decode; seconds to the last first token."""
    ends: list[float] = []
    rows = len(requests)

    def note(stats: Any) -> None:
        if stats.num_rows == stats.num_tokens == rows:
            ends.append(stats.ended_at)

    engine.on_step = note
    begun, firsts = time.perf_counter(), [0.0] * rows

    async def read(number: int, request: Any) -> None:
        async for _ in engine.submit(request):
            firsts[number] = firsts[number] or time.perf_counter()

    await asyncio.gather(*(read(number, request) for number, request in enumerate(requests)))
    gaps = np.diff(ends)[4:-4]
    return float(np.median(gaps)) if len(gaps) else 0.0, max(firsts) - begun


def grammar_of(vocab: int) -> Any:
    """A schema over a vocabulary of single bytes and short words."""
    from engine.grammar.compile import GrammarSpec, compile_now, fill_threads  # an older checkout has these modules too
    from engine.grammar.vocabulary import GrammarVocabulary

    letters = "abcdefghijklmnopqrstuvwxyz"
    words = (letters[n // 676 % 26] + letters[n // 26 % 26] + letters[n % 26] for n in range(vocab))
    tokens = [*(bytes([value]) for value in range(256)), *(word.encode() for word in words)][:vocab]
    vocabulary = GrammarVocabulary(tokens.__getitem__, set[int]().__contains__, vocab)
    spec = GrammarSpec("schema", json.dumps(SCHEMA))
    grammar = compile_now(spec, vocabulary)
    for _ in range(fill_threads() - 1):  # a server makes this many matchers where many choices follow one grammar
        grammar.lanes.extend(compile_now(spec, vocabulary).lanes)
    return grammar


async def pictures_of(engine: Any, draw: np.random.Generator) -> list[Any]:
    """One request per picture; all pictures differ."""
    from engine import MediaInput, Request, SamplingParams

    def example(runtime: Any) -> tuple[dict[str, np.ndarray], int]:
        features = runtime.model.towers["image"].example("image", PICTURE_ROWS)
        return {name: tensor.cpu().numpy() for name, tensor in features.items()}, len(
            runtime.model.towers["image"].encode(features)
        )

    on_device = getattr(engine, "on_device" if hasattr(engine, "on_device") else "_on_device")
    arrays, count = await on_device(example)
    requests = []
    for _ in range(PICTURES):
        pixels = draw.integers(0, 255, arrays["pixels"].shape, dtype=np.uint8)
        item = MediaInput("image", secrets.token_bytes(16), ((4, count),), count, {**arrays, "pixels": pixels})
        ids = draw.integers(2, 1000, count + 16, dtype=np.int32)
        sampling = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
        requests.append(Request(ids, sampling, media=(item,)))
    return requests


def repetitive(draw: np.random.Generator, vocab: int, rows: int, length: int) -> np.ndarray:
    """Prompts int32 [rows, length] of sixty-four words of four tokens."""
    words = draw.integers(2, vocab, (64, 4), dtype=np.int32)
    return words[draw.integers(0, len(words), (rows, length // 4))].reshape(rows, length)


async def with_samplers(engine: Any, shape: str, draw: np.random.Generator) -> dict[str, list[float]]:
    """Milliseconds of steps with and without samplers, by case."""
    from engine import Request, SamplingParams

    vocab, rows, length = engine.limits.vocab_size, *((32, 2048) if shape == "0.6b" else (4, 128))
    prompts, seen = repetitive(draw, vocab, rows, length), dict[str, list[float]]()
    for _ in range(REPEATS):
        for name, rules in SAMPLED.items():
            if not rules.keys() <= SamplingParams.__dataclass_fields__.keys():
                continue  # an older checkout
            sampling = SamplingParams(max_tokens=WINDOW + 2 * rows, ignore_eos=True, seed=7, **rules)
            step_s, _ = await steps_of(engine, [Request(prompt, sampling) for prompt in prompts])
            seen.setdefault(f"{shape}, {rows} rows after {length} tokens, {name}", []).append(1e3 * step_s)
    return seen


async def measured(shape: str, folder: str, device: str, only: str) -> dict[str, float]:
    """Milliseconds of this checkout, by case; only: "schema", "samplers", or "" for all but samplers."""
    from engine import Engine, EngineConfig, Request, SamplingParams

    engine = Engine(EngineConfig(folder, load_format="dummy", device=device, enable_prefix_caching=False))
    await engine.start()
    draw, vocab = np.random.default_rng(0), engine.limits.vocab_size
    seen: dict[str, list[float]] = {}

    def requests(rows: int, grammar: Any = None) -> list[Any]:
        prompts = draw.integers(2, vocab, (rows, 128), dtype=np.int32)
        sampling = SamplingParams(max_tokens=WINDOW + 2 * rows // 8, temperature=0.0, ignore_eos=True)
        return [Request(prompt, sampling, grammar=grammar) for prompt in prompts]

    if only == "samplers":
        seen = await with_samplers(engine, shape, draw)
    for _ in range(0 if only else REPEATS):
        for rows in CASES[shape]:
            step_s, _ = await steps_of(engine, requests(rows))
            seen.setdefault(f"{shape}, {rows} rows", []).append(1e3 * step_s)
    if shape in ("0.6b", "tiny") and only != "samplers":
        grammar, rows = grammar_of(vocab), 32 if shape == "0.6b" else 4
        for _ in range(REPEATS):
            step_s, _ = await steps_of(engine, requests(rows, grammar))
            seen.setdefault(f"{shape}, {rows} rows under a schema", []).append(1e3 * step_s)
    if not CASES[shape]:
        for _ in range(REPEATS + 1):
            _, first_s = await steps_of(engine, await pictures_of(engine, draw))
            seen.setdefault(f"{shape}, {PICTURES} pictures to the last first token", []).append(1e3 * first_s)
    await engine.stop()
    return {name: min(values[1:]) if len(values) > 1 else values[0] for name, values in seen.items()}


def run_in(checkout: Path, shape: str, folder: str, args: argparse.Namespace) -> dict[str, float]:
    """Runs a shape in a separate process, with the modules of `checkout`."""
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--inside",
        shape,
        "--folder",
        folder,
        "--device",
        args.device,
    ]
    command += ["--schema"] * args.schema + ["--samplers"] * args.samplers
    environment = {**os.environ, "PYTHONPATH": f"{checkout}:{os.environ.get('PYTHONPATH', '')}"}
    return measured_in(command, timeout=400, cwd=checkout, env=environment)


def measured_in(command: list[str], timeout: float, **where: Any) -> dict[str, float]:
    """The JSON in the last line of a process; if the process fails, its errors are printed and the result is empty."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, **where)
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
        return {}
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    """Runs the benchmark and prints both columns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", type=Path, help="another checkout, its extensions built")
    parser.add_argument("--only", default="0.6b,8b,vl-7b", help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--schema", action="store_true", help="of 0.6b the rows under a schema alone")
    parser.add_argument("--samplers", action="store_true", help="rows with DRY, top-n-sigma and XTC alone")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        only = "schema" if args.schema else "samplers" * args.samplers
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        print(json.dumps(asyncio.run(measured(args.inside, args.folder, args.device, only))))
        return
    # From this checkout: a process with --inside imports another checkout's modules.
    from tests.bench.shapes import SHAPES, write_folder

    here = Path(__file__).resolve().parents[2]
    checkouts = {"this": here} | ({"baseline": args.baseline.resolve()} if args.baseline else {})
    seen: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        for shape in args.only.split(","):
            folder = Path(name) / shape
            write_folder(folder, SHAPES[shape])
            for _ in range(args.rounds):
                for label, checkout in checkouts.items():
                    for case, value in run_in(checkout, shape, str(folder), args).items():
                        seen.setdefault(case, {}).setdefault(label, []).append(value)
            for case, found in seen.items():
                if case.startswith(shape + ","):
                    print(line(case, found) + share_of_plain(case, seen), flush=True)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "gpu_step.json").write_text(json.dumps({"milliseconds": seen}, indent=1))


def line(case: str, found: dict[str, list[float]]) -> str:
    """The medians of the rounds, and the ratio of this checkout to the other."""
    middle = {label: statistics.median(values) for label, values in found.items()}
    text = f"{case}: " + ", ".join(f"{label} {value:.3f} ms" for label, value in middle.items())
    return text + (f", ratio {middle['this'] / middle['baseline']:.4f}" if len(middle) == 2 else "")


def share_of_plain(case: str, seen: dict[str, dict[str, list[float]]]) -> str:
    """The speed of a case with a sampler, as a part of the speed without it."""
    plain = case.partition(" with ")[0]
    if plain == case or plain not in seen:
        return ""
    without, own = (statistics.median(seen[name]["this"]) for name in (plain, case))
    return f", {without / own:.3f} of the speed without"


if __name__ == "__main__":
    main()
