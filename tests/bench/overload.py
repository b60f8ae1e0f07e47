"""A server under more requests than it can answer: `python -m tests.bench.overload [SECONDS] [FLAG ...]` (S42, R14).

The flags are the server's. The requests are streamed chat completions of random lengths. First, clients that each wait
for their answer fill all rows: this measures the capacity. Then requests arrive by Poisson: at the rate of the
capacity; at three times that rate; a quiet key alone with one request per second; and the quiet key while another key
sends three times the capacity. The quiet key's client is a process of its own, since the client of the flood is late.
It begins SETTLE_S seconds after the flood. Prints JSON: times to first token, answers per second, refusals.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.end_to_end.process import ServerProcess
from tests.end_to_end.wire import request_bytes

ROWS = 64
LENGTHS = (16, 48)  # tokens per answer
TIMES = 3.0
SETTLE_S = 5.0  # answers in the first seconds of a run do not count


@dataclass
class Seen:
    """The results of one key's requests."""

    first_s: list[float] = field(default_factory=list)  # time to first token of answered requests
    ended: list[float] = field(default_factory=list)  # seconds since the beginning
    refused_s: list[float] = field(default_factory=list)  # time until a 429
    retry_after: list[int] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    sent: int = 0

    def summary(self, seconds: float) -> dict[str, object]:
        return {
            "sent": self.sent,
            "answered": len(self.ended),
            "answers_per_s": round(sum(SETTLE_S <= at < seconds for at in self.ended) / (seconds - SETTLE_S), 2),
            "first_token_s": quantiles(self.first_s),
            "refused": len(self.refused_s),
            "refused_ms": quantiles([1000 * took for took in self.refused_s]),
            "retry_after_s": quantiles([float(told) for told in self.retry_after]),
            "failed": len(self.failed),
            "failures": sorted(set(self.failed))[:5],
        }


def quantiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    values = sorted(values)
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    found = {name: values[min(len(values) - 1, int(share * len(values)))] for name, share in at.items()}
    return {name: round(value, 3) for name, value in {**found, "max": values[-1]}.items()}


def body_of(key: str, draw: random.Random) -> bytes:
    content = {
        "messages": [{"role": "user", "content": f"client {draw.random()} asks " + "about it " * draw.randint(1, 8)}],
        "max_tokens": draw.randint(*LENGTHS),
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    data = json.dumps(content).encode()
    headers = {"Authorization": f"Bearer {key}", "Connection": "close"}
    return request_bytes("POST", "/v1/chat/completions", data, headers)


async def ask(port: int, key: str, seen: Seen, begun: float, draw: random.Random) -> None:
    """Sends one request on its own connection and reads the answer to its end."""
    seen.sent += 1
    sent = time.perf_counter()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError as error:
        seen.failed.append(str(error))
        return
    try:
        writer.write(body_of(key, draw))
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head[9:12])
        if status == 429:
            seen.refused_s.append(time.perf_counter() - sent)
            seen.retry_after.append(int(head.lower().partition(b"retry-after: ")[2].partition(b"\r")[0]))
            return
        first, end = 0.0, b""
        while piece := await reader.read(1 << 16):
            if not first and b'"content":"' in piece.replace(b'"content":""', b""):
                first = time.perf_counter()
            end = (end + piece)[-64:]
        if status != 200 or b"data: [DONE]" not in end:
            seen.failed.append(f"{status} {end[-40:]!r}")
            return
        seen.first_s.append(first - sent)
        seen.ended.append(time.perf_counter() - begun)
    except (OSError, asyncio.IncompleteReadError) as error:
        seen.failed.append(type(error).__name__)
    finally:
        writer.close()


async def closed(port: int, clients: int, seconds: float) -> Seen:
    """Runs `clients` clients; each sends its next request when its last one has been answered."""
    seen, begun, draw = Seen(), time.perf_counter(), random.Random(0)

    async def client() -> None:
        while time.perf_counter() - begun < seconds:
            await ask(port, "one", seen, begun, draw)

    await asyncio.gather(*(client() for _ in range(clients)))
    return seen


async def opened(port: int, rates: dict[str, float], seconds: float, since: float = 0.0) -> dict[str, Seen]:
    """Sends each key's requests at its rate, independent of the answers. The run has begun `since` seconds ago."""
    seen, begun = {key: Seen() for key in rates}, time.perf_counter() - since
    tasks: set[asyncio.Task[None]] = set()

    async def source(key: str, rate: float) -> None:
        draw, at = random.Random(key), since
        while (at := at + draw.expovariate(rate)) < seconds:
            await asyncio.sleep(max(0.0, begun + at - time.perf_counter()))
            task = asyncio.ensure_future(ask(port, key, seen[key], begun, draw))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    await asyncio.gather(*(source(key, rate) for key, rate in rates.items()))
    if tasks:
        await asyncio.wait(tasks)
    return seen


def quiet_key(port: int, rate: float, seconds: float) -> Seen:
    """Sends the quiet key's requests, in a process of its own."""
    time.sleep(SETTLE_S)
    return asyncio.run(opened(port, {"quiet": rate}, seconds, SETTLE_S))["quiet"]


async def with_quiet(port: int, rates: dict[str, float], seconds: float, pool: Executor) -> dict[str, Seen]:
    """Sends the requests of all keys; those of the quiet key come from another process."""
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(pool, time.perf_counter)  # the process has imported what it needs
    quiet = loop.run_in_executor(pool, quiet_key, port, rates["quiet"], seconds)
    seen = await opened(port, {key: rate for key, rate in rates.items() if key != "quiet"}, seconds)
    return {**seen, "quiet": await quiet}


def run(seconds: float, flags: list[str]) -> dict[str, Any]:
    """Runs all experiments on one server, which becomes idle between them."""
    pool = ProcessPoolExecutor(1, get_context("spawn"))
    with tempfile.TemporaryDirectory() as folder, pool:
        keys = Path(folder) / "keys"
        keys.write_text("one:one\nquiet:quiet\n")
        rows = ("--max-num-seqs", str(ROWS), "--num-threads", "1", "--disable-access-log")
        server = ServerProcess(*rows, "--api-key-file", str(keys), *flags).spawn().wait_ready()
        try:
            found: dict[str, Any] = {"flags": flags, "rows": ROWS, "seconds": seconds}
            full = asyncio.run(closed(server.port, ROWS, seconds))
            found["capacity"] = full.summary(seconds)
            rate = sum(SETTLE_S <= at < seconds for at in full.ended) / (seconds - SETTLE_S)
            plans = {
                "1x": {"one": rate},
                "3x": {"one": TIMES * rate},
                "quiet_alone": {"quiet": 1.0},
                "flood_and_quiet": {"one": TIMES * rate, "quiet": 1.0},
            }
            for name, rates in plans.items():
                given = (server.port, rates, seconds)
                seen = asyncio.run(with_quiet(*given, pool) if "quiet" in rates else opened(*given))
                found[name] = {key: each.summary(seconds) for key, each in seen.items()}
                print(name, json.dumps(found[name]), file=sys.stderr, flush=True)
            server.stop()
        finally:
            server.close()
    return {**found, "ratios": ratios(found)}


def ratios(found: dict[str, Any]) -> dict[str, float | int]:
    """The ratios that have goals: 3x to 1x, and the quiet key during the flood to the quiet key alone."""
    once, thrice = found["1x"]["one"], found["3x"]["one"]
    beside, alone = found["flood_and_quiet"]["quiet"], found["quiet_alone"]["quiet"]
    return {
        "first_token_p99_3x_to_1x": round(thrice["first_token_s"]["p99"] / once["first_token_s"]["p99"], 2),
        "goodput_3x_to_1x": round(thrice["answers_per_s"] / once["answers_per_s"], 2),
        "quiet_first_token_p99_beside_to_alone": round(
            beside["first_token_s"]["p99"] / alone["first_token_s"]["p99"], 2
        ),
        "quiet_refused": beside["refused"],
    }


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    found = run(seconds, sys.argv[2:])
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
