"""One engine on several GPUs: the exchange by size, then steps of models on ranks, with what each must reach.

Random weights of real shapes, a process per case, so that a case that fails or hangs ends alone (after --limit
seconds). A case is "exchange", or a shape of shapes.py, a form of its weights, "experts" for whole experts per rank,
and "on RANKS": "llama-70b fp8 on 2", "30b-a3b experts on 2". Each line is printed and written into --out at once
(gpu_parallel.json); the last lines compare several ranks with one. All default cases take about 8 minutes on two H200.
Run: python -m tests.bench.gpu_parallel [--cases "exchange,8b on 1,8b on 2"] [--seconds 540] [--limit 130] [--out DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.base.config import RanksConfig
from tests.bench import targets
from tests.bench.gpu_offline import TINY_ENGINE, device_name
from tests.bench.shapes import SHAPES, write_folder

FILE = "gpu_parallel.json"
CASES = "exchange,8b on 1,8b on 2,32b on 2,llama-70b fp8 on 2,llama-70b on 2"  # of issue 48
# Reported without a must.
FURTHER = (
    "gpt-oss-120b on 1,gpt-oss-120b experts on 2,30b-a3b on 1,30b-a3b on 2,30b-a3b experts on 2,"
    "qwen-27b on 1,qwen-27b on 2,qwen-35b-a3b on 1,qwen-35b-a3b on 2,nano on 1,nano on 2"
)
WIDTH = 8192  # of the exchanges
WHAT = {  # shape -> its measurements
    "8b": ("1x576", "host", "prompt", "256x1024"),
    "32b": ("1x576",),
    "llama-70b": ("1x576",),
    "gpt-oss-120b": ("1x576", "64x1536"),
    "30b-a3b": ("1x576", "64x576", "256x576"),
    **dict.fromkeys(("qwen-27b", "qwen-35b-a3b", "nano"), ("1x576", "prompt", "64x576")),  # with states
    "tiny": ("1x96", "host", "prompt", "4x96"),
    "tiny-sparse": ("1x96",),
}
PROMPT = 8192
MUSTS = {  # case and measurement -> milliseconds
    ("32b on 2", "1 rows at 576"): 12.5,
    ("llama-70b on 2", "1 rows at 576"): 26.0,
    ("llama-70b fp8 on 2", "1 rows at 576"): 14.8,
}
RATIOS = {"1 rows at 576": 0.62, "256 rows at 1024": 0.60, f"prompt of {PROMPT}": 0.62}  # of 8b, 2 ranks against one
MOST_LAUNCH_US, MOST_MORE_IDLE_US = 10.0, 3.0  # of each further rank; beyond one GPU's

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A model on ranks."""

    shape: str
    form: str
    experts: bool  # whole experts per rank
    ranks: int

    @classmethod
    def of(cls, name: str) -> Case:
        """Raises SystemExit for names that have no shape or no number of ranks."""
        model, _, ranks = name.partition(" on ")
        shape, *words = model.split() or [""]
        if shape not in WHAT or not ranks.isdigit():
            raise SystemExit(
                f"--cases {name}: a case is exchange, or SHAPE [FORM] [experts] on RANKS; {', '.join(WHAT)}"
            )
        form = " ".join(word for word in words if word != "experts")
        return cls(shape, form, "experts" in words, int(ranks))

    @property
    def settings(self) -> dict[str, Any]:
        """Of the engine."""
        what = WHAT[self.shape]
        rows = sorted({int(name.partition("x")[0]) for name in what if name[0].isdigit()})
        found: dict[str, Any] = {"tensor_parallel": self.ranks, "max_num_seqs": rows[-1]}
        found["ranks"] = RanksConfig(whole_experts=self.experts)
        if self.shape.startswith("tiny"):
            return {**TINY_ENGINE, **found}
        if "prompt" in what:
            found["max_num_batched_tokens"] = PROMPT
        return {**found, "cudagraph_capture_sizes": tuple(rows)}


async def inside(case: Case, folder: str, device: str) -> None:
    """Measures a case in this process, and prints a line of JSON per measurement."""
    from tests.bench.rank_engine import RankEngine

    prompt = 200 if case.shape == "tiny" else PROMPT
    async for line in RankEngine(folder, device, **case.settings).measure(list(WHAT[case.shape]), prompt):
        print(json.dumps(line), flush=True)


def child(name: str, args: argparse.Namespace, folder: Path, limit: float) -> list[Line]:
    """The lines of a case, measured in a separate process; a process that fails or hangs adds a line with its error."""
    if name != "exchange":
        case = Case.of(name)
        write_folder(folder, SHAPES[case.shape], case.form)
    command = [sys.executable, "-m", "tests.bench.gpu_parallel", "--inside", name, "--folder", str(folder)]
    command += ["--device", args.device, "--gpus", str(args.gpus)]
    begun, found, late = time.perf_counter(), list[Line](), threading.Event()
    log = folder.with_suffix(".log")
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True) as process,
    ):

        def end() -> None:
            late.set()
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(limit, end)
        timer.start()
        assert process.stdout is not None
        for text in process.stdout:
            if text.startswith("{"):
                line = judged(name, json.loads(text))
                print(f"{name}: {line}", flush=True)
                found.append(line)
                targets.keep(args.out, FILE, name, {"device": device_name(args.device), "lines": found})
        code = process.wait()
        timer.cancel()
    if code:
        said = f"killed after {limit:.0f} s" if late.is_set() else f"exit {code}"
        last = log.read_text()[-3000:]
        print(f"{name}: {said}\n{last}", flush=True)
        found.append({"what": "failed", "error": said, "log": last})
    found.append({"what": "whole case", "s": round(time.perf_counter() - begun, 1)})
    targets.keep(args.out, FILE, name, {"device": device_name(args.device), "lines": found})
    return found


def judged(name: str, line: Line) -> Line:
    """The line, with the limit of its measurement."""
    must = MUSTS.get((name, line.get("what", "")))
    return line if must is None else {**line, "must": must, "met": line["ms"] <= must}


def compared(seen: dict[str, list[Line]]) -> list[Line]:
    """What is a ratio or a difference: the 8B on two ranks against one, and the exchanges' share of a step."""
    one, two = (numbers(seen.get(f"8b on {ranks}", [])) for ranks in (1, 2))
    found: list[Line] = []
    for what, must in RATIOS.items():
        if what in one and what in two:
            ratio = two[what] / one[what]
            found.append({"what": f"8b, {what}, 2 to 1", "ratio": round(ratio, 3), "must": must, "met": ratio <= must})
    for what, must in (("launch of a graph on all ranks", MOST_LAUNCH_US), ("idle between steps", MOST_MORE_IDLE_US)):
        if what in one and what in two:
            more = two[what] - one[what]
            found.append({"what": f"8b, {what}, further rank", "us": round(more, 2), "must": must, "met": more <= must})
    exchanges = {line["kilobytes"]: line["microseconds"] for line in seen.get("exchange", []) if "kilobytes" in line}
    layers = SHAPES["8b"]["num_hidden_layers"]
    near = [exchanges[size] for size in sorted(exchanges) if size * 512 >= SHAPES["8b"]["hidden_size"]]
    if near and "1 rows at 576" in two:
        share = 2 * layers * near[0] / 1e3 / two["1 rows at 576"]
        found.append({"what": "8b, 1 row: the exchanges' share of a step", "ratio": round(share, 3)})
    return found


def numbers(lines: Sequence[Line]) -> dict[str, float]:
    """The measured numbers by name."""
    return {line["what"]: line[unit] for line in lines for unit in ("ms", "us") if line.get(unit) is not None}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=CASES, help=f"further ones: {FURTHER}")
    parser.add_argument("--gpus", type=int, default=2, help="of the exchange")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=540, help="of the whole run; later cases are left out")
    parser.add_argument("--limit", type=float, default=130, help="seconds of one case")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.inside == "exchange":
        from tests.bench.gpu_exchange import lines

        for line in lines(args.gpus, WIDTH):
            print(json.dumps({"what": f"exchange of {line['kilobytes']} KB", **line}), flush=True)
        return 0
    if args.inside:
        asyncio.run(inside(Case.of(args.inside), args.folder, args.device))
        return 0
    names = [name.strip() for name in args.cases.split(",")]
    for name in names:
        if name != "exchange":
            Case.of(name)
    begun, seen = time.perf_counter(), dict[str, list[Line]]()
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(names):
            left = args.seconds - (time.perf_counter() - begun)
            if left < 10:
                seen[name] = [{"what": "failed", "error": f"not run: --seconds {args.seconds:.0f} are over"}]
                print(f"{name}: {seen[name]}", flush=True)
                continue
            seen[name] = child(name, args, Path(folder) / f"model-{number}", min(args.limit, left))
    last = compared(seen)
    for line in last:
        print(line, flush=True)
    targets.keep(args.out, FILE, "compared", {"lines": last})
    lines_of_all = [line for found in [*seen.values(), last] for line in found]
    return int(any(line["what"] == "failed" or line.get("met") is False for line in lines_of_all))


if __name__ == "__main__":
    sys.exit(main())
