"""The loop's cost of a request in addition to its tokens, and how long many requests block the loop; a table, and JSON.

The whole server runs on real sockets, but its device thread is replaced by one that does nothing; the engine's own
delivery gets steps of made-up tokens. Rounds of requests like gpu_serve's (512 token ids, streamed, greedy, keep-alive
connections) request 1 token and 33 tokens. The loop thread's CPU time in a round is read from outside. The difference
between the two gives the cost of a token, the rest that of a request. `crowd` is how late a heartbeat of 1 ms is while
64 requests arrive at the same time. Run: python -m tests.bench.request_cpu [--streams 1,64] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median, quantiles

from engine.base.inbox import Abort, Inbox, Submit
from engine.base.output import StepOutput
from engine.base.request import FinishReason, Request
from engine.base.stats import StepStats
from engine.engine import COST_CALLBACK, SLICE
from tests.bench.stream_cpu import ROOM
from tests.end_to_end.inside import InsideServer, flags_of, inside
from tests.end_to_end.process import ROOT
from tests.end_to_end.wire import request_bytes

PROMPT, SHORT, LONG = 512, 1, 33
IN_A_ROW = 10  # rounds of one kind in a row: with alternating kinds all garbage collections might fall into one kind
BEAT_S = 0.001
END = b"0\r\n\r\n"


# -- clients, in a separate process: python -m tests.bench.request_cpu --clients PORT STREAMS


def clients(port: int, streams: int) -> None:
    """Every connection requests as many tokens as each line of stdin says; prints "sent", then "read" at the end."""
    draw = random.Random(streams)
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(streams)]
    print("connected", flush=True)
    for line in sys.stdin:
        bodies = []
        for _ in sockets:
            fields = {"max_tokens": int(line), "temperature": 0, "ignore_eos": True, "stream": True}
            body = {"prompt": [draw.randrange(300, 4000) for _ in range(PROMPT)], **fields}
            bodies.append(request_bytes("POST", "/v1/completions", body))
        for client, data in zip(sockets, bodies):
            client.sendall(data)
        print("sent", flush=True)
        for client in sockets:
            answer = b""
            while not answer.endswith(END):
                answer += client.recv(1 << 18)
            assert answer.startswith(b"HTTP/1.1 200"), answer[:600]
        print("read", flush=True)


# -- the server's side

Beats = tuple[list[float], float]  # lateness of each beat, and the most CPU time between two beats, all in ms


class NoDevice:
    """Replaces the device thread: accepts requests and does nothing."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.inbox.watch()

    def submit(self, request: Request, first_id: int) -> None:
        self.inbox.put(Submit(request, first_id))

    def abort(self, device_id: int) -> None:
        self.inbox.put(Abort(device_id))

    def empty(self) -> None:
        self.inbox.hush()
        while len(self.inbox):
            self.inbox.take(0.0)


class Rounds:
    """A server and its clients; runs on the main thread."""

    def __init__(self, server: InsideServer, device: NoDevice, streams: int) -> None:
        self.server, self.device, self.streams = server, device, streams
        self.engine = server.state.engine
        ident = server.thread.ident
        assert ident is not None
        self.clock = time.pthread_getcpuclockid(ident)
        command = [sys.executable, "-m", "tests.bench.request_cpu", "--clients", str(server.port), str(streams)]
        self.clients = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, cwd=ROOT
        )
        self.receive("connected")

    def receive(self, word: str) -> None:
        assert self.clients.stdout is not None
        line = self.clients.stdout.readline().strip()
        assert line == word, line

    def begin(self, tokens: int) -> None:
        """Every client sends its request, and the engine has received all of them."""
        assert self.clients.stdin is not None
        self.clients.stdin.write(f"{tokens}\n")
        self.receive("sent")
        end = time.monotonic() + 30
        while len(self.device.inbox) < self.streams:
            assert time.monotonic() < end, f"{len(self.device.inbox)} of {self.streams} requests have arrived"
            time.sleep(0.002)

    def answer(self, tokens: int) -> None:
        """Delivers the whole answers, one step at a time."""
        self.server.call(lambda: self._steps(0, tokens, tokens))
        self.ended()

    def ended(self) -> None:
        self.receive("read")
        self.device.empty()

    async def _steps(self, first: int, end: int, tokens: int) -> None:
        """Delivers steps `first` to `end` of answers with `tokens` tokens."""
        ids, count = self.engine.open_ids(), self.streams
        for at in range(first, end):
            reason = FinishReason.LENGTH if at == tokens - 1 else FinishReason.NONE
            output = StepOutput(StepStats(num_rows=count, num_tokens=count, num_sampled=count))
            for row, number in enumerate(ids):
                output.add(number, 300 + (7 * at + row) % 3000, reason)
            if at == 0:
                output.firsts = dict.fromkeys(range(count), (0, 0.001, None))
            self.engine.on_output(output)
            for _ in range(
                count * COST_CALLBACK // SLICE + 2
            ):  # slices, and what a transport writes at the end of a loop iteration
                await asyncio.sleep(0)

    def cost(self, tokens: int) -> float:
        """Microseconds of the loop's thread per request, in one round."""
        begun = time.clock_gettime(self.clock)
        self.begin(tokens)
        self.answer(tokens)
        time.sleep(0.01)  # the server's work after an answer's last byte
        return (time.clock_gettime(self.clock) - begun) / self.streams * 1e6

    def crowd(self) -> tuple[Beats, Beats]:
        """Beats while all requests of a round arrive, and beats while all of them end in one step."""
        self.server.call(self._beat)
        time.sleep(0.01)
        self.begin(2)
        arrival = self.server.call(self._beaten)
        self.server.call(lambda: self._steps(0, 1, 2))
        self.server.call(self._beat)
        time.sleep(0.01)
        self.server.call(lambda: self._steps(1, 2, 2))
        self.ended()
        return arrival, self.server.call(self._beaten)

    async def _beat(self) -> None:
        self.beating = asyncio.ensure_future(beats())

    async def _beaten(self) -> Beats:
        self.beating.cancel()
        return await self.beating


async def beats() -> Beats:
    """Records beats until it is cancelled."""
    late, spent = [], 0.0
    try:
        while True:
            begun, cpu = time.perf_counter(), time.thread_time()
            await asyncio.sleep(BEAT_S)
            late.append((time.perf_counter() - begun - BEAT_S) * 1e3)
            spent = max(spent, (time.thread_time() - cpu) * 1e3)
    except asyncio.CancelledError:
        return late, spent


@contextmanager
def rounds(streams: int) -> Iterator[Rounds]:
    """A server whose device does nothing, with its clients."""
    with inside(*flags_of(**ROOM), "--disable-access-log") as server:
        engine, device = server.state.engine, NoDevice()
        real = engine.inspect()
        real.submit, real.abort = device.submit, device.abort  # type: ignore[method-assign]
        found = Rounds(server, device, streams)
        try:
            yield found
        finally:
            found.clients.kill()
            found.clients.wait()
            time.sleep(0.1)
            del real.submit, real.abort  # the class's methods apply again
            device.inbox.close()


def cpu(streams: int, count: int = 40) -> dict[str, float]:
    """Microseconds of loop time, garbage collections included: of a request without its later tokens, and of a token.

    `best` is the request's cost in the best tenth of rounds, which other load has disturbed least.
    """
    with rounds(streams) as found:
        for _ in range(5):
            found.cost(SHORT)
            found.cost(LONG)
        shorts, longs = [], []
        for _ in range(count // IN_A_ROW):
            shorts += [found.cost(SHORT) for _ in range(IN_A_ROW)]
            longs += [found.cost(LONG) for _ in range(IN_A_ROW)]
    token = (fmean(longs) - fmean(shorts)) / (LONG - SHORT)
    short, best = fmean(shorts), quantiles(shorts, n=10)[0]
    return {"request": round(short - token), "best": round(best - token), "token": round(token, 2)}


def crowd(streams: int = 64, count: int = 40) -> dict[str, float]:
    """Lateness of beats of 1 ms while `streams` requests arrive together and end together, in ms.

    For the median round: the longest lateness, and the loop's CPU time between two beats.
    """
    with rounds(streams) as found:
        found.crowd()
        each = [found.crowd() for _ in range(count)]
    values = {}
    for name, beaten in zip(("arrive", "end"), zip(*each)):
        values[f"{name}, late"] = median(max(late) for late, _ in beaten)
        values[f"{name}, work"] = median(spent for _, spent in beaten)
    return {name: round(value, 2) for name, value in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", default="1,64")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json")
    parser.add_argument("--machine", default=f"{platform.machine()}, Python {platform.python_version()}")
    parser.add_argument("--clients", type=int, nargs=2, metavar=("PORT", "STREAMS"), help="run as their process")
    asked = parser.parse_args()
    if asked.clients:
        clients(*asked.clients)
        return
    results = {
        "machine": asked.machine,
        "cpu_us": {word: cpu(int(word), asked.rounds) for word in asked.streams.split(",")},
        "crowd_ms": crowd(count=asked.rounds),
    }
    print(json.dumps(results, indent=1))
    if asked.json:
        Path(asked.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
