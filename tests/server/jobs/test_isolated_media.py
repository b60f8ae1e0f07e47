"""--media-isolation over HTTP: equal answers, an error of one request only, no process left (SECURITY S23, S43)."""

from __future__ import annotations

import signal
import time

import httpx
import pytest

from server.start import makers
from server.state import AppState
from tests.mm import made
from tests.mm.test_isolation import Watched, children, is_alive, kill
from tests.server.conftest import config_of
from tests.server.jobs.test_odd_media import asked, part
from tests.server.start.test_process import Server

PICTURE = part("image", made.png(made.noise(60, 80)))
FILM = part("video", made.film(made.ramp(20), track=made.tone(2.0)))


@pytest.mark.asyncio(loop_scope="session")
async def test_s23_answers_are_those_of_the_pool_and_a_fault_is_one_requests(serve, state: AppState):
    other = AppState(config_of(media={"media_isolation": "all", "helper_processes": 1}))
    other.pool.shutdown()
    other.pool, other.engine, other.tokenizer = state.pool, state.engine, state.tokenizer
    plain, client = serve(), serve()
    client.state.media = media = makers.make_loader(other)
    client.state.metrics.helpers = media.helpers.counts
    try:
        one, same = await asked(plain, PICTURE, FILM), await asked(client, PICTURE, FILM)
        assert one.status == same.status == 200
        assert one.json()["choices"] == same.json()["choices"]
        assert one.json()["usage"]["prompt_tokens"] == same.json()["usage"]["prompt_tokens"]
        Watched(media, kill)
        reply = await asked(client, part("image", made.png(made.noise(61, 80))))
        assert (reply.status, reply.error["reason"]) == (400, "media_invalid")
        assert reply.error["param"] == "messages[0].content[0].image_url"
        assert (await asked(client, part("image", made.png(made.noise(62, 80))))).status == 200
        told = (await client.get("/metrics")).content
        for line in (
            b'media_helpers{state="idle"} 1',
            b"media_helpers_started_total 2",
            b"media_helpers_ended_total 1",
        ):
            assert line in told
        assert client.state.ledger()["media_helpers"] == 0
    finally:
        await media.close()


@pytest.mark.slow
def test_s43_no_helper_outlives_its_server() -> None:
    server = Server("--media-isolation", "all", "--helper-processes", "1")
    content = [PICTURE, {"type": "text", "text": "?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    assert httpx.post(f"{server.where}/v1/chat/completions", json=body, timeout=30).status_code == 200
    (helper,) = children(server.process.pid)
    assert server.stop(signal.SIGINT) == 0
    for _ in range(1000):
        if not is_alive(helper):
            return
        time.sleep(0.02)
    raise AssertionError("it lives on")
