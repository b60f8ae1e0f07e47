"""The loop's cost of a streamed token: route, text, frame, write; and how long the loop is blocked; a table, and JSON.

The whole server runs on real sockets, with readers in a separate process. `cpu` excludes the model's time: the engine
is paused, and its own delivery gets steps of made-up tokens, as from the device thread. The CPU time of the loop's
thread (with the writes of uvicorn and the transport) is divided by the tokens. `stall` runs the tiny model and records
how late a heartbeat of 1 ms on the loop is. Run: python -m tests.bench.stream_cpu [--json F]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from statistics import median, quantiles

from engine.base.output import StepOutput
from engine.base.stats import StepStats
from engine.engine import COST_CALLBACK, SLICE
from tests import tiny
from tests.end_to_end.inside import InsideServer, flags_of, inside
from tests.end_to_end.process import ROOT

TEXT = "The quick brown fox jumps over the lazy dog, 漢字 and 😀 too.\n"
IDLE = """
import sys, time
end, late = time.perf_counter() + float(sys.argv[1]), []
while (begun := time.perf_counter()) < end:
    time.sleep(0.001)
    late.append(time.perf_counter() - begun - 0.001)
print(sorted(late)[int(len(late) * 0.99)] * 1e3)
"""
ROOM = {"num_threads": 1, "max_num_seqs": 256, "max_num_batched_tokens": 512, "num_gpu_blocks_override": 16384}


def readers(port: int, streams: int, seconds: float, tokens: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.bench.readers", *map(str, (port, streams, seconds, tokens))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


# -- CPU per token


async def delivered(server: InsideServer, ids: list[int], tokens: list[int]) -> float:
    """CPU seconds of the loop's thread until a step's tokens are with the kernel."""
    output = StepOutput(StepStats(num_tokens=len(ids), num_sampled=len(ids)))
    for at, number in enumerate(ids):
        output.add(number, tokens[at], 0)
    begun = time.thread_time()
    server.state.engine.on_output(output)
    # Slices, and what a transport writes at the end of a loop iteration.
    for _ in range(len(ids) * COST_CALLBACK // SLICE + 2):
        await asyncio.sleep(0)
    return time.thread_time() - begun


async def cost(server: InsideServer, streams: int, steps: int) -> list[float]:
    """Microseconds per token of each step."""
    engine = server.state.engine
    for _ in range(2000):
        if len(engine.open_ids()) == streams:
            break
        await asyncio.sleep(0.01)
    ids = engine.open_ids()
    assert len(ids) == streams, f"{len(ids)} of {streams} requests have arrived"
    words = server.state.tokenizer.encode(TEXT * 4)
    await delivered(server, ids, [words[0]] * streams)  # response heads and role chunks
    found = []
    for step in range(steps):
        tokens = [words[(step + 7 * at) % len(words)] for at in range(streams)]
        found.append(await delivered(server, ids, tokens) / streams * 1e6)
        await asyncio.sleep(0.002)  # time for the readers to read, as between the steps of a model
    return found


def cpu(streams: int, steps: int = 200) -> tuple[float, float]:
    """Microseconds per token: median step, and best tenth of steps, which other load has disturbed least."""
    with inside(*flags_of(**ROOM), "--disable-access-log") as server:
        server.call(lambda: paused(server))
        with readers(server.port, streams, 120, 0) as process:
            try:
                found = server.call(lambda: cost(server, streams, steps))
                return round(median(found), 2), round(quantiles(found, n=10)[0], 2)
            finally:
                process.terminate()


async def paused(server: InsideServer) -> None:
    server.state.engine.pause()


# -- stalls


async def beats(seconds: float, every: float = 0.001) -> list[float]:
    """Lateness in seconds of each beat of a task on the loop."""
    late = []
    end = time.perf_counter() + seconds
    while (begun := time.perf_counter()) < end:
        await asyncio.sleep(every)
        late.append(time.perf_counter() - begun - every)
    return late


def stall(streams: int, seconds: float = 6.0, tokens: int = 100) -> dict[str, float]:
    """Lateness in ms, from the arrival of the first requests on, so that admission is included.

    `idle_p99` is the same for an idle process: the machine's own share.
    """
    flags = ("--model", str(tiny.checkpoint("qwen3")), *flags_of(**ROOM), "--disable-access-log")
    with inside(*flags) as server, readers(server.port, streams, seconds + 1, tokens) as process:
        while streams and server.state.engine.stats.running == 0 and process.poll() is None:
            time.sleep(0.005)
        command = [sys.executable, "-c", IDLE, str(seconds)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as idle:
            late = [value * 1e3 for value in server.call(lambda: beats(seconds))]
            own = float(idle.communicate(timeout=60)[0])
        events = int(process.communicate(timeout=60)[0])
    cuts = quantiles(late, n=100)
    found = {
        "p50": cuts[49],
        "p99": cuts[98],
        "max": max(late),
        "idle_p99": own,
        "events_per_s": events / (seconds + 1),
    }
    return {name: round(value, 2) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--machine", default=f"{platform.machine()}, Python {platform.python_version()}")
    asked = parser.parse_args()
    results = {
        "machine": asked.machine,
        "cpu_us_per_token": {str(streams): dict(zip(("median", "best"), cpu(streams))) for streams in (1, 32, 256)},
        "loop_late_ms": {str(streams): [stall(streams, 3.0) for _ in range(3)] for streams in (0, 32, 64, 256)},
    }
    print(json.dumps(results, indent=1))
    if asked.json:
        Path(asked.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
