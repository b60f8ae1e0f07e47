"""Batches with streams, and alone: what a batch costs four interactive streams, and its rate against the engine's.

Random weights (--load-format dummy) of a real shape, random prompts, greedy, answers of full length. A server answers
four streams alone, then four streams and a batch of --lines lines, then another such batch alone; afterwards `bench
throughput` measures the engine with as many prompts. Prints the medians of first tokens and of times between tokens,
their ratios (at most 1.5), and the ratio of the rates (at least 0.95). Writes gpu_batches.json into --out.
Run: python -m tests.bench.gpu_batches [--shape 8b] [--lines 1000] [--requests 96] [--device auto] [--out DIR]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench import targets
from tests.bench.gpu_offline import device_name
from tests.bench.served import Server, ask
from tests.bench.shapes import SHAPES

FILE = "gpu_batches.json"
STREAMS = 4
MOST_SLOWER, LEAST_RATE = 1.5, 0.95
TIMES = ("ttft_ms", "itl_ms")
POLL_S = 0.02
BOUNDARY = "cut-here"


def lines(count: int, sizes: tuple[int, int], vocabulary: int, seed: int) -> bytes:
    """The file of a batch: completions of random token ids."""
    draw, (length, answer) = np.random.default_rng(seed), sizes
    found = []
    for number in range(count):
        prompt = draw.integers(2, vocabulary, length).tolist()
        body = {"prompt": prompt, "max_tokens": answer, "temperature": 0, "ignore_eos": True}
        found.append({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body})
    return "\n".join(map(json.dumps, found)).encode()


def begin(port: int, content: bytes) -> str:
    """Upload a file and make a batch of it; returns the batch's id."""
    import http.client

    part = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="'
    form = f'{part}purpose"\r\n\r\nbatch\r\n{part}file"; filename="in"\r\n\r\n'.encode() + content
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request(
        "POST",
        "/v1/files",
        form + f"\r\n--{BOUNDARY}--\r\n".encode(),
        {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"},
    )
    file = json.loads(connection.getresponse().read())["id"]
    connection.close()
    body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    return json.loads(ask(port, "/v1/batches", body))["id"]


def state_of(port: int, name: str) -> dict[str, Any]:
    return json.loads(ask(port, f"/v1/batches/{name}"))


def until(port: int, name: str, done: Any) -> float:
    """Wait until `done(batch)`; returns the time."""
    while not done(state_of(port, name)):
        time.sleep(POLL_S)
    return time.perf_counter()


def streams(port: int, requests: int, sizes: tuple[int, int], vocabulary: int, seed: int) -> dict[str, float]:
    """Medians of four streams in a closed loop, in milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", "server", "bench", "serve", "--url", f"http://127.0.0.1:{port}"]
        command += ["--endpoint", "completions"]
        command += ["--max-concurrency", str(STREAMS), "--num-prompts", str(requests), "--ignore-eos"]
        command += ["--temperature", "0", "--seed", str(seed), "--vocab-size", str(vocabulary), "--json", str(out)]
        command += ["--input-len", str(sizes[0]), "--output-len", str(sizes[1])]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found = json.loads(out.read_text())
    return {name: found[f"{name}_p50"] for name in TIMES}


def engine_alone(args: argparse.Namespace, model: Path, flags: list[str], sizes: tuple[int, int]) -> float:
    """Tokens per second of `bench throughput`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [
            sys.executable,
            "-m",
            "server",
            "bench",
            "throughput",
            "--model",
            str(model),
            "--device",
            args.device,
        ]
        command += ["--load-format", "dummy", "--num-prompts", str(args.lines), "--json", str(out), *flags]
        command += ["--input-len", str(sizes[0]), "--output-len", str(sizes[1]), "--runs", "1"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return float(json.loads(out.read_text())["output_tokens_per_s"])


def measure(args: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """All numbers of one shape."""
    sizes, vocabulary = (args.input_len, args.output_len), SHAPES[args.shape]["vocab_size"]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        server = Server(args.shape, args.device, Path(name), flags, 0.0)
        try:
            port = server.port
            streams(port, 2 * STREAMS, sizes, vocabulary, 1)
            found["alone"] = streams(port, args.requests, sizes, vocabulary, 2)
            beside = begin(port, lines(args.lines, sizes, vocabulary, 3))
            until(port, beside, lambda batch: batch["request_counts"]["completed"])
            found["beside"] = streams(port, args.requests, sizes, vocabulary, 4)
            state = state_of(port, beside)
            found["batch_ran_to_the_end"] = state["status"] == "in_progress"
            found["lines_beside"] = state["request_counts"]["completed"]
            until(port, beside, lambda batch: batch["status"] == "completed")
            begun = time.perf_counter()
            batch = begin(port, lines(args.lines, sizes, vocabulary, 5))
            begun = max(begun, until(port, batch, lambda state: state["status"] != "validating"))
            took = until(port, batch, lambda state: state["request_counts"]["completed"] == args.lines) - begun
            found["batch"] = args.lines * args.output_len / took
        finally:
            server.stop()
        found["engine"] = engine_alone(args, Path(name) / f"dummy-{args.shape}", flags, sizes)
    return found


def show(shape: str, found: dict[str, Any]) -> bool:
    """Print the numbers; returns whether every required ratio is met."""
    met = found["batch_ran_to_the_end"]
    if not met:
        print("the batch ended before the streams: raise --lines, or lower --requests", flush=True)
    for name in TIMES:
        alone, beside = found["alone"][name], found["beside"][name]
        fine = beside <= MOST_SLOWER * alone
        met &= fine
        print(
            f"{shape}, {STREAMS} streams, {name} p50: {alone:.2f} -> {beside:.2f}, {beside / alone:.3f} times; "
            f"asked {MOST_SLOWER}: {'met' if fine else 'MISSED'}",
            flush=True,
        )
    ratio = found["batch"] / found["engine"]
    fine = ratio >= LEAST_RATE
    print(
        f"{shape}, the batch alone: {found['batch']:,.0f} of {found['engine']:,.0f} tok/s, {ratio:.3f} times; "
        f"asked {LEAST_RATE}: {'met' if fine else 'MISSED'}",
        flush=True,
    )
    return met and fine


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b", choices=SHAPES)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=96, help="of the four streams")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--out", type=Path)
    args, flags = parser.parse_known_args(argv)
    found = measure(args, flags)
    met = show(args.shape, found)
    targets.keep(args.out, FILE, args.shape, {"device": device_name(args.device), **found})
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
