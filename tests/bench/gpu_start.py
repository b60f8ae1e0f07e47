"""Starts of one model in several forms: seconds to ready, rate of the weights, and memory that loading takes.

Each start is a separate process; all share one kernel cache. "SHAPE" and "SHAPE FORM" draw their weights on the device.
"files" are safetensors with random numbers for --layers layers; "fp8 online" reads them with --quantization fp8. Their
folder is in memory (/dev/shm if large enough, else the page cache, which still holds the written files). A shape with
one tensor per expert and a dense shape compare their rates. The cases of files come first and compile the kernels of
the later cases. Prints a line per start: seconds from the process's creation to ready, GB/s of the files, GiB of device
memory at the peak of loading (as torch got it from the driver) beyond the loaded weights, seconds by phase. Then prints
the project's requirements, checked on the last start of each case:
    FP8 drawn ready no later than bf16; 30B-A3B drawn in 25 s; experts' files at the rate of dense weights;
    fp8 online in 1.3 times bf16's time, its peak at most 1 GiB above its weights.
Writes gpu_start.json into --out.
Run: python -m tests.bench.gpu_start [--cases "8b files,8b,8b fp8 online,8b fp8,30b-a3b files,30b-a3b"] [--layers 8]
         [--starts 1] [--out DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import engine.run.start as run_start
from engine import Engine, EngineConfig
from engine.models.registry import build_model, load_model_config
from engine.weights.files import INDEX
from engine.weights.load import weight_bytes
from engine.weights.table import expand
from tests.bench import targets
from tests.bench.gpu_beside import with_layers
from tests.bench.gpu_offline import TINY_ENGINE, device_name, since_process_start
from tests.bench.shapes import SHAPES, write_folder

FILE = "gpu_start.json"
CASES = "8b files,8b,8b fp8 online,8b fp8,30b-a3b files,30b-a3b"
MEMORY = Path("/dev/shm")
SHARD = 4 << 30  # bytes per file
CHUNK = 64 << 20  # bytes of random numbers, written repeatedly
GIB = 1 << 30
CASE_S = 200.0


@dataclass(frozen=True, slots=True)
class Case:
    """A model to start: `SHAPE`, `SHAPE FORM`, `SHAPE files`, or `SHAPE fp8 online`, which reads the files."""

    shape: str
    form: str = ""
    files: bool = False
    online: bool = False

    @classmethod
    def of(cls, name: str) -> Case:
        shape, _, rest = name.partition(" ")
        online = rest == "fp8 online"
        return cls(shape, "" if online or rest == "files" else rest, online or rest == "files", online)


def write_weights(folder: Path) -> int:
    """Writes random bfloat16 for every tensor of the configuration, in files of SHARD bytes; returns all bytes."""
    model = build_model(load_model_config(folder), torch.bfloat16)
    shapes = {name: place.wanted.shape for name, place in expand(model.weight_table(), model).items()}
    numbers = (torch.randn(CHUNK // 2) * 0.02).bfloat16().view(torch.uint8).numpy().data
    files: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in shapes.items():
        if size > SHARD:
            files.append({})
            size = 0
        files[-1][name] = shape
        size += 2 * torch.Size(shape).numel()
    total, owners = 0, {}
    for number, tensors in enumerate(files, 1):
        path = folder / f"model-{number:05}-of-{len(files):05}.safetensors"
        header, at = {}, 0
        for name, shape in tensors.items():
            end = at + 2 * torch.Size(shape).numel()
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
            at, owners[name] = end, path.name
        said = json.dumps(header).encode()
        with path.open("wb") as file:
            file.write(len(said).to_bytes(8, "little") + said)
            for begin in range(0, at, CHUNK):
                file.write(numbers[: min(CHUNK, at - begin)])
        total += at
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": owners}))
    return total


@contextmanager
def folders(cases: Sequence[Case], layers: int) -> Iterator[Callable[[Case], Path]]:
    """A function that makes the folder of a case; the files of a shape are written once."""
    room = shutil.disk_usage(MEMORY).free if MEMORY.is_dir() else 0
    shapes = {case.shape: with_layers(SHAPES[case.shape], layers) for case in cases if case.files}
    with tempfile.TemporaryDirectory() as probe:
        wanted = 0
        for shape, config in shapes.items():
            model = load_model_config(write_folder(Path(probe) / shape, config))
            wanted += weight_bytes(build_model(model, torch.bfloat16))
    with tempfile.TemporaryDirectory(dir=MEMORY if room > 1.1 * wanted else None) as name:

        def folder_of(case: Case) -> Path:
            if not case.files:
                return write_folder(Path(name) / f"dummy-{case.shape}-{case.form}", SHAPES[case.shape], case.form)
            folder = Path(name) / f"files-{case.shape}"
            if not folder.is_dir():
                begun = time.perf_counter()
                size = write_weights(write_folder(folder, shapes[case.shape]))
                print(f"{case.shape}: {size / 1e9:.1f} GB in {name} in {time.perf_counter() - begun:.1f} s", flush=True)
            return folder

        yield folder_of


async def start(case: Case, folder: Path, device: str) -> dict[str, Any]:
    """Starts and stops an engine; returns seconds by phase, and the time and memory of loading."""
    found: dict[str, Any] = {}
    read = run_start.read_weights

    def watched(*args: Any) -> None:
        on_device = bool(args[-1])  # accelerators
        if on_device:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if on_device else 0
        begun = time.perf_counter()
        read(*args)
        if on_device:
            torch.cuda.synchronize()
            found["held"] = torch.cuda.memory_allocated() - before
            found["peak"] = torch.cuda.max_memory_reserved() - before
            found["peak_allocated"] = torch.cuda.max_memory_allocated() - before
        found["read_s"] = time.perf_counter() - begun

    given: dict[str, Any] = {"load_format": "auto" if case.files else "dummy", "device": device}
    given |= {"quantization": "fp8" if case.online else ""} | (TINY_ENGINE if case.shape.startswith("tiny") else {})
    engine = Engine(EngineConfig(str(folder), **given))
    try:
        with mock.patch.object(run_start, "read_weights", watched):
            await engine.start()
        found["ready_s"] = since_process_start()
    finally:
        await engine.stop(5)
    return {**found, "phases": {name: round(seconds, 3) for name, seconds in engine.startup.items()}}


def child(name: str, folder: Path, args: argparse.Namespace, cache: Path) -> dict[str, Any]:
    """Runs a start in a separate process."""
    command = [sys.executable, "-m", "tests.bench.gpu_start", "--inside", str(folder), "--cases", name]
    command += ["--device", args.device]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(command, env=environment, check=True, timeout=CASE_S, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def print_starts(name: str, found: list[dict[str, Any]], size: int) -> None:
    """Prints a line per start; `size`: bytes of the files."""
    for number, each in enumerate(found, 1):
        rate = f", {size / each['read_s'] / 1e9:.2f} GB/s" if size else ""
        room = ""
        if "peak" in each:
            above, used = ((each[key] - each["held"]) / GIB for key in ("peak", "peak_allocated"))
            room = f", weights {each['held'] / GIB:.2f} GiB, at its worst {above:.2f} more ({used:.2f} of tensors)"
        phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in each["phases"].items())
        print(f"{name}, start {number}: {each['ready_s']:.2f} s{rate}{room} ({phases})", flush=True)


def apart(found: dict[str, Any]) -> float:
    """Seconds to ready without the time to compile kernels."""
    return found["ready_s"] - found["phases"].get("kernels", 0.0)


def asked(seen: dict[str, list[dict[str, Any]]], sizes: dict[str, int]) -> list[str]:
    """The requirements, checked on the last starts of the cases that ran."""
    last = {name: found[-1] for name, found in seen.items()}
    said = []

    def judge(what: str, value: float, most: float) -> None:
        said.append(f"{what}: {value:.3f}, asked at most {most}: {'met' if value <= most else 'MISSED'}")

    if "30b-a3b" in last:
        judge("30b-a3b dummy, seconds to ready", last["30b-a3b"]["ready_s"], 25)
    for name, each in last.items():
        case = Case.of(name)
        floats = last.get(f"{case.shape} files" if case.files else case.shape)
        if floats is None or floats is each:
            continue
        if case.online:
            judge(f"{name}, reading, over bf16's time", each["read_s"] / floats["read_s"], 1.3)
            judge(f"{name}, ready, kernels apart, over bf16's time", apart(each) / apart(floats), 1.3)
            if "peak" in each:
                judge(f"{name}, GiB at its worst above its weights", (each["peak"] - each["held"]) / GIB, 1)
        elif case.form:
            judge(f"{name}, ready, over bf16's time", each["ready_s"] / floats["ready_s"], 1)
    rates = {name: size / last[name]["read_s"] / 1e9 for name, size in sizes.items() if name in last}
    said += [f"{name}: {rate:.2f} GB/s of files in memory" for name, rate in rates.items()]
    return said


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--layers", type=int, default=8, help="of models in files")
    parser.add_argument("--starts", type=int, default=1, help="of each case, one behind the other")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    names = args.cases.split(",")
    if args.inside:
        print(json.dumps(asyncio.run(start(Case.of(names[0]), args.inside, args.device))))
        return 0
    seen: dict[str, list[dict[str, Any]]] = {}
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as cache, folders([Case.of(name) for name in names], args.layers) as folder_of:
        for name in names:
            try:
                folder = folder_of(Case.of(name))
                found = [child(name, folder, args, Path(cache)) for _ in range(args.starts)]
            except Exception:
                traceback.print_exc()
                continue
            seen[name] = found
            if Case.of(name).files:
                sizes[name] = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
            print_starts(name, found, sizes.get(name, 0))
            report = {"device": device_name(args.device), "bytes": sizes.get(name, 0), "starts": found}
            targets.keep(args.out, FILE, name, report)
    print("\n".join(asked(seen, sizes)))
    return min(len(names) - len(seen), 1)


if __name__ == "__main__":
    sys.exit(main())
