"""Speed of one model in one process, without HTTP: start, decode steps, first tokens, prefill, whole batches, the host.

Random weights of a real shape (--load-format dummy), greedy, random prompts, prefix cache off, as in the peer's
measurement. Each shape runs in a separate process: once with an empty kernel cache, and once more with a full cache for
the time to ready. Prints each number with its aim, floor and peer; writes gpu_offline.json into --out.
Run: python -m tests.bench.gpu_offline [--shape 8b,0.6b] [--out DIR]
         [--only decode,host,ttft,prefill,offline,prefix,profile,prompt] [--deterministic] [--weights w4]
         [--model-impl transformers]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from engine import Engine, EngineConfig
from tests.bench import targets
from tests.bench.crowd import Crowd, Decode, Steps, decode
from tests.bench.shapes import FORMS, SHAPES, write_folder

REPEATS = 3
FILE = "gpu_offline.json"
CASE_S, SHAPE_S = 150.0, 420.0  # time limits of a case and of a shape


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a shape's cases."""

    rows: tuple[int, ...] = (1, 32, 256)
    contexts: tuple[int, ...] = (576, 1024)  # the mean context of 512 tokens in and 128 out, and a longer one
    alone: tuple[int, ...] = (128, 256)  # prompt lengths of the first-token cases
    long: int = 8192
    many: tuple[int, int] = (16, 1024)
    batch: tuple[int, int, int] = (256, 512, 128)
    # Context and steps of the case that measures the host's work and the device's idle times.
    host: tuple[int, int] = (768, 600)
    half: int = 0  # bytes of KV cache per engine if two engines run at once; 0: they do not fit
    engine: dict[str, Any] = field(default_factory=dict)


TINY_ENGINE = {"num_gpu_blocks_override": 512, "max_num_seqs": 16, "max_num_batched_tokens": 64, "num_threads": 1}
LONG_STEPS = {"max_num_batched_tokens": 8192}  # the peer's offline runs may take 16,384 tokens per step
SIZES = {
    "tiny": Sizes((1, 4), (48, 96), (16,), 200, (4, 64), (16, 32, 16), (60, 40), 1 << 24, TINY_ENGINE),
    "8b": Sizes(engine=LONG_STEPS),
    "0.6b": Sizes(half=22 << 30),
    "30b-a3b": Sizes(engine=LONG_STEPS),
    "gpt-oss-20b": Sizes(engine=LONG_STEPS),
    "llama-8b": Sizes(engine=LONG_STEPS),
    "gemma-12b": Sizes(),
    "gemma-12b-vl": Sizes((1, 32, 128), (576,)),  # the weights and 256 rows of context do not fit together
    **dict.fromkeys(("vl-7b", "vl3-8b", "internvl3-8b", "pixtral-12b", "omni-7b"), Sizes(contexts=(576,))),
    **dict.fromkeys(("qwen-35b-a3b-fp8", "qwen-27b-fp8", "nano"), Sizes((1, 16), (576,))),
}


def since_process_start() -> float:
    """Seconds since this process was created, interpreter start and imports included."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


class Bench:
    """The cases of one shape; the cases fill `seen` and `units`."""

    def __init__(self, shape: str, args: argparse.Namespace, folder: Path) -> None:
        self.shape, self.sizes = shape, SIZES[shape]
        self.layers = SHAPES[shape].get("text_config", SHAPES[shape])["num_hidden_layers"]
        self.settings = {"model": str(folder), "load_format": "dummy", "device": args.device, **self.sizes.engine}
        self.settings |= {"deterministic": args.deterministic, "model_impl": args.model_impl}
        self.draw = np.random.default_rng(0)
        self.seen: dict[str, float] = {}
        self.units: dict[str, str] = {}
        self.more: dict[str, Any] = {}  # results without a place in the table
        self.failed: list[str] = []
        self.engine: Engine
        self.steps: Steps

    def put(self, name: str, value: float, unit: str) -> None:
        self.seen[name], self.units[name] = value, unit

    def keep(self, out: Path | None) -> None:
        """Writes the results so far: a case that kills the process loses only its own results."""
        kept = {"shape": self.shape, "seen": self.seen, "units": self.units, "more": self.more, "failed": self.failed}
        targets.keep(out, FILE, self.shape, kept)

    async def start(self) -> None:
        self.engine = Engine(EngineConfig(**self.settings, enable_prefix_caching=False))
        await self.engine.start()
        self.steps = Steps(self.engine)
        self.more["startup"] = {name: round(seconds, 3) for name, seconds in self.engine.startup.items()}

    async def case(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        """Runs a case; if it fails, reports the failure and continues with the next case."""
        begun = time.perf_counter()
        try:
            await asyncio.wait_for(run(), CASE_S)
        except Exception:
            self.failed.append(name)
            traceback.print_exc()
        print(f"  [{self.shape} {name}: {time.perf_counter() - begun:.1f} s]", file=sys.stderr, flush=True)

    def prompts(self, count: int, length: int) -> list[np.ndarray]:
        return [self.draw.integers(2, self.engine.limits.vocab_size, length, dtype=np.int32) for _ in range(count)]

    async def decode(self) -> None:
        for context in self.sizes.contexts:
            for rows in self.sizes.rows:
                found = await decode(self.engine, self.steps, rows, context, self.draw)
                self.put(f"step, {rows} rows at {context}", found.step_s * 1e3, "ms")
                self.more[f"decode {rows} at {context}"] = {
                    "steps": found.steps,
                    "context": found.context,
                    **host(found),
                }

    async def host(self) -> None:
        """The device thread's cost per step of all rows, and the device's idle time, over many steps."""
        rows, (context, window) = self.sizes.rows[-1], self.sizes.host
        found = await decode(self.engine, self.steps, rows, context, self.draw, window)
        self.more[f"host, {rows} rows"] = {
            **host(found),
            "steps": found.steps,
            "gap_us": [round(gap * 1e6, 1) for gap in sorted(found.gaps)],
        }
        self.put(f"host work per step, {rows} rows", found.host_s * 1e6, "us")
        for name, part in zip(("plan", "launch", "settle"), found.parts_s, strict=True):
            self.put(f"host work per step, {rows} rows: {name}", part * 1e6, "us")
        self.put(f"device thread's CPU per step, {rows} rows, waits included", found.cpu_s * 1e6, "us")
        for name, share in (("p50", 50), ("p99", 99)) if found.gaps else ():
            gap = float(np.percentile(found.gaps, share))
            self.put(f"device idle between steps, {rows} rows, {name}", gap * 1e6, "us")

    async def ttft(self) -> None:
        for length in self.sizes.alone:
            times = []
            for _ in range(3 + 4 * REPEATS):
                crowd = await Crowd(self.engine, self.prompts(1, length), [4]).run()
                times.append(crowd.firsts[0] - crowd.begun)
                await asyncio.sleep(0.02)  # the engine becomes idle
            self.put(f"TTFT idle, {length} tokens", statistics.median(times[3:]) * 1e3, "ms")

    async def prefill(self) -> None:
        count, length = self.sizes.many
        single, several = [], []
        for _ in range(1 + REPEATS):
            single.append((await Crowd(self.engine, self.prompts(1, self.sizes.long), [1]).run()).seconds)
            several.append((await Crowd(self.engine, self.prompts(count, length), [1] * count).run()).seconds)
        self.put(f"prefill 1 x {self.sizes.long}", statistics.median(single[1:]) * 1e3, "ms")
        self.put(f"prefill {count} x {length}", count * length / statistics.median(several[1:]), "tok/s")

    async def offline(self) -> None:
        rows, length, answer = self.sizes.batch
        rates = [await self.rate(self.engine) for _ in range(1 + REPEATS)][1:]
        self.put(f"offline {rows} x ({length} in, {answer} out)", statistics.median(rates), "tok/s")
        self.more["offline rates"] = rates

    async def rate(self, engine: Engine) -> float:
        """Output tokens per second of a whole batch of different prompts."""
        rows, length, answer = self.sizes.batch
        crowd = await Crowd(engine, self.prompts(rows, length), [answer] * rows).run()
        return rows * answer / crowd.seconds

    async def prefix(self) -> None:
        """Prefix cache on and off, alternately; prompts share nothing. Both engines live, with half the memory each."""
        engines = {False: self.engine, True: Engine(EngineConfig(**self.settings, enable_prefix_caching=True))}
        rates: dict[bool, list[float]] = {False: [], True: []}
        await engines[True].start()
        try:
            for turn in range(1 + 2 * REPEATS):
                for cache in (True, False) if turn % 2 else (False, True):
                    rates[cache].append(await self.rate(engines[cache]))
        finally:
            await engines[True].stop(5)
        off, on = (statistics.median(rates[cache][1:]) for cache in (False, True))
        self.put("prefix cache on, 0 % hits: share lost", (off - on) / off * 100, "%")
        self.more["prefix cache"] = {"off": rates[False][1:], "on": rates[True][1:]}

    async def profile(self) -> None:
        """The device's time in decode steps by kernel, and its idle time, from torch's profiler."""
        if not has_card(self.settings["device"]):
            return
        for rows in (self.sizes.rows[0], self.sizes.rows[-1]):
            with recorded() as events:
                seen = await decode(self.engine, self.steps, rows, 256, self.draw)
            skew = time.time() - time.perf_counter()  # the profiler uses the wall clock
            begun, ended = ((at + skew) * 1e6 for at in seen.window)
            inside = [event for event in events if begun <= event[0] <= ended]
            table = self.more[f"profile {rows} rows"] = kernels(inside, seen.steps)
            self.put(f"profiled step, {rows} rows at 256", table["step_us"] / 1e3, "ms")
            self.put(f"profiled step, {rows} rows at 256, idle", table["idle_us"], "us")
            print_kernels(f"{self.shape}: kernels of a decode step of {rows} rows", table, self.layers)

    async def prompt(self) -> None:
        """The kernels from a single prompt of 512 tokens to its first token; idle is the time between two prompts."""
        if not has_card(self.settings["device"]):
            return
        await Crowd(self.engine, self.prompts(1, 512), [1]).run()
        with recorded() as events:
            for _ in range(REPEATS):
                await Crowd(self.engine, self.prompts(1, 512), [1]).run()
        table = self.more["profile of a prompt"] = kernels(events, REPEATS)
        self.put("profiled prompt of 512, busy", (table["step_us"] - table["idle_us"]) / 1e3, "ms")
        print_kernels(f"{self.shape}: kernels of a prompt of 512 tokens", table, self.layers)


def has_card(device: str) -> bool:
    import torch

    return device != "cpu" and torch.cuda.is_available()


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[float, float, str]]]:
    """(start, end, name) in microseconds of each kernel or copy on the device; filled at the end of the block."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True):  # the profiler's first start takes seconds
        torch.cuda.synchronize()
    events: list[tuple[float, float, str]] = []
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        yield events
        torch.cuda.synchronize()
    events += [
        (event.start_ns() / 1e3, event.end_ns() / 1e3, event.name())
        for event in found.profiler.kineto_results.events()
        if str(event.device_type()).endswith("CUDA")
    ]


def host(found: Decode) -> dict[str, Any]:
    """A decode case's host times in microseconds: parts and sum by wall clock, and the thread's CPU time."""
    plan, launch, settle = (round(part * 1e6, 1) for part in found.parts_s)
    parts = {"plan": plan, "launch": launch, "settle": settle}
    return {"host_us": found.host_s * 1e6, "parts_us": parts, "thread_cpu_us": found.cpu_s * 1e6}


def kernels(events: list[tuple[float, float, str]], steps: int) -> dict[str, Any]:
    """Microseconds per step by kernel, and the device's idle time; `events` are (start, end, name) in microseconds.

    Kernels overlap: a kernel that has begun may wait for the kernel before it. So a kernel's time counts only from the
    end of all earlier kernels.
    """
    if not events:
        return {"steps": steps, "step_us": 0.0, "idle_us": 0.0, "gaps_us": {}, "kernels": []}
    totals: dict[str, list[float]] = {}
    events = sorted(events)
    gaps, busy_until = [], events[0][0]
    for start, end, name in events:
        entry = totals.setdefault(name, [0.0, 0])
        entry[0] += max(end - max(start, busy_until), 0.0)
        entry[1] += 1
        if start > busy_until:
            gaps.append(start - busy_until)
        busy_until = max(busy_until, end)
    longest = sorted(gaps, reverse=True)[:steps]  # about one per step: the gaps between steps
    return {
        "steps": steps,
        "step_us": (busy_until - events[0][0]) / steps,
        "idle_us": sum(gaps) / steps,
        "gaps_us": {f"p{share}": round(float(np.percentile(longest, share)), 1) for share in (50, 99) if longest},
        "kernels": [
            {"name": name[:120], "us": round(total / steps, 2), "calls": round(calls / steps, 2)}
            for name, (total, calls) in sorted(totals.items(), key=lambda item: -item[1][0])
        ],
    }


def print_kernels(title: str, found: dict[str, Any], layers: int) -> None:
    """Prints the longest kernels first, with the time per layer of the model."""
    print(f"\n{title}: {found['step_us']:.0f} us, idle {found['idle_us']:.1f}, longest gaps {found['gaps_us']}")
    for entry in found["kernels"][:16]:
        each = f"{entry['us']:9.1f} us {entry['us'] / layers:8.2f} a layer"
        print(f"  {each} {entry['calls']:7.1f} x  {entry['name'][:88]}", flush=True)


@contextlib.contextmanager
def model_folder(shape: str, weights: str = "") -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield write_folder(Path(name) / f"dummy-{shape}", SHAPES[shape], weights)


async def run_shape(args: argparse.Namespace, only: list[str]) -> int:
    """Runs all cases of one shape in this process; returns the number of failed cases."""
    shape, out = args.shape, args.out
    with model_folder(shape, args.weights) as folder:
        bench = Bench(shape, args, folder)
        if "prefix" in only:
            bench.settings["kv_cache_memory_bytes"] = bench.sizes.half
        await bench.start()
        bench.put("ready, this process", since_process_start(), "s")
        try:
            bench.keep(out)
            for name in only:
                await bench.case(name, getattr(bench, name))
                bench.keep(out)
        finally:
            await bench.engine.stop(5)
    return len(bench.failed)


def child(shape: str, args: argparse.Namespace, only: list[str], out: Path, cache: Path) -> int:
    """Runs one shape in a separate process with the kernel cache `cache`."""
    command = [sys.executable, "-m", "tests.bench.gpu_offline", "--inside", "--shape", shape, "--device", args.device]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    command += ["--only", ",".join(only), "--out", str(out), *["--deterministic"] * args.deterministic]
    command += ["--weights", args.weights, "--model-impl", args.model_impl]
    try:
        return subprocess.run(command, env=environment, check=False, timeout=SHAPE_S).returncode
    except subprocess.TimeoutExpired:
        print(f"{shape}: given up after {SHAPE_S:.0f} s", file=sys.stderr, flush=True)
        return 1


def report(shape: str, args: argparse.Namespace, cache: Path) -> int:
    """Runs a shape cold, then warm for the time to ready and for two engines; prints the table and writes the JSON."""
    only = [name for name in args.only.split(",") if name]
    second = [name for name in only if name == "prefix" and SIZES[shape].half]
    with tempfile.TemporaryDirectory() as name:
        cold, warm = Path(name) / "cold", Path(name) / "warm"
        status = child(shape, args, [name for name in only if name != "prefix"], cold, cache)
        if not (cold / FILE).is_file():
            print(f"{shape}: nothing was measured (status {status})", flush=True)
            return status or 1
        kept = json.loads((cold / FILE).read_text())[shape]
        seen = {"ready, nothing compiled": kept["seen"].pop("ready, this process"), **kept["seen"]}
        units = {**kept["units"], "ready, nothing compiled": "s", "ready, kernels cached": "s"}
        if not args.quick:
            status |= child(shape, args, second, warm, cache)
            if (warm / FILE).is_file():
                again = json.loads((warm / FILE).read_text())[shape]
                ready = again["seen"].pop("ready, this process")
                seen = {"ready, kernels cached": ready, **seen, **again["seen"]}
                units |= again["units"]
                kept["more"] |= {f"{name}, kernels cached": found for name, found in again["more"].items()}
    through = args.model_impl * (args.model_impl != "auto")
    named = ", ".join(filter(None, (shape, args.weights, through, "deterministic" * args.deterministic)))
    targets.show(f"{named}, offline, {device_name(args.device)}", seen, targets.OFFLINE.get(shape, {}), units)
    for name, phases in kept["more"].items():
        if name.startswith("startup"):
            print(f"{name}: " + ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in phases.items()))
    targets.keep(args.out, FILE, named, {**kept, "seen": seen, "units": units, "device": device_name(args.device)})
    return status


def device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device != "cpu" and torch.cuda.is_available() else "cpu"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="8b,0.6b", help=", ".join(SHAPES))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--only", default="decode,host,ttft,prefill,offline,profile,prefix")
    parser.add_argument("--quick", action="store_true", help="no second start for the time with kernels cached")
    parser.add_argument("--deterministic", action="store_true", help="engines that give a row the same bits anywhere")
    parser.add_argument("--weights", default="", choices=("", *FORMS), help="quantised random weights")
    parser.add_argument("--model-impl", default="auto", choices=("auto", "native", "transformers"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        only = [name for name in args.only.split(",") if name]
        return asyncio.run(run_shape(args, only))
    with tempfile.TemporaryDirectory() as cache:
        return max(report(shape, args, Path(cache) / shape) for shape in args.shape.split(","))


if __name__ == "__main__":
    sys.exit(main())
