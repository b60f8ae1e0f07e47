"""The cost of schemas for streams on a GPU, within 150 s: one server per shape, random weights.

For each shape: the cases of `gpu_serve --load grammar` (64 streams of which none, one or all follow a schema), then
plain streams while a sender requests new 10-KB schemas (tests/bench/beside_compiles.py). Then the first shape again
with jump-forward, where all streams follow the schema. Before these cases, without a server: how long one core takes to
fill a row's bitmask of 152k bits, for rows at random states of that schema. Prints a line per case and the ratios, and
writes gpu_grammar.json into --out. Required ratios to a plain step: all streams under a schema 1.10 for 8b and 1.25 for
0.6b; plain streams next to one stream under a schema 1.01; p99 of the gaps during compiles 1.2. Required times to fill:
60 us on average, 500 us at p99. Run: python -m tests.bench.gpu_grammar [--shape 0.6b,8b] [--seconds 6] [--out DIR]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from engine.base.grammar import GrammarSpec
from engine.grammar.compile import compile_now
from engine.grammar.vocabulary import GrammarVocabulary
from server.flags.config import LimitsConfig
from server.structure.structure import schema_text
from tests.bench.beside_compiles import Sender, bodies
from tests.bench.gpu_serve import TINY_FLAGS, measure
from tests.bench.loads import ORDERS, PLAIN, SIZES, Sizes, with_grammars
from tests.bench.served import Server
from tests.bench.shapes import LETTERS, SHAPES

VOCAB, ANSWERS, TOKENS = 151_936, 20, 128  # numbers for `fills`: vocabulary, answers, tokens per answer
BESIDE = "streams beside compiles"
TOLD = ("output", "TPOT", "ITL p50", "ITL p99", "compiles")
Found = dict[str, dict[str, float]]  # case -> name -> number


def fills() -> dict[str, float]:
    """Microseconds to fill one bitmask: mean and 99th percentile."""
    words = ("".join(LETTERS[number // 26**power % 26] for power in (3, 2, 1, 0)) for number in range(VOCAB - 256))
    tokens = [*(bytes([value]) for value in range(256)), *(word.encode() for word in words)]
    vocabulary = GrammarVocabulary(tokens.__getitem__, set[int]().__contains__, VOCAB)
    grammar = compile_now(GrammarSpec("schema", schema_text(ORDERS, "schema", LimitsConfig())), vocabulary)
    draw, took = np.random.default_rng(0), []
    for _ in range(ANSWERS):
        matcher = grammar.matcher()
        for _ in range(TOKENS):
            begun = time.thread_time()
            line = matcher.compute_bitmask()
            took.append(1e6 * (time.thread_time() - begun))
            allowed = np.flatnonzero(np.unpackbits(np.frombuffer(line, np.uint8), bitorder="little")[:VOCAB])
            matcher.consume_token(int(draw.choice(allowed)))
    return {"mean": float(np.mean(took)), "p99": float(np.percentile(took, 99))}


def cases_of(shape: str, args: argparse.Namespace, jump: str, only_held: bool) -> Found:
    """The results of one server's streams."""
    plain, one, every = with_grammars(SIZES.get(shape, Sizes()))
    flags = (*(TINY_FLAGS if shape.startswith("tiny") else ()), "--no-enable-prefix-caching")
    flags += ("--structured-outputs-jump-forward", jump)
    found: Found = {}
    with tempfile.TemporaryDirectory() as name:
        server = Server(shape, args.device, Path(name), flags, 0.005)
        try:
            for case in (every,) if only_held else (plain, one, every):
                found[case.name] = measure(server, shape, case, args, Path(name))
            if not only_held:
                sender = Sender(server.port, bodies("10 KB"))
                sender.start()
                found[BESIDE] = measure(server, shape, plain, args, Path(name))
                sender.stopped = True
                sender.join()
                found[BESIDE]["compiles"] = sender.count
        finally:
            server.stop()
    label = f"{shape}, jump-forward {jump}"
    return {f"{label}, {case}": {key: x for key, x in seen.items() if key[0] != "_"} for case, seen in found.items()}


def main() -> None:
    """Runs the benchmark and prints its lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.6b,8b", help=", ".join(SHAPES))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=6.0, help="measured per case")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(namespace=argparse.Namespace(answers=0, warm_up=2.0))
    begun, report = time.perf_counter(), dict[str, Any]()

    def keep(found: Found) -> None:
        for name, seen in found.items():
            told = ", ".join(
                f"{key} {seen[key]:.2f}" for key in ("output", "TPOT", "ITL p50", "ITL p99") if key in seen
            )
            print(f"{name}: {told}", flush=True)
            plain = report.get(f"{name.partition(',')[0]}, jump-forward off, {PLAIN}", seen)
            ratios = {key: seen[key] / plain[key] for key in ("output", "TPOT", "ITL p99") if plain.get(key)}
            report[name] = {**seen, **{f"{key} over plain": value for key, value in ratios.items()}}
            print("   over plain:", ", ".join(f"{key} {value:.3f}" for key, value in ratios.items()), flush=True)
        if args.out is not None:  # after each server, so that an abort loses little
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "gpu_grammar.json").write_text(json.dumps(report, indent=1))

    report["fill, us"] = fills()
    print("fill of a line, us: mean {mean:.0f}, p99 {p99:.0f}".format(**report["fill, us"]), flush=True)
    shapes = args.shape.split(",")
    for shape in shapes:
        keep(cases_of(shape, args, "off", only_held=False))
    keep(cases_of(shapes[0], args, "on", only_held=True))
    print(f"{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
