"""Pooling models over sockets: tokens per second of long inputs, one short query, a rerank; random weights.

    python -m tests.bench.gpu_pooling [--shape bge-base,0.6b-embedding,0.6b-reranker,...] [--seconds 8] [--out DIR]

The server is a separate process; its clients are threads of this process, each with one socket. An embedder gets
requests for --threads times 32 texts of 512 tokens at once, in base64, again and again for --seconds; then requests for
one text of 16 tokens at a time. A reranker ranks 100 documents of 256 tokens, one request at a time. A token is a byte
of text here (tests/bench/shapes.py), so the number of input tokens is exact. Prints a line for each number with its
aim, and writes gpu_pooling.json into --out.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tests.bench.served import Server

LENGTH, BATCH, SHORT = 512, 32, 16
DOCUMENTS, DOCUMENT, QUERY = 100, 240, 16
AIMS = {
    ("bge-base", "tok/s"): 2_100_000, ("xlm-r-large", "tok/s"): 700_000, ("0.6b-embedding", "tok/s"): 500_000,
    ("8b-embedding", "tok/s"): 44_000,
    ("bge-base", "query ms"): 2.5, ("0.6b-embedding", "query ms"): 4.0, ("0.6b-reranker", "rerank ms"): 60.0,
}  # fmt: skip


def text_of(draw: random.Random, length: int) -> str:
    """A random text, drawn in a microsecond: a slow client would measure itself."""
    return base64.b64encode(draw.randbytes(length)).decode()[:length]


class Client:
    """A client with one socket that stays open."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def post(self, path: str, body: dict[str, object]) -> bytes:
        self.connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = self.connection.getresponse()
        data = answer.read()
        assert answer.status == 200, data[:600]
        return data


def tokens_per_second(port: int, threads: int, seconds: float, length: int) -> float:
    """Tokens per second of all answers within the time, after a first answer of each thread."""
    ready, counts = threading.Barrier(threads + 1), [0] * threads
    ends: list[float] = [0.0] * threads

    def ask(number: int) -> None:
        draw, client = random.Random(number), Client(port)
        client.post("/v1/embeddings", {"input": [text_of(draw, length)] * BATCH, "encoding_format": "base64"})
        ready.wait(60)
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            texts = [text_of(draw, length) for _ in range(BATCH)]
            client.post("/v1/embeddings", {"input": texts, "encoding_format": "base64"})
            counts[number] += BATCH * length
            ends[number] = time.perf_counter()
        client.connection.close()

    asking = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(threads)]
    for one in asking:
        one.start()
    ready.wait(60)
    begun = time.perf_counter()
    for one in asking:
        one.join(seconds + 120)
    return sum(counts) / (max(ends) - begun)


def milliseconds(port: int, path: str, bodies: Sequence[dict[str, object]]) -> float:
    """Median milliseconds of these requests, sent one after the other, without the first ten per cent."""
    client, took = Client(port), []
    for body in bodies:
        begun = time.perf_counter()
        client.post(path, body)
        took.append((time.perf_counter() - begun) * 1e3)
    client.connection.close()
    return statistics.median(took[len(took) // 10 :])


def measure(shape: str, port: int, args: argparse.Namespace) -> dict[str, float]:
    draw = random.Random(0)
    if shape.endswith("reranker"):
        asked: list[dict[str, object]] = [
            {"query": text_of(draw, QUERY), "documents": [text_of(draw, DOCUMENT) for _ in range(DOCUMENTS)]}
            for _ in range(args.queries // 10)
        ]
        return {"rerank ms": milliseconds(port, "/rerank", asked)}
    queries: list[dict[str, object]] = [
        {"input": text_of(draw, SHORT), "encoding_format": "base64"} for _ in range(args.queries)
    ]
    rate = tokens_per_second(port, args.threads, args.seconds, LENGTH)
    return {"tok/s": rate, "query ms": milliseconds(port, "/v1/embeddings", queries)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="bge-base,xlm-r-large,0.6b-embedding,8b-embedding,0.6b-reranker")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--queries", type=int, default=300)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    report: dict[str, dict[str, float]] = {}
    for shape in args.shape.split(","):
        with tempfile.TemporaryDirectory() as name:
            server = Server(shape, args.device, Path(name), ("--max-num-queued-reqs", "4096"), 0.005)
            try:
                print(f"{shape}: ready in {server.ready_s:.1f} s", flush=True)
                report[shape] = measure(shape, server.port, args)
                for what, seen in report[shape].items():
                    print(f"{shape}: {what} {seen:,.2f} (aim {AIMS.get((shape, what), '-')})", flush=True)
            finally:
                server.stop()
        if args.out is not None:  # after each server, so that an abort loses little
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "gpu_pooling.json").write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
