"""One engine on several GPUs: a table of measurements for 2, 4 or 8 GPUs, with floors and what each must reach.

Random weights of real shapes, a process per case, so that a case that fails or hangs ends alone (after --limit
seconds). Cases (rank_cases) begin in order, as soon as enough GPUs are free. Each line is printed and written into
--out at once (gpu_parallel.json); the last lines compare several GPUs with one. A table takes less than ten minutes.
Run: python -m tests.bench.gpu_parallel --gpus 4 [--cases "8b on 1,8b on 4"] [--seconds 540] [--limit 130] [--out DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.bench import gpu_rank_answers, gpu_rank_chaos, targets
from tests.bench.cards import Cards
from tests.bench.gpu_offline import device_name
from tests.bench.gpu_start import write_weights
from tests.bench.rank_cases import FURTHER, PROMPT, TABLES, WHAT, WIDTH, Case, Line, compared, judged
from tests.bench.shapes import SHAPES, write_folder

FILE = "gpu_parallel.json"
ANSWERS, REQUESTS = 200, 2000
SHORT = {"answers": 6, "requests": 24}  # on a CPU


async def inside(case: Case, folder: str, device: str) -> AsyncIterator[Line]:
    """Measures a case in this process."""
    tiny = device == "cpu"
    if case.shape == "exchange":
        from tests.bench.gpu_exchange import lines

        for line in lines(case.ranks, WIDTH):
            yield {"what": f"exchange of {line['kilobytes']} KB", **line}
    elif case.shape == "answers":
        count, tokens = (SHORT["answers"], 5) if tiny else (ANSWERS, 32)
        args = argparse.Namespace(shape="tiny" if tiny else "8b", answers=count, tokens=tokens, device=device)
        found = await gpu_rank_answers.answers(folder, args, case.ranks, deterministic=False)
        yield {"what": "answers", **{name: [digest(each) for each in given] for name, given in found.items()}}
    elif case.shape == "chaos":
        flags = ["--ranks", str(case.ranks), "--device", device, "--shape", "tiny" if tiny else "0.6b"]
        flags += ["--requests", str(SHORT["requests"] if tiny else REQUESTS), "--longest", "60" if tiny else "600"]
        given = await gpu_rank_chaos.inside(gpu_rank_chaos.parsed(flags), Path(folder))
        yield {"what": "mixed requests with aborts", **given, "met": gpu_rank_chaos.is_clean(given)}
    else:
        from tests.bench.rank_engine import RankEngine

        size = write_weights(Path(folder)) if case.form == "files" else 0
        names = [] if size else list(WHAT[case.shape])
        engine = RankEngine(folder, device, **case.settings)
        async for line in engine.measure(names, 200 if case.shape == "tiny" else PROMPT):
            yield line
            if size and line["what"] == "start":
                seconds = engine.engine.startup["weights"]
                yield {"what": "load", "gigabytes": size / 1e9, "gigabytes_per_second": round(size / 1e9 / seconds, 2)}


def digest(tokens: list[int]) -> str:
    """A name for an answer."""
    return hashlib.sha256(str(tokens).encode()).hexdigest()[:16]


def folder_of(case: Case, folder: Path, device: str) -> Path:
    """Writes a configuration for a case."""
    small = device == "cpu"
    shape = {"answers": "tiny" if small else "8b", "chaos": "tiny" if small else "0.6b"}.get(case.shape, case.shape)
    return folder if shape == "exchange" else write_folder(folder, SHAPES[shape], case.form.replace("files", ""))


@contextmanager
def killed(process: subprocess.Popen[str], limit: float) -> Iterator[threading.Event]:
    """Kills a process and its children after `limit` seconds; the event is set then."""
    late = threading.Event()

    def end() -> None:
        late.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit, end)
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()


class Table:
    """One run. Threads: one per running case."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder, self.cards = args, folder, Cards(args.gpus)
        self.seen: dict[str, list[Line]] = {}
        self._writing = threading.Lock()
        self._ends = time.perf_counter() + args.seconds

    def run(self, names: Sequence[str]) -> None:
        """Measures all cases; one that begins after --seconds is left out."""
        threads = []
        for number, name in enumerate(names):
            taken = self.cards.take(Case.of(name).ranks)
            self.seen[name] = []
            thread = threading.Thread(target=self._child, args=(name, taken, self.folder / f"model-{number}"))
            thread.start()
            threads.append(thread)
        for thread in threads:
            thread.join()

    def _note(self, name: str, line: Line) -> None:
        with self._writing:
            said = {what: value for what, value in line.items() if what not in ("alone", "together", "log")}
            print(f"{name}: {said}", flush=True)
            self.seen[name].append(line)
            targets.keep(self.args.out, FILE, name, {"device": self.args.named, "lines": self.seen[name]})

    def _child(self, name: str, taken: list[int], folder: Path) -> None:
        with self.cards.giving_back(taken) as environment:
            begun = time.perf_counter()
            limit = min(self.args.limit, self._ends - begun)
            if limit < 10:
                self._note(name, {"what": "failed", "error": f"not run: --seconds {self.args.seconds:.0f} are over"})
                return
            self._measure(name, environment, folder_of(Case.of(name), folder, self.args.device), limit)
            self._note(name, {"what": "whole case", "s": round(time.perf_counter() - begun, 1)})

    def _measure(self, name: str, environment: dict[str, str], folder: Path, limit: float) -> None:
        """Notes the lines of a process; one that fails or hangs adds a line with its error."""
        command = [sys.executable, "-m", "tests.bench.gpu_parallel", "--inside", name, "--folder", str(folder)]
        command += ["--device", self.args.device]
        log = folder.with_suffix(".log")
        with (
            log.open("w") as errors,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True, env=environment
            ) as process,
            killed(process, limit) as late,
        ):
            assert process.stdout is not None
            for text in process.stdout:
                if text.startswith("{"):
                    self._note(name, judged(name, json.loads(text)))
            code = process.wait()
        if code:
            said, last = f"killed after {limit:.0f} s" if late.is_set() else f"exit {code}", log.read_text()[-3000:]
            print(last, flush=True)
            self._note(name, {"what": "failed", "error": said, "log": last})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2, choices=TABLES, help="whose table")
    parser.add_argument("--cases", help=f"instead of the table's; further ones: {FURTHER}")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=540, help="of the whole run; later cases are left out")
    parser.add_argument("--limit", type=float, default=130, help="seconds of one case")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.inside:
        asyncio.run(printed(Case.of(args.inside), args.folder, args.device))
        return 0
    names = [name.strip() for name in (args.cases or TABLES[args.gpus]).split(",")]
    for name in names:
        if Case.of(name).ranks > args.gpus:
            raise SystemExit(f"--cases {name}: --gpus is {args.gpus}")
    args.named = device_name(args.device)
    with tempfile.TemporaryDirectory() as folder:
        table = Table(args, Path(folder))
        table.run(names)
    last = compared(table.seen)
    for line in last:
        print(line, flush=True)
    targets.keep(args.out, FILE, "compared", {"lines": last})
    lines: list[dict[str, Any]] = [line for found in [*table.seen.values(), last] for line in found]
    return int(any(line["what"] == "failed" or line.get("met") is False for line in lines))


async def printed(case: Case, folder: str, device: str) -> None:
    """Measures a case, and prints a line of JSON per measurement."""
    async for line in inside(case, folder, device):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main())
