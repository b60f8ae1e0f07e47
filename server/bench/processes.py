"""Runs a load in one process or in several, and collects their answers.

Owner: the bench's main thread and its event loop. One client process reads about twenty thousand events a second. For
more open requests than STREAMS_PER_PROCESS there are more processes, at most one per core.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import orjson

from server.bench.options import ServeOptions
from server.bench.reply import Reply
from server.bench.share import Share

STREAMS_PER_PROCESS = 64
START_DELAY_S = 0.05  # delay of the start after the start time is sent, so that it reaches all processes

Ready = Callable[[], Awaitable[object]]


@dataclass(slots=True)
class Outcome:
    """The results of all clients; times are seconds of time.perf_counter."""

    start: float = 0.0
    answers: list[Reply] = field(default_factory=list)
    processes: int = 1
    cpu_s: float = 0.0  # CPU time of the clients during the load


def count_of(options: ServeOptions) -> int:
    """Number of client processes for a load."""
    open_at_once = options.max_concurrency or options.num_prompts
    derived = min(-(-open_at_once // STREAMS_PER_PROCESS), os.cpu_count() or 1)
    return min(options.processes or derived, options.num_prompts, options.max_concurrency or options.num_prompts)


async def run(
    options: ServeOptions, model: str, ended: Callable[[int], None], stop: asyncio.Event, ready: Ready | None = None
) -> Outcome:
    """Run the whole load, or until `stop`. Raises RuntimeError if a process fails.

    `ended` is called with the number of ended requests; `ready` is awaited before the start, when all bodies are drawn.
    """
    count = count_of(options)
    if count == 1:
        share = Share(options, model, 0, 1)
        if ready is not None:
            await ready()
        begun_cpu = time.process_time()
        outcome = Outcome(time.perf_counter() + START_DELAY_S)

        def record(answer: Reply) -> None:
            outcome.answers.append(answer)
            ended(len(outcome.answers))

        await share.run(outcome.start, record, stop)
        outcome.cpu_s = time.process_time() - begun_cpu
        return outcome
    workers = await asyncio.gather(*(worker(options, model, first, count) for first in range(count)))
    seen = [0] * count
    stopped = asyncio.ensure_future(stop.wait())
    try:
        if ready is not None:
            await ready()
        outcome = Outcome(time.perf_counter() + START_DELAY_S, processes=count)
        load = asyncio.gather(*(collect(one, at, outcome, seen, ended) for at, one in enumerate(workers)))
        stopped.add_done_callback(lambda _: close(workers))
        await load
        return outcome
    finally:
        stopped.cancel()
        for one in workers:
            if one.returncode is None:
                one.kill()
                await one.wait()


async def worker(options: ServeOptions, model: str, first: int, step: int) -> asyncio.subprocess.Process:
    """Start a process that has drawn its bodies and waits for the start."""
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-m", "server.bench.worker"]
    # Its own session: signals of the terminal reach only this process, which then ends the load.
    one = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 30, start_new_session=True)
    job = {"options": dataclasses.asdict(options), "model": model, "first": first, "step": step}
    assert one.stdin is not None
    assert one.stdout is not None
    one.stdin.write(orjson.dumps(job) + b"\n")
    if await one.stdout.readline() != b"ready\n":
        await one.wait()
        raise RuntimeError("a client process did not start")
    return one


def close(workers: list[asyncio.subprocess.Process]) -> None:
    """Close the workers' stdin, which ends their load."""
    for one in workers:
        assert one.stdin is not None
        one.stdin.close()


async def collect(
    one: asyncio.subprocess.Process, at: int, outcome: Outcome, seen: list[int], ended: Callable[[int], None]
) -> None:
    """Start a process's load and read its output until the result."""
    assert one.stdin is not None
    assert one.stdout is not None
    one.stdin.write(f"{outcome.start!r}\n".encode())
    line = b""
    while (line := await one.stdout.readline()) and not line.startswith(b"{"):
        seen[at] = int(line)
        ended(sum(seen))
    if await one.wait() or not line:
        raise RuntimeError(f"a client process ended with status {one.returncode}")
    result = orjson.loads(line)
    outcome.answers += [Reply(**answer) for answer in result["answers"]]
    outcome.cpu_s += result["cpu_s"]
