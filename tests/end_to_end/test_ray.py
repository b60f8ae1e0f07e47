"""Replicas under Ray Serve: they answer like one server; sessions stay on a replica; replicas die, leave and start.

Needs Ray, which `make test` does not install: `make test-ray`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.end_to_end.process import ROOT, serving

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: make test-ray", allow_module_level=True)
# Ray's models are written for an older pydantic.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_arguments_are_refused_in_words():
    from server.flags.command_line import UsageError
    from server.scaleout import build

    for arguments, text in [
        ({"gpu": 1}, "gpu: unknown; the arguments are cpus, flags"),
        ({"replicas": 0}, "replicas: got 0; must be at least 1"),
        ({"replicas": {"min": 3, "max": 2}}, "must be a number, or min and max"),
        ({"replicas": {"max": 2}, "tokens_per_replica": 0}, "tokens_per_replica: got 0"),
        ({"flags": {"modle": "x"}}, "unknown flag --modle in flags; did you mean --model?"),
        ({"flags": {"port": 8001}}, "--port: has no effect in a hosted app"),
    ]:
        with pytest.raises(UsageError, match=re.escape(text)):
            build(arguments)


def test_a_busy_replica_comes_last_and_a_request_without_a_session_goes_to_the_shortest_queue():
    from server.scaleout import ordered

    def order(lengths: list[int], has_session: bool) -> list[int]:
        return [
            at for (at,) in ordered([[at] for at in range(len(lengths))], lambda rank: lengths[rank[0]], has_session)
        ]

    assert order([2, 1, 0], True) == [0, 1, 2]
    assert order([3, 1, 0], True) == [1, 2, 0]
    assert order([9, 9, 9], True) == [0, 1, 2]
    assert order([2, 1, 0], False) == [2, 1, 0]
    assert order([5], True) == [0]


# Settings of the page `ray` for streams through HAProxy in place of Ray's Python proxy.
HAPROXY = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": "hdr(x-session-id)\n hash-type consistent\n hash-balance-factor 125",
}


class Cluster:
    """Ray with its proxy on a port; orders (ray_replicas.py) control it."""

    def __init__(self, haproxy: bool = False) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.end_to_end.ray_replicas", str(self.port)],
            cwd=ROOT,
            env={**os.environ, **(HAPROXY if haproxy else {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.url = f"http://127.0.0.1:{self.port}"

    def order(self, what: dict[str, Any] | str) -> None:
        """Gives an order and waits until it has been carried out."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write((what if isinstance(what, str) else json.dumps(what)) + "\n")
        self.process.stdin.flush()
        while (line := self.process.stdout.readline()) != "done\n":
            assert line, "the cluster has ended"

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            self.process.stdout.close()


@pytest.fixture(scope="module", params=["python", "haproxy"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster with two replicas."""
    made = Cluster(request.param == "haproxy")
    try:
        made.order({"replicas": 2})
        if request.param == "haproxy":
            wait_for_both(made)
        yield made
    finally:
        made.close()


def wait_for_both(cluster: Cluster) -> None:
    """HAProxy checks replicas itself, a little later than Ray reports them ready."""
    seen = set()
    for _ in range(200):
        text = httpx.get(f"{cluster.url}/metrics", timeout=60).text
        seen |= {line for line in text.splitlines() if line.startswith("process_start_time_seconds ")}
        if len(seen) == 2:
            return
        time.sleep(0.1)
    raise AssertionError("one replica never answered")


def body(at: int, count: int = 24) -> dict[str, Any]:
    prompt = f"Story {at}. " + "a red circle and a blue square " * 4
    return {"prompt": prompt, "max_tokens": count, "ignore_eos": True, "temperature": 0, "stream": True}


async def stream(client: httpx.AsyncClient, at: int, count: int = 24) -> str:
    """The events without ids and times; "cut" if the stream ended early; the status if no stream began."""
    try:
        async with client.stream("POST", "/v1/completions", json=body(at, count)) as reply:
            if reply.status_code != 200:
                return str(reply.status_code)
            text = (await reply.aread()).decode()
    except httpx.HTTPError:
        return "cut"
    text = re.sub(r'"id":"[^"]*"|"created":\d+', "", text)
    return text if text.endswith("data: [DONE]\n\n") else "cut"


async def streams(url: str, count: int, tokens: int = 24) -> list[str]:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        return await asyncio.gather(*(stream(client, at, tokens) for at in range(count)))


@pytest.fixture(scope="module")
def alone() -> Iterator[list[str]]:
    """The same streams, answered by one server."""
    with serving("--num-threads", "1", "--num-gpu-blocks-override", "1024", "--max-num-seqs", "32") as process:
        yield asyncio.run(streams(f"http://127.0.0.1:{process.port}", 32, 200))


@pytest.mark.timeout(400)
def test_replicas_answer_as_one_server_does(cluster):
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").json()["data"][0]["id"] == "omniloop"
        asked = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0}
        reply = client.post("/v1/chat/completions", json=asked, headers={"x-request-id": "mine"})
        assert reply.json()["choices"][0]["message"]["content"] == "42"
        assert reply.headers.get_list("x-request-id") == ["mine"]
        refused = client.post("/v1/chat/completions", json={"messages": 3})
        assert refused.status_code == 400
        assert refused.json()["error"]["reason"]
    found = asyncio.run(streams(cluster.url, 4))
    assert found == asyncio.run(streams(cluster.url, 4))
    assert all(text.endswith("[DONE]\n\n") for text in found)


@pytest.mark.timeout(400)
def test_a_session_stays_where_its_prefix_is(cluster):
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        for at in range(100, 106):
            cached = []
            for _ in range(3):
                asked = {**body(at, 1), "stream": False}
                reply = client.post("/v1/completions", json=asked, headers={"x-session-id": str(at)})
                cached.append(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
            assert min(cached[1:]) >= 32, cached


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_killed_replica_takes_only_its_own_streams(cluster, alone):
    async def killed() -> list[str]:
        running = asyncio.ensure_future(streams(cluster.url, 32, 200))
        await asyncio.sleep(2)
        await asyncio.get_running_loop().run_in_executor(None, cluster.order, "kill")
        return await running

    found = asyncio.run(killed())
    whole = [at for at, text in enumerate(found) if text == alone[at]]
    assert all(text in (alone[at], "cut", "500", "503") for at, text in enumerate(found))
    assert len(whole) >= 8, "streams of the other replica"
    cluster.order({"replicas": 2})
    assert asyncio.run(streams(cluster.url, 32, 200)) == alone


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_replica_that_leaves_finishes_its_streams(cluster, alone):
    async def leaving() -> list[str]:
        running = asyncio.ensure_future(streams(cluster.url, 32, 200))
        await asyncio.sleep(2)
        await asyncio.get_running_loop().run_in_executor(None, cluster.order, {"replicas": 1})
        return await running

    cluster.order({"replicas": 2})
    assert asyncio.run(leaving()) == alone


@pytest.mark.full
@pytest.mark.timeout(900)
def test_replicas_follow_the_open_tokens(cluster, alone):
    """The number of replicas goes 1 -> 3 -> 1, and every stream is complete."""
    scaled = {"replicas": {"min": 1, "max": 3}, "tokens_per_replica": 200, "scale_up_s": 1, "scale_down_s": 5}
    cluster.order(scaled)

    async def run() -> tuple[list[str], int]:
        most, found = 0, list[str]()
        for _ in range(6):
            running = asyncio.ensure_future(streams(cluster.url, 32, 200))
            found += await running
            most = max(most, await asyncio.get_running_loop().run_in_executor(None, replicas, cluster))
        return found, most

    found, most = asyncio.run(run())
    assert found == alone * 6
    assert most == 3
    for _ in range(60):
        if replicas(cluster) == 1:
            return
        time.sleep(2)
    raise AssertionError("the replicas did not leave")


def replicas(cluster: Cluster) -> int:
    """The number of running replicas."""
    assert cluster.process.stdin is not None
    assert cluster.process.stdout is not None
    cluster.process.stdin.write("count\n")
    cluster.process.stdin.flush()
    found = int(cluster.process.stdout.readline())
    assert cluster.process.stdout.readline() == "done\n"
    return found
