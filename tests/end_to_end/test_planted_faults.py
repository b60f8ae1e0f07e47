"""Planted faults over sockets: which requests a fault reaches, what the probes report, recovery (R21, R23)."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time

import pytest

from engine.base.faults import STEP
from server.start.process import EXIT_DEAD
from tests.end_to_end.process import SMALL, ServerProcess, serving
from tests.end_to_end.wire import Reply, ask, greedy
from tests.server.live import picture

pytestmark = pytest.mark.asyncio

FLAGS = (*SMALL, "--debug-faults", "--enable-dev-endpoints", "--canary-interval", "0.2", "--step-timeout", "1")
LONG = greedy("a planted fault", 4)
SEES = {
    "messages": [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture()}"}}]}
    ],
    "max_tokens": 2,
    "temperature": 0,
}


async def plant(port: int, point: str, kind: str, **more: object) -> None:
    assert (await ask(port, "POST", "/debug/faults", {"point": point, "kind": kind, **more})).status == 200


async def until(port: int, path: str, status: int, seconds: float = 10.0) -> Reply:
    async with asyncio.timeout(seconds):
        while (reply := await ask(port, "GET", path)).status != status:  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.02)
    return reply


async def test_faults_of_the_loop_the_pool_and_the_disk_reach_one_request_each():
    process = ServerProcess(*FLAGS, "--admin-api-key", "one", "--stall-exit", "60").spawn()
    try:
        port = process.wait_ready().port
        head = {"Authorization": "Bearer one"}

        async def arm(point, kind, **more):
            body = {"point": point, "kind": kind, **more}
            assert (await ask(port, "POST", "/debug/faults", body, headers=head)).status == 200

        calm = (await ask(port, "POST", "/v1/completions", LONG)).json()["choices"]
        seen = (await ask(port, "POST", "/v1/chat/completions", SEES)).json()["choices"]

        await arm("handler", "raise")
        failed = await ask(port, "POST", "/v1/completions", LONG)
        assert (failed.status, failed.error["reason"]) == (500, "internal_error")
        assert (await ask(port, "POST", "/v1/completions", LONG)).json()["choices"] == calm

        await arm("decoder", "raise")
        failed = await ask(port, "POST", "/v1/chat/completions", {**SEES, "cache_salt": "new"})
        assert failed.status in (400, 500)
        again = await ask(port, "POST", "/v1/chat/completions", {**SEES, "cache_salt": "newer"})
        assert again.json()["choices"] == seen

        await arm("forward", "hang", seconds=60)
        lost = asyncio.ensure_future(ask(port, "POST", "/v1/completions", LONG))
        begun = time.monotonic()
        await until(port, "/health/live", 503)
        assert time.monotonic() - begun < 30.0, "as long as the step hangs"
        assert (await ask(port, "GET", "/health/ready")).error["reason"] == "stalled"
        assert (await ask(port, "DELETE", "/debug/faults", headers=head)).status == 200
        assert (await lost).json()["choices"] == calm
        await until(port, "/health/ready", 200)
        metrics = (await ask(port, "GET", "/metrics")).content.decode()
        assert "host_memory_bytes" in metrics
        assert "vllm:recovery_seconds_count" in metrics
        process.signal()
        assert await asyncio.to_thread(process.wait) == 0
        assert "drained: nothing is held" in process.log
    finally:
        process.close()


async def test_s44_a_server_without_memory_drains_and_exits_with_70():
    process = ServerProcess(*FLAGS).spawn()
    try:
        port = process.wait_ready().port
        running = asyncio.ensure_future(ask(port, "POST", "/v1/completions", greedy("a", 300)))
        await plant(port, "memory", "held", size=1 << 50)
        assert len((await running).json()["choices"][0]["token_ids"]) == 300
        assert await asyncio.to_thread(process.wait) == EXIT_DEAD
        assert "--rss-hard-fraction" in process.log
        assert "drained: nothing is held" in process.log
    finally:
        process.close()


async def test_s09_a_slow_and_a_full_disk_stop_no_request_when_keys_are_read_again(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("me:one\n")
    with serving(*FLAGS, "--api-key-file", str(keys)) as process:
        head = {"Authorization": "Bearer one"}
        for kind in ("full", "slow"):
            body = {"point": "disk", "kind": kind, "seconds": 1.0}
            assert (await ask(process.port, "POST", "/debug/faults", body, headers=head)).status == 200
            process.signal(signal.SIGHUP)
            begun = time.monotonic()
            while f"fault: {kind}" not in process.log:  # noqa: ASYNC110 (another process)
                await asyncio.sleep(0.01)
            for _ in range(5):
                assert (await ask(process.port, "POST", "/v1/completions", LONG, headers=head)).status == 200
            assert time.monotonic() - begun < 5.0
        assert "the keys stay as they were" in process.log


async def test_s38_one_poisoned_request_of_a_hundred_reaches_no_other():
    """After the poisoned request a step raises, then the device is lost; the test bounds the time to recover."""
    process = ServerProcess(*FLAGS, "--no-enable-prefix-caching", "--stall-exit", "60").spawn()
    poisoned, poison = 37, 97
    prompts = [[poison if k == poisoned else 100 + k, *range(20, 24 + k % 9)] for k in range(100)]

    async def answers() -> list[Reply]:
        return await asyncio.gather(*(ask(port, "POST", "/v1/completions", greedy(ids, 3)) for ids in prompts))

    try:
        port = process.wait_ready().port
        calm = [reply.json()["choices"] for reply in await answers()]
        for point in STEP:
            await plant(port, point, "nan", token=poison)
            found = await answers()
            assert (found[poisoned].status, found[poisoned].error["reason"]) == (500, "invalid_logits"), point
            del found[poisoned]
            assert [reply.json()["choices"] for reply in found] == calm[:poisoned] + calm[poisoned + 1 :], point
        for point in STEP:
            await plant(port, point, "raise", token=poison)
            assert (await answers())[poisoned].status == 500
        assert [reply.json()["choices"] for reply in await answers()] == calm
        metrics = (await ask(port, "GET", "/metrics")).content.decode()
        taken = dict(re.findall(r"^vllm:recovery_seconds_(count|sum)\S* (\S+)$", metrics, re.MULTILINE))
        assert float(taken["count"]) == len(STEP)
        assert float(taken["sum"]) < 2.0 * len(STEP)
        await plant(port, "forward", "lost")
        begun = time.monotonic()
        assert (await ask(port, "POST", "/v1/completions", LONG)).status == 503
        assert await asyncio.to_thread(process.wait) == EXIT_DEAD
        assert time.monotonic() - begun < 30.0
    finally:
        process.close()


async def exchanges(port: int) -> int:
    """Number of requests on the server, without this one."""
    return (await ask(port, "GET", "/server_info?config_format=json")).json()["ledger"]["held"]["exchanges"]


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_s43_a_server_that_works_ends_well_twenty_times_in_a_row():
    for _ in range(20):
        process = ServerProcess(*FLAGS).spawn()
        try:
            port = process.wait_ready().port
            running = [asyncio.ensure_future(ask(port, "POST", "/v1/completions", greedy("a", 400))) for _ in range(8)]
            async with asyncio.timeout(20):
                while (await exchanges(port)) < len(running):  # noqa: ASYNC110 (another process)
                    await asyncio.sleep(0.01)
            children = process.children()
            process.signal()
            for reply in await asyncio.gather(*running):
                assert len(reply.json()["choices"][0]["token_ids"]) == 400
            assert await asyncio.to_thread(process.wait) == 0
            assert "drained: nothing is held" in process.log
            process.check_log()
            assert not set(children) & set(os.listdir("/proc"))
        finally:
            process.close()
