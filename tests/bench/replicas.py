"""How many cached prefix tokens are found again by replicas behind a router: conversations of several turns.

`python -m tests.bench.replicas --router "python -m sglang_router.launch_router --policy cache_aware" --json FILE`

Measured one after the other: one replica with all the memory, replicas behind the router, and replicas behind the same
router with `round_robin`. All serve the embedded model on the CPU. The router takes --worker-urls, --host and --port.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shlex
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.end_to_end.process import ServerProcess

COLOURS = ["red", "blue", "green"]
SHAPES = ["circle", "square", "triangle", "star"]
WORDS = [*COLOURS, *SHAPES, "left", "right", "up", "down", "one", "two", "three", "above", "below", "moves"]
BLOCKS = 4096  # of all replicas together


def conversation(at: int, turns: int) -> list[str]:
    """What the user says: first a long text of the conversation's own, then short questions."""
    draw = random.Random(at)
    said = [" ".join(draw.choices(WORDS, k=120)), *(" ".join(draw.choices(WORDS, k=12)) for _ in range(turns - 1))]
    return [f"{at}: {text}" for text in said]


async def talk(client: httpx.AsyncClient, said: list[str], places: asyncio.Semaphore) -> int:
    """One conversation, turn by turn; prompt tokens in all."""
    messages: list[dict[str, str]] = []
    tokens = 0
    for text in said:
        messages.append({"role": "user", "content": text})
        async with places:
            body = {"model": "omniloop", "messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            reply = await client.post("/v1/chat/completions", json=body)
        reply.raise_for_status()
        answer = reply.json()
        tokens += answer["usage"]["prompt_tokens"]
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or ""})
    return tokens


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
    """Ports of servers that are ready, and share BLOCKS."""
    flags = ("--num-threads", "1", "--disable-access-log", "--num-gpu-blocks-override", str(BLOCKS // count))
    with contextlib.ExitStack() as stack:
        started = []
        for _ in range(count):  # one after the other: a start takes a core for itself
            process = ServerProcess(*flags)
            stack.callback(process.close)
            started.append(process.spawn().wait_ready(300))
        yield [process.port for process in started]
        for process in started:
            process.stop()


@contextlib.contextmanager
def routed(command: str, ports: list[int]) -> Iterator[int]:
    """The port of a router in front of the replicas; without a command, the first replica's."""
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

        async def all_of_them() -> int:
            places = asyncio.Semaphore(args.concurrency)
            limits = httpx.Limits(max_connections=args.concurrency)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=600, limits=limits) as client:
                talks = [talk(client, conversation(at, args.turns), places) for at in range(args.conversations)]
                return sum(await asyncio.gather(*talks))

        begun = time.perf_counter()
        tokens = asyncio.run(all_of_them())
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
    parser.add_argument("--concurrency", type=int, default=16)
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
