"""How many prefix tokens replicas behind a router find in their caches: conversations of several turns.

`python -m tests.bench.replicas --router "python -m sglang_router.launch_router --policy cache_aware" --json FILE`

Measured one after the other: one replica with all the memory, replicas behind the router, and replicas behind the same
router with `round_robin`. All serve the embedded model on the CPU. The router takes --worker-urls, --host and --port.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shlex
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from server.bench import serve
from server.bench.dataset import CHARACTERS
from server.bench.options import ServeOptions
from server.bench.output import on_loop
from tests.end_to_end.process import ServerProcess

COLOURS = ["red", "blue", "green"]
SHAPES = ["circle", "square", "triangle", "star"]
WORDS = [*COLOURS, *SHAPES, "left", "right", "up", "down", "one", "two", "three", "above", "below", "moves"]
ANSWER = ("gpt", "x" * 8 * CHARACTERS)  # eight tokens long
BLOCKS = 4096  # KV cache blocks of all replicas together


def conversation(at: int, turns: int) -> list[str]:
    """The user's turns: first a long text of this conversation alone, then short questions."""
    draw = random.Random(at)
    said = [" ".join(draw.choices(WORDS, k=120)), *(" ".join(draw.choices(WORDS, k=12)) for _ in range(turns - 1))]
    return [f"{at}: {text}" for text in said]


def talk(url: str, conversations: int, turns: int) -> int:
    """`bench serve` runs all conversations at once, turn by turn; returns the number of prompt tokens."""
    said = [
        [{"from": who, "value": value} for text in conversation(at, turns) for who, value in (("human", text), ANSWER)]
        for at in range(conversations)
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump([{"conversations": one} for one in said], file)
        file.flush()
        asked = ServeOptions(
            url=url,
            model="omniloop",
            dataset="sharegpt",
            dataset_path=file.name,
            num_prompts=conversations,
            max_concurrency=conversations,
            turns=turns,
            num_warmups=0,
            temperature=0.0,
            ignore_eos=True,
        )
        found, _ = on_loop(serve.measure(asked))
    if found["completed"] != conversations * turns:
        raise RuntimeError(f"{found['completed']} of {conversations * turns} turns were answered: {found['failures']}")
    return found["input_tokens"]


def hits(ports: list[int]) -> list[int]:
    """Tokens found in the prefix cache, by replica."""
    found = []
    for port in ports:
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text
        (line,) = (line for line in text.splitlines() if line.startswith("vllm:prefix_cache_hits_total"))
        found.append(int(float(line.rpartition(" ")[2])))
    return found


@contextlib.contextmanager
def replicas(count: int) -> Iterator[list[int]]:
    """Ports of ready servers, which divide BLOCKS among themselves."""
    flags = ("--num-threads", "1", "--disable-access-log", "--num-gpu-blocks-override", str(BLOCKS // count))
    with contextlib.ExitStack() as stack:
        started = []
        for _ in range(count):  # one after the other: each start takes a core
            process = ServerProcess(*flags)
            stack.callback(process.close)
            started.append(process.spawn().wait_ready(300))
        yield [process.port for process in started]
        for process in started:
            process.stop()


@contextlib.contextmanager
def routed(command: str, ports: list[int]) -> Iterator[int]:
    """The port of a router in front of the replicas; without a command, the port of the first replica."""
    if not command:
        yield ports[0]
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    urls = [f"http://127.0.0.1:{worker}" for worker in ports]
    words = [*shlex.split(command), "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait()


def measure(name: str, count: int, command: str, args: argparse.Namespace) -> dict[str, Any]:
    with replicas(count) as ports, routed(command, ports) as port:
        begun = time.perf_counter()
        tokens = talk(f"http://127.0.0.1:{port}", args.conversations, args.turns)
        seconds = time.perf_counter() - begun
        found = hits(ports)
    result = {"name": name, "replicas": count, "prompt_tokens": tokens, "hits": sum(found), "by_replica": found}
    result |= {"share": round(sum(found) / tokens, 4), "seconds": round(seconds, 1)}
    print(result, flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", required=True)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = [
        measure("one replica with all the memory", 1, "", args),
        measure("cache-aware", args.replicas, args.router, args),
        measure("round robin", args.replicas, args.router.replace("cache_aware", "round_robin"), args),
    ]
    if args.json:
        args.json.write_text(json.dumps({"router": args.router.split("/")[-1], "runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
