"""Clients of gpu_serve, a process of their own: closed loops over keep-alive sockets, with a parser that only counts.

`python -m tests.bench.streams FILE.npz` reads a job (JSON) from stdin, connects, writes "ready", waits for a line, and
keeps its connections busy until the job's time is over, its share of answers has come or, where each request is sent
once, all are answered; then the file holds what came. One thread, one epoll, a few microseconds a read: one process
keeps up with tens of thousands of events a second. Prompts are random token ids, which may begin with ids that all
share, or a picture with a question. An answer's tokens are those that its usage chunk counts. A request that fails is
counted with its text, and the connection is opened anew; a process gives up after MAX_FAILURES.
"""

from __future__ import annotations

import base64
import io
import json
import random
import re
import selectors
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import numpy as np

EVENT, DONE, END = b'"choices":[{', b"[DONE]", b"0\r\n\r\n"  # of a chunk with tokens, of a stream, of a body
USAGE = re.compile(rb'"completion_tokens":(\d+)')
LAST = 2048  # bytes of an answer's end that hold its usage chunk
MAX_FAILURES = 100
FIRST_ID, PREFIX_SEED = 300, 2048  # of the ids that prompts are drawn from
LEAST_GAP_S = 0.004  # between tokens of an answer to a picture, by which pictures are counted
TAIL = len(EVENT) - 1  # what of a read may begin a mark that the next one ends
clock = time.perf_counter


@dataclass(slots=True)
class Job:
    """What a process of clients does."""

    port: int
    connections: int
    lengths: list[list[int]]  # tokens of prompt and answer, request after request; beside a picture, of its question
    vocab: int
    seed: int
    warm_s: float
    measure_s: float
    fields: dict[str, Any]  # of every body, beside the prompt
    picture: list[int]  # width, height; empty: no picture
    coding: str = "jpeg"  # of pictures; png: of noise, as vLLM's client draws them
    answers: int = 0  # that end the job when so many have ended after the warm-up; 0: its time alone does
    fresh: bool = True  # every picture is another
    once: bool = False  # each of `lengths` is one request; else they are asked over and over
    prefix: int = 0  # tokens that all prompts begin with, beside their own
    salted: bool = False  # a cache salt for each request: it finds nothing of those before
    rules: dict[str, Any] = field(default_factory=dict)  # more fields of the bodies of the first `ruled` connections
    ruled: int = 0


class Tally:
    """What came, in seconds of perf_counter."""

    def __init__(self) -> None:
        self.firsts: list[tuple[float, float]] = []  # (sent, first event) of each request
        self.gaps: list[tuple[float, float]] = []  # (at, since the event before)
        self.answers: list[tuple[float, float, float, int, int]] = []  # (connection, first, end, events, tokens)
        self.failures: list[str] = []  # what the server said instead of an answer


class Connection:
    """One client: sends a request, counts its events, sends the next. `lengths` are shared by those of a process."""

    def __init__(self, number: int, job: Job, lengths: Iterator[list[int]], tally: Tally) -> None:
        self.number, self.job, self.lengths, self.tally = number, job, lengths, tally
        self.draw = random.Random(job.seed * 100_003 + number)
        self.socket = connected(job.port)
        self.prefix = prefix_of(job)
        # Drawn beforehand: a client that draws while it should read measures itself.
        least_s = min(answer for _, answer in job.lengths) * LEAST_GAP_S
        count = 2 + int((job.warm_s + job.measure_s) / least_s) if job.fresh else 1
        self.pictures = [self._picture() for _ in range(count if job.picture else 0)]
        self.tokens = 0  # that the answer to `next` has
        self.next = self._body()
        self.busy = False

    def _body(self) -> bytes:
        """The next request; b"" when all have been sent."""
        job, draw = self.job, self.draw
        prompt, self.tokens = next(self.lengths, (0, 0))
        if not prompt:
            return b""
        asked: dict[str, Any]
        if job.picture:
            if not self.pictures:  # answers came faster than foreseen
                self.pictures.append(self._picture())
            picture = self.pictures.pop() if job.fresh else self.pictures[0]
            words = "".join(draw.choices("abcdefgh ", k=prompt))
            parts = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": words}]
            path, asked = "/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]}
        else:
            ids = self.prefix + [draw.randrange(FIRST_ID, job.vocab) for _ in range(prompt)]
            path, asked = "/v1/completions", {"prompt": ids}
        if job.salted:
            asked["cache_salt"] = f"{draw.getrandbits(63):x}"
        rules = job.rules if self.number < job.ruled else {}
        body = json.dumps({**asked, "max_tokens": self.tokens, **job.fields, **rules}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        return f"{head}Content-Type: application/json\r\n\r\n".encode() + body

    def _picture(self) -> str:
        return PICTURES[self.job.coding](*self.job.picture, self.draw.getrandbits(63))

    def send(self) -> None:
        """The next request, if there is one."""
        self.busy = bool(self.next)
        if not self.busy:
            return
        self.sent = clock()
        self.socket.sendall(self.next)
        self.first = self.last = 0.0
        self.events, self.ended, self.tail, self.recent = 0, False, b"", b""
        self.next = self._body()  # while the server works

    def take(self) -> None:
        """Reads what is there; when the answer is whole, the next request goes out."""
        data = self.socket.recv(1 << 18)
        now = clock()
        if not data or (not self.recent and not data.startswith(b"HTTP/1.1 200")):
            self.fail(data)
            return
        seen = self.tail + data
        count = seen.count(EVENT)
        if count:
            if self.events:
                self.tally.gaps.append((now, now - self.last))
            else:
                self.first = now
                self.tally.firsts.append((self.sent, now))
            self.tally.gaps += [(now, 0.0)] * (count - 1)  # events that came together
            self.events += count
            self.last = now
        self.ended = self.ended or DONE in seen
        self.tail = seen[-TAIL:]
        self.recent = (self.recent + data)[-LAST:]
        if self.ended and seen.endswith(END):
            counted = USAGE.findall(self.recent)
            if not counted or not self.events:
                self.fail(self.recent)
                return
            self.tally.answers.append((self.number, self.first, now, self.events, int(counted[-1])))
            self.send()

    def fail(self, said: bytes) -> None:
        """Counts a request that got no answer, and goes on over a new connection (the caller's selector follows it)."""
        self.tally.failures.append(said[:600].decode(errors="replace") or "closed")
        if len(self.tally.failures) >= MAX_FAILURES:
            raise RuntimeError(f"{MAX_FAILURES} requests failed, the last with: {self.tally.failures[-1]}")
        self.socket.close()
        self.socket = connected(self.job.port)
        self.send()


def connected(port: int) -> socket.socket:
    found = socket.create_connection(("127.0.0.1", port))
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def prefix_of(job: Job) -> list[int]:
    """The same for all processes."""
    draw = random.Random(PREFIX_SEED)
    return [draw.randrange(FIRST_ID, job.vocab) for _ in range(job.prefix)]


def jpeg(width: int, height: int, seed: int) -> str:
    """A picture with structure at several scales, as a data: URL."""
    from PIL import Image

    draw = np.random.default_rng(seed)
    coarse, fine = (
        Image.fromarray(draw.integers(0, 256, (height // cell, width // cell, 3), dtype=np.uint8))
        .resize((width, height), Image.Resampling.BILINEAR)
        for cell in (64, 8)
    )  # fmt: skip
    out = io.BytesIO()
    Image.blend(coarse, fine, 0.3).save(out, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()


def png(width: int, height: int, seed: int) -> str:
    """Noise, as vLLM's client draws its random pictures, as a data: URL."""
    from PIL import Image

    draw = np.random.default_rng(seed)
    out = io.BytesIO()
    Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


PICTURES = {"jpeg": jpeg, "png": png}


def run(job: Job, path: str) -> None:
    """Connects, waits for the word, works until the time is over, writes the file."""
    tally = Tally()
    selector = selectors.EpollSelector()
    lengths = iter(job.lengths) if job.once else cycle(job.lengths)
    connections = [Connection(number, job, lengths, tally) for number in range(job.connections)]
    for connection in connections:
        selector.register(connection.socket, selectors.EVENT_READ, connection)
    print("ready", flush=True)
    sys.stdin.readline()
    begun = clock()
    for connection in connections:
        connection.send()
    warm, until = begun + job.warm_s, begun + job.warm_s + job.measure_s
    at_warm = -1  # answers that ended before the warm-up was over
    while (left := until - clock()) > 0 and any(connection.busy for connection in connections):
        if at_warm < 0 and clock() >= warm:
            at_warm = len(tally.answers)
        if job.answers and at_warm >= 0 and len(tally.answers) - at_warm >= job.answers:
            until = clock()
            break
        for key, _ in selector.select(left):
            before = key.fileobj
            key.data.take()
            if key.data.socket is not before:
                selector.unregister(before)
                selector.register(key.data.socket, selectors.EVENT_READ, key.data)
    for connection in connections:
        connection.socket.close()
    np.savez(
        path,
        begun=begun,
        until=until,
        failures=np.array(tally.failures, np.str_),
        firsts=np.array(tally.firsts, np.float64).reshape(-1, 2),
        gaps=np.array(tally.gaps, np.float64).reshape(-1, 2),
        answers=np.array(tally.answers, np.float64).reshape(-1, 5),
    )


if __name__ == "__main__":
    run(Job(**json.loads(sys.stdin.readline())), sys.argv[1])
