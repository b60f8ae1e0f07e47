"""Serving speed over real sockets on a CPU, against a bare torch loop in the same run. `make bench`.

Starts the server in a separate process (dummy weights of a real shape), sends requests as `bench serve` does, prints a
table and writes JSON with --json FILE. 128 tokens in, 64 out, greedy, prompts all different.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from server.bench import serve as bench_serve
from server.bench.options import ServeOptions
from tests.bench.shapes import QWEN3_CPU, write_folder

PROMPT, ANSWER = 128, 64


async def measure(port: int, streams: int, rounds: int) -> dict[str, float]:
    """`streams` clients, each sending `rounds` requests one after the other."""
    asked = ServeOptions(
        url=f"http://127.0.0.1:{port}",
        endpoint="completions",
        num_prompts=streams * rounds,
        max_concurrency=streams,
        num_warmups=0,
        input_len=PROMPT,
        output_len=ANSWER,
        vocab_size=QWEN3_CPU["vocab_size"],
        temperature=0.0,
        ignore_eos=True,
        seed=streams,
    )
    found, _ = await bench_serve.measure(asked)
    if found["failed"] or found["output_tokens"] != streams * rounds * ANSWER:
        raise RuntimeError(f"{found['output_tokens']} tokens came; failures: {found['failures']}")
    return {
        "streams": streams,
        "tokens_per_s": found["output_tokens_per_s"],
        "ttft_p50_ms": found["ttft_ms_p50"],
        "itl_p50_ms": found["itl_ms_p50"],
        "itl_p99_ms": found["itl_ms_p99"],
    }


def start_server(folder: Path, threads: int) -> tuple[subprocess.Popen[str], int, float]:
    """(process, port, seconds from start to ready)."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", "server", "--model", str(folder), "--load-format", "dummy", "--port", "0"]
    command += ["--host", "127.0.0.1", "--disable-access-log"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)}
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("Listening on "):
            return process, int(line.rsplit(":", 1)[1]), time.perf_counter() - begun
    raise RuntimeError("the server did not start")


def bare_loop(threads: int, batch: int) -> float:
    """Tokens per second of the bare torch loop, best of two runs, in a new process."""
    code = (
        "import torch; from tests.bench.torch_loop import TorchLoop; from tests.bench.shapes import QWEN3_CPU;"
        f"torch.set_num_threads({threads}); loop = TorchLoop(QWEN3_CPU); loop.run({batch}, 16, 4);"
        f"print(max(loop.run({batch}, {PROMPT}, {ANSWER})[0] for _ in range(2)))"
    )
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def without_torch(port: int, streams: int, rounds: int, threads: int) -> dict[str, float]:
    """The server between two runs of the torch loop, whose better run counts: machines change within minutes."""
    before = bare_loop(threads, streams)
    row = asyncio.run(measure(port, streams, rounds))
    row["torch_loop_tokens_per_s"] = max(before, bare_loop(threads, streams))
    row["ratio_to_torch_loop"] = row["tokens_per_s"] / row["torch_loop_tokens_per_s"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = write_folder(Path(name) / "qwen3-cpu", QWEN3_CPU)
        process, port, ready = start_server(folder, threads)
        try:
            asyncio.run(measure(port, 1, 1))
            for streams in [int(part) for part in args.streams.split(",")]:
                rows.append(without_torch(port, streams, args.rounds, threads))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
    print(f"ready in {ready:.2f} s; {threads} cores, {platform.processor() or platform.machine()}")
    print(f"{'streams':>8}{'tok/s':>9}{'TTFT ms':>9}{'ITL ms':>8}{'p99':>8}{'torch':>9}{'ratio':>7}")
    for row in rows:
        print(
            f"{row['streams']:8.0f}{row['tokens_per_s']:9.1f}{row['ttft_p50_ms']:9.1f}{row['itl_p50_ms']:8.2f}"
            f"{row['itl_p99_ms']:8.2f}{row['torch_loop_tokens_per_s']:9.1f}{row['ratio_to_torch_loop']:7.2f}"
        )
    if args.json:
        args.json.write_text(json.dumps({"ready_s": ready, "cores": threads, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
