"""The cost of a setting: decode steps of one model with and without the setting, alternately in one process.

Random weights (--load-format dummy), random prompts, greedy, prefix cache off. Both engines are alive at the same time,
so card and clock are the same for both; --layers reduces the layers of a model that does not fit twice. Prints for each
case and number of rows: the median time of a step without and with the setting, the ratio of the two, the smallest and
the largest ratio of a turn, and the ratio that the project requires. Writes gpu_beside.json into --out.
With `return_routed_experts`, requests to the engine with the setting also request the experts of their tokens.
Run: python -m tests.bench.gpu_beside --setting return_routed_experts --cases "30b-a3b fp8-blocks,gpt-oss-20b"
         --layers 40 [--rows 1,256] [--context 128] [--turns 4] [--out DIR]
     python -m tests.bench.gpu_beside --setting deterministic --cases "8b,8b fp8,8b fp8-blocks,8b w4" --rows 1,32,256
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from engine import Engine, EngineConfig
from tests.bench import targets
from tests.bench.crowd import Steps, decode
from tests.bench.gpu_offline import TINY_ENGINE, device_name
from tests.bench.shapes import FORMS, SHAPES, write_folder

FILE = "gpu_beside.json"
SETTINGS: dict[str, dict[str, Any]] = {  # setting -> parameters of requests to the engine with the setting
    "return_routed_experts": {"return_routed_experts": True},
    "deterministic": {},
}
# (setting, rows) -> largest allowed ratio.
ASKED = {("return_routed_experts", 1): 1.01, ("return_routed_experts", 256): 1.02}
BLOCK = 16  # tokens


def with_layers(config: dict[str, Any], count: int) -> dict[str, Any]:
    """The shape with its first `count` layers; 0 or more than it has: all layers."""
    count = min(count or config["num_hidden_layers"], config["num_hidden_layers"])
    kinds = {"layer_types": config["layer_types"][:count]} if "layer_types" in config else {}
    return {**config, "num_hidden_layers": count, **kinds}


@contextmanager
def model_of(case: str, layers: int) -> Iterator[Path]:
    """The folder of a model; `case` is `SHAPE` or `SHAPE FORM`."""
    shape, _, form = case.partition(" ")
    if form and form not in FORMS:
        raise ValueError(f"{case}: no such form; there are {', '.join(FORMS)}")
    with tempfile.TemporaryDirectory() as name:
        yield write_folder(Path(name) / f"dummy-{shape}", with_layers(SHAPES[shape], layers), form)


def settings_of(shape: str, folder: Path, args: argparse.Namespace, rows: list[int]) -> dict[str, Any]:
    """Settings of both engines: only as many blocks as the rows take, so that two engines fit."""
    given = TINY_ENGINE if shape.startswith("tiny") else {}
    lag = max(rows) * args.context // given.get("max_num_batched_tokens", 2048)
    most = args.context + 96 + 2 * lag + 8  # tokens per row, see crowd.decode
    blocks = max(rows) * (-(-most // BLOCK) + 1) + 64
    fixed = {"num_gpu_blocks_override": blocks, "max_num_seqs": max(rows)}
    fixed |= {"load_format": "dummy", "enable_prefix_caching": False}
    return {"model": str(folder), "device": args.device, **given, **fixed}


async def compare(case: str, args: argparse.Namespace) -> dict[str, Any]:
    """rows -> seconds per step without and with the setting, one pair per turn."""
    rows, draw = [int(each) for each in args.rows.split(",")], np.random.default_rng(0)
    found: dict[str, Any] = {str(count): {"off": [], "on": []} for count in rows}
    engines: dict[str, Engine] = {}
    with model_of(case, args.layers) as folder:
        settings = settings_of(case.split()[0], folder, args, rows)
        try:
            for side in ("off", "on"):
                engines[side] = Engine(EngineConfig(**settings | {args.setting: side == "on"}))
                await engines[side].start()
            steps = {side: Steps(engine) for side, engine in engines.items()}
            for turn in range(1 + args.turns):
                for side in ("on", "off") if turn % 2 else ("off", "on"):
                    rules = SETTINGS[args.setting] if side == "on" else {}
                    for count in rows:
                        took = await decode(engines[side], steps[side], count, args.context, draw, **rules)
                        if turn:
                            found[str(count)][side].append(took.step_s)
        finally:
            for engine in engines.values():
                await engine.stop(5)
    return found


def ratio_of(times: dict[str, list[float]]) -> tuple[float, float, float]:
    """The ratio of the medians, and the smallest and largest ratio of a turn."""
    each = [on / off for off, on in zip(times["off"], times["on"], strict=True)]
    return statistics.median(times["on"]) / statistics.median(times["off"]), min(each), max(each)


def show(case: str, setting: str, found: dict[str, Any]) -> None:
    for rows, times in found.items():
        ratio, least, most = ratio_of(times)
        off, on = (statistics.median(times[side]) * 1e3 for side in ("off", "on"))
        asked = ASKED.get((setting, int(rows)))
        said = "" if asked is None else f"; asked {asked}: {'met' if ratio <= asked else 'MISSED'}"
        print(
            f"{case}, {setting}, {rows} rows: {off:.3f} -> {on:.3f} ms, {ratio:.3f} times ({least:.3f} to {most:.3f})"
            f"{said}",
            flush=True,
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", required=True, choices=SETTINGS)
    parser.add_argument("--cases", required=True, help="SHAPE or SHAPE FORM, several behind commas")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--layers", type=int, default=0, help="of the model at most; 0 (default): all")
    parser.add_argument("--rows", default="1,256")
    parser.add_argument("--context", type=int, default=128, help="tokens of a row, about")
    parser.add_argument("--turns", type=int, default=4, help="of both engines, behind one that is not counted")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    failed = 0
    for case in args.cases.split(","):
        try:
            found = asyncio.run(compare(case, args))
        except Exception:
            failed += 1
            traceback.print_exc()
            continue
        show(case, args.setting, found)
        report = {"device": device_name(args.device), "layers": args.layers, "context": args.context, "seconds": found}
        targets.keep(args.out, FILE, f"{case}, {args.setting}", report)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
