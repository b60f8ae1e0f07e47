"""Serving speed of one model over sockets: closed loops of streams; the server and its clients are separate processes.

Random weights of a real shape, greedy, all streaming, prompts all different. The clients are those of `bench serve`
(tests/bench/asked.py), and tests/bench/loads.py defines the loads. `--load streams` repeats the peer's measurement: 512
tokens in and 128 out (or a picture of 1024 x 1024 and a question, 64 out), prefix cache off. All other loads use one
server with the prefix cache on, which is the default. A case ends after --seconds or --answers, whichever comes first.
Its tokens are those in the answers' usage; failures are counted. Prints a line per case, with aim, floor and peer if
the case has an aim; writes gpu_serve.json into --out.

A timer on the server's loop measures how late the loop is: every 1 ms with the load `loop` (up to 4 % of a core, which
is part of the loop's CPU time), else every 5 ms. "written" is the time from a step's tokens on the host to their bytes
in the sockets (tests/bench/watched.py). For equal answers, output per second counts whole answers: per stream from its
first end to its last within the measured time, so that waves of equal requests do not distort it. For unequal answers
it counts the tokens that arrived. Several forms of --weights are served one after the other; at the end the output of
each is divided by that of floats.
Run: python -m tests.bench.gpu_serve [--shape 8b,0.6b,vl-7b] [--weights floats,fp8,fp8-blocks,w4]
         [--load mixed,conversation,prefix,loop,rules,grammar,pictures] [--out DIR]
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from server.bench.output import on_loop
from server.bench.serve import first_model
from tests.bench import loads, targets
from tests.bench.asked import events_of, load, parts_of, summary
from tests.bench.loads import Case
from tests.bench.served import Server, check
from tests.bench.shapes import FORMS, SHAPES

FLOATS = "floats"  # weights in the dtype of --shape
TINY_FLAGS = ("--num-gpu-blocks-override", "1024", "--max-num-seqs", "32", "--num-threads", "1")
LONGEST_S = 180.0  # limit for a case that sends each request once
UNITS = {
    "output": "tok/s",
    "TTFT p50": "ms",
    "TTFT p99": "ms",
    "ITL p50": "ms",
    "ITL p99": "ms",
    "TPOT": "ms",
    "written p50": "ms",
    "written p99": "ms",
    "loop stall p50": "ms",
    "loop stall p99": "ms",
    "loop stall max": "ms",
    "loop CPU per token": "us",
    "server CPU": "cores",
    "clients' CPU": "cores",
    "failures": "",
    "steps in Python": "%",
}
AT_ONCE = ("output", "TTFT p50", "ITL p50", "ITL p99", "TPOT")  # printed after each case
COMPARED = ("output", "TTFT p50", "TTFT p99", "TPOT")  # compared with and without hits of a shared prefix


def measure(server: Server, shape: str, asked: Case, args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Measures one case; keys that begin with "_" are for reading the server's records later."""
    seconds, answers = args.seconds, args.answers
    if not asked.streams:
        since, before = time.perf_counter(), server.cpu()[1]
        time.sleep(seconds)
        until = time.perf_counter()
        return {"server CPU": (server.cpu()[1] - before) / (until - since), "_since": since, "_until": until}
    warm_s = args.warm_up or min(2.0 + asked.streams / 64, seconds)
    url = f"http://127.0.0.1:{server.port}"
    if asked.once:  # no part of such a case can be left out, so other requests warm up the server
        few = replace(asked, streams=min(16, asked.streams), once=False, seed=asked.seed + 500)
        parts = parts_of(url, shape, few, warm_s, 0, folder)
        load(parts, on_loop(first_model(parts[0])), measure_s=warm_s)
        warm_s, seconds, answers = 0.0, LONGEST_S, 0
    parts = parts_of(url, shape, asked, warm_s + seconds, answers, folder)
    num_background = int(asked.background is not None)
    before: list[tuple[float, ...]] = []  # clock, CPU of the loop, CPU of all threads, counted()

    def note() -> None:
        before.append((time.perf_counter(), *server.cpu(), *server.counted()))

    came = load(parts, on_loop(first_model(parts[0])), num_background, warm_s, seconds, note, answers)
    note()
    took, loop_cpu, cpu, hits, queries, steps, by_python = (late - early for early, late in zip(*before))
    since = came.begun + warm_s
    until = max(one.end for one in came.answers) if asked.once else min(since + seconds, came.until)
    for text in sorted(set(came.failures)):
        print(f"{asked.name}: a request failed: {text}", flush=True)
    found = summary(came, since, until)
    noted = before[0][0]
    arrived = (events_of(came.answers)[:, 0] >= noted).sum() + sum(one.first >= noted for one in came.answers)
    found["loop CPU per token"] = loop_cpu / (arrived * found["tokens per event"]) * 1e6
    found["server CPU"] = cpu / took
    found["clients' CPU"] = came.cpu_s / (until - came.begun)
    found["steps in Python"] = 100 * by_python / max(steps, 1.0)
    if asked.cached:
        found["prompt tokens found"] = hits / max(queries, 1.0)
    return {**found, "_since": since, "_until": until}


def add_noted(found: dict[str, float], server: Server) -> None:
    """Adds the loop's lateness and the time of tokens to the sockets, from the records of the stopped server."""
    since, until = found.pop("_since"), found.pop("_until")
    beats, written = server.beats, server.written
    late = beats[(beats[:, 0] >= since) & (beats[:, 0] <= until), 1] * 1e3
    if len(late):
        found["loop stall p50"], found["loop stall p99"] = (float(np.percentile(late, part)) for part in (50, 99))
        found["loop stall max"] = float(late.max())
    written = written[(written[:, 0] >= since) & (written[:, 0] <= until)]
    if len(written):
        each = np.repeat(written[:, 1] * 1e3, written[:, 2].astype(int))
        found["written p50"], found["written p99"] = (float(np.percentile(each, part)) for part in (50, 99))
        if "output by event" in found:  # approximate share of the arrived tokens whose time is known
            found["written share"] = len(each) / (found["output by event"] * (until - since))


Cases = dict[str, dict[str, float]]  # case -> name -> number
Runs = dict[str, list[dict[str, float]]]


def run_server(shape: str, args: argparse.Namespace, asked: list[Case], cached: bool) -> tuple[float, Runs, list[str]]:
    """Runs cases on one server, --runs times each: seconds until ready, results, and names of failed cases."""
    flags = TINY_FLAGS if shape.startswith("tiny") else ()
    beat_s = 0.001 if "loop" in args.load.split(",") else 0.005
    flags += (*shlex.split(args.flags), *(() if cached else ("--no-enable-prefix-caching",)))
    runs: Runs = {}
    failed = []
    with tempfile.TemporaryDirectory() as name:
        server = Server(shape, args.device, Path(name), flags, beat_s, "" if args.weights == FLOATS else args.weights)
        try:
            print(f"{shape}: ready in {server.ready_s:.1f} s", flush=True)
            check(server.port)
            for case in asked * args.runs:
                try:
                    found = measure(server, shape, case, args, Path(name))
                    runs.setdefault(case.name, []).append(found)
                    told = (f"{name} {targets.number(found[name])}" for name in AT_ONCE if name in found)
                    # Printed at once, so that an abort loses little.
                    print(f"{shape}: {case.name}: {', '.join(told)}", flush=True)
                except Exception:
                    failed.append(case.name)
                    traceback.print_exc()
        finally:
            server.stop()
    for found in (found for of in runs.values() for found in of):
        add_noted(found, server)
    return server.ready_s, runs, failed


def run_shape(shape: str, args: argparse.Namespace) -> tuple[int, Cases]:
    """Runs all cases of a shape: the number of failed cases, and the results of the others."""
    asked = loads.cases_of(shape, args.load.split(","), args.streams, args.sharegpt)
    if args.case:
        asked = [case for case in asked if case.name in args.case.split(",")]
    ready_s, runs, failed = 0.0, Runs(), []
    for cached in sorted({case.cached for case in asked}):
        seconds, found, broken = run_server(shape, args, [case for case in asked if case.cached is cached], cached)
        ready_s = ready_s or seconds
        runs |= found
        failed += broken
    cases = {label: medians(of) for label, of in runs.items()}
    seen = {f"{label}, {name}": found[name] for label, found in cases.items() for name in UNITS if name in found}
    units = {name: UNITS[name.rpartition(", ")[2]] for name in seen}
    ranges = {name: range_of(runs, name) for name in seen} if args.runs > 1 else {}
    seen["ready"], units["ready"] = ready_s, "s"  # of the server's process, interpreter start and imports included
    lasted = f"{args.runs} run(s) of {args.seconds:g} s or {args.answers} answers"
    named = ", ".join(filter(None, (shape, "" if args.weights == FLOATS else args.weights, args.flags)))
    print_cases(f"{named}, serving, ready in {ready_s:.1f} s, {lasted}", cases)
    ratios = ratios_of(cases)
    for name, value in ratios.items():
        print(f"{name}: {value:.2f}")
    aims = targets.serve_targets(named, seen)
    targets.show(f"{named}, serving", {name: seen[name] for name in seen if name in aims}, aims, units, ranges)
    report = {"shape": shape, "ready_s": ready_s, "seen": seen, "units": units, "ratios": ratios, "spread": ranges}
    targets.keep(args.out, "gpu_serve.json", named, {**report, "cases": cases, "runs": runs, "failed": failed})
    return len(failed), cases


def over_floats(found: dict[str, Cases]) -> list[str]:
    """For each form of weights: output of its cases divided by the output of floats in the same run."""
    floats = found.get(FLOATS, {})
    return [
        f"{form}, {label}: {cases[label]['output'] / floats[label]['output']:.2f} times the output of floats"
        for form, cases in found.items()
        for label in cases
        if form != FLOATS and floats.get(label, {}).get("output") and "output" in cases[label]
    ]


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each number."""
    return {name: statistics.median(found[name] for found in runs if name in found) for name in runs[0]}


def range_of(runs: Runs, name: str) -> list[float]:
    """The smallest and the largest value of `case, number` over the runs."""
    label, _, number = name.rpartition(", ")
    values = [found[number] for found in runs[label] if number in found]
    return [min(values), max(values)]


def ratios_of(cases: dict[str, dict[str, float]]) -> dict[str, float]:
    """Ratios of cases: prefix cache hits over misses, rules over no rules, texts with pictures over texts alone."""
    pairs = [(label, label + loads.FRESH) for label in cases if label + loads.FRESH in cases]
    ruled = {
        f"{label}, output, over none": found["output"] / cases[loads.PLAIN]["output"]
        for label, found in cases.items()
        if loads.PLAIN in cases and " on " in label
    }
    with_background = {
        f"{label}, {name}, over none": found[name] / cases[label.removesuffix(loads.BACKGROUND)][name]
        for label, found in cases.items()
        if label.endswith(loads.BACKGROUND)
        for name in ("ITL p50", "ITL p99")
        if cases[label.removesuffix(loads.BACKGROUND)][name]
    }
    return (
        ruled
        | with_background
        | {
            f"{label}, {name}, found over not": cases[label][name] / cases[bare][name]
            for label, bare in pairs
            for name in COMPARED
            if cases[bare][name]
        }
    )


def print_cases(title: str, cases: dict[str, dict[str, float]]) -> None:
    """Prints one line per case."""
    heads = [name.replace("loop ", "").replace(" per ", "/") for name in UNITS]
    print(f"\n{title}\n{'case':<54}" + "".join(f"{head:>13}" for head in heads))
    print(f"{'':<54}" + "".join(f"{unit:>13}" for unit in UNITS.values()))
    for label, found in cases.items():
        cells = (targets.number(found.get(name)) for name in UNITS)
        print(f"{label:<54}" + "".join(f"{cell:>13}" for cell in cells), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b,0.6b", help=", ".join(SHAPES))
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--load", default="streams", help="some of streams,mixed,conversation,prefix,loop,rules,grammar,pictures"
    )
    parser.add_argument("--streams", default="1,4x230,16,64,256", help="and tokens of a prompt, where not 512")
    parser.add_argument("--seconds", type=float, default=60.0, help="measured per case at most, after its warm-up")
    parser.add_argument("--answers", type=int, default=1000, help="that end a case earlier; 0: only --seconds do")
    warm_up = "seconds discarded before each case; 0 (default): 2 and one more per 64 streams; 30 for a final run"
    parser.add_argument("--warm-up", type=float, default=0.0, help=warm_up)
    runs = "of all cases in turn, their median next to the least and the most; 1 (default) where time is short, else 3"
    parser.add_argument("--runs", type=int, default=1, help=runs)
    parser.add_argument("--sharegpt", type=Path, help="a file in ShareGPT's form, for lengths of real conversations")
    forms = f"quantised random weights, several behind commas: {FLOATS} (floats), {', '.join(FORMS)}"
    parser.add_argument("--weights", default=FLOATS, help=forms)
    parser.add_argument("--case", default="", help="names of cases, all others are left out")
    parser.add_argument("--flags", default="", help="more flags of the server, in one word")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    asked = args.weights.split(",")
    if unknown := [form for form in asked if form not in (FLOATS, *FORMS)]:
        parser.error(f"--weights {','.join(unknown)}: there are {FLOATS}, {', '.join(FORMS)}")
    status = 0
    for shape in args.shape.split(","):
        found: dict[str, Cases] = {}
        for args.weights in asked:
            try:
                failed, found[args.weights] = run_shape(shape, args)
                status |= failed
            except Exception:
                status = 1
                traceback.print_exc()
        for line in over_floats(found):
            print(f"{shape}, {line}", flush=True)
    return min(status, 1)


if __name__ == "__main__":
    sys.exit(main())
