"""bench sweep: a bench command over a grid of flags, with a process and a JSON file per combination; then table and
plot.

Owner: main thread. A combination whose file exists is not run again, so an interrupted sweep continues where it
stopped. The plan is YAML: `command`, common `flags`, `grid` of flags with lists, and the `metrics` to print.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from server.bench.options import SweepOptions
from server.bench.output import number, text_of, words_of
from server.bench.plot import Panel, draw_panels
from server.bench.progress import Progress

KEYS = {"command", "flags", "grid", "metrics"}
COMPARED = {
    "serve": ["requests_per_s", "output_tokens_per_s", "ttft_ms_p50", "ttft_ms_p99", "itl_ms_p99"],
    "throughput": ["output_tokens_per_s", "total_tokens_per_s", "host_us_per_step"],
}
Combination = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """A sweep's plan, read and checked."""

    command: str
    flags: Combination
    grid: dict[str, list[Any]]
    metrics: list[str]

    @property
    def combinations(self) -> list[Combination]:
        """All combinations in the order of the grid; the last flag changes first."""
        return [dict(zip(self.grid, values)) for values in itertools.product(*self.grid.values())]


def read(path: str) -> Plan:
    """Read and check a plan. Raises ValueError and OSError."""
    content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not {"command", "grid"} <= content.keys() <= KEYS:
        raise ValueError(f"--plan {path}: must have command and grid, and may have flags and metrics")
    grid = content["grid"]
    if (
        not isinstance(grid, dict)
        or not grid
        or not all(isinstance(values, list) and values for values in grid.values())
    ):
        raise ValueError(f"--plan {path}: grid must name flags, each with a list of values")
    command = str(content["command"])
    metrics = content.get("metrics") or COMPARED.get(command)
    if not metrics:
        raise ValueError(f"--plan {path}: name the metrics to show; {command} has no usual ones")
    return Plan(command, content.get("flags") or {}, grid, list(metrics))


def file_of(out: Path, combination: Combination) -> Path:
    name = " ".join(f"{flag}={text_of(value)}" for flag, value in combination.items())
    return out / (name.replace("/", "_") + ".json")


def run(options: SweepOptions) -> int:
    """The command's exit status: 1 if a combination failed."""
    try:
        plan, out = read(options.plan), Path(options.out)
        out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError, yaml.YAMLError) as error:
        print(f"omniloop: {error}", file=sys.stderr)
        return 2
    failed = []
    with Progress(len(plan.combinations), "combinations") as progress:
        for at, combination in enumerate(plan.combinations):
            if found(out, combination) is None and not measure(plan, out, combination):
                failed.append(combination)
            progress.show(at + 1)
    rows = [(one, seen) for one in plan.combinations if (seen := found(out, one)) is not None]
    print_table(plan, rows)
    if rows:
        draw(plan, rows, out / "sweep.png")
    for combination in failed:
        print(f"failed: {' '.join(words_of(combination))}", file=sys.stderr)
    return int(bool(failed))


def found(out: Path, combination: Combination) -> dict[str, Any] | None:
    """The results of a combination's run; None if it has not run to its end."""
    try:
        seen = json.loads(file_of(out, combination).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return None if seen.get("interrupted") else seen


def measure(plan: Plan, out: Path, combination: Combination) -> bool:
    """Run one combination; returns whether it succeeded."""
    words = words_of(plan.flags | combination | {"json": str(file_of(out, combination))})
    command = [sys.executable, "-m", "server", "bench", plan.command, *words]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr, flush=True)
    return done.returncode == 0


def print_table(plan: Plan, rows: list[tuple[Combination, dict[str, Any]]]) -> None:
    heads = [*plan.grid, *plan.metrics]
    widths = [max(12, len(head) + 2) for head in heads]
    print("".join(f"{head:>{width}}" for head, width in zip(heads, widths)))
    for combination, seen in rows:
        cells = [text_of(value) for value in combination.values()]
        cells += [number(seen.get(metric, "-")) for metric in plan.metrics]
        print("".join(f"{cell:>{width}}" for cell, width in zip(cells, widths)), flush=True)


def draw(plan: Plan, rows: list[tuple[Combination, dict[str, Any]]], path: Path) -> None:
    """Plot a panel per metric over the grid's first flag, with a line for each combination of the other flags."""
    first, *others = plan.grid
    places = {text_of(value): at for at, value in enumerate(plan.grid[first])}
    panels = []
    for metric in plan.metrics:
        lines: dict[str, tuple[list[float], list[float]]] = {}
        for combination, seen in rows:
            if metric not in seen:
                continue
            x = combination[first]
            line = lines.setdefault(" ".join(f"{name}={text_of(combination[name])}" for name in others), ([], []))
            is_number = isinstance(x, int | float) and not isinstance(x, bool)
            line[0].append(float(x) if is_number else float(places[text_of(x)]))
            line[1].append(float(seen[metric]))
        panels.append(Panel(metric, first, lines))
    draw_panels(str(path), panels)
