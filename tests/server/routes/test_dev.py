"""Dev endpoints need their flag and, on a public address, the admin key; pause, resume, caches, settings."""

from __future__ import annotations

import asyncio

import pytest

from server.routes import dev
from server.start.lifespan import Lifespan
from tests.engine_kit import frozen
from tests.server.conftest import quiet

pytestmark = pytest.mark.asyncio(loop_scope="session")

HERE = {"enable_dev_endpoints": True, "host": "127.0.0.1"}
LOCAL = {"host": "localhost"}


@pytest.fixture
def operator(serve):
    client = serve(server=HERE)
    client.headers = LOCAL
    return client


@pytest.mark.parametrize("line", dev.ROUTES, ids=lambda line: line.path)
async def test_s03_without_the_flag_there_are_no_such_routes(client, line):
    for method in line.methods - {"HEAD"}:
        reply = await client.call(method, line.path).finish()
        assert (reply.status, reply.error["reason"]) == (404, "not_found")


async def test_s03_an_open_address_needs_the_admin_key(serve):
    for server in ({"enable_dev_endpoints": True}, {"enable_dev_endpoints": True, "admin_api_key": "boss"}):
        client = serve(server=server)
        for headers in ({}, {"x-api-key": "other"}):
            reply = await client.get("/server_info", headers=headers)
            assert (reply.status, reply.error["reason"]) == (403, "admin_only")
    assert (await client.get("/server_info", headers={"authorization": "Bearer boss"})).status == 200
    assert (await client.chat()).status == 200
    both = serve(server={"enable_dev_endpoints": True, "admin_api_key": "boss", "api_key": ("user",)})
    assert (await both.get("/is_paused", headers={"x-api-key": "user"})).status == 403
    assert (await both.get("/is_paused", headers={"x-api-key": "boss"})).json() == {"is_paused": False}
    assert (await both.get("/is_paused")).status == 401


async def test_s03_a_given_admin_key_is_asked_for_on_loopback_too(serve):
    given = {"enable_dev_endpoints": True, "host": "127.0.0.1", "admin_api_key": "boss", "api_key": ("user",)}
    client = serve(server=given)
    local = {"host": "localhost"}
    for line in dev.ROUTES:
        for method in line.methods - {"HEAD"}:
            reply = await client.call(method, line.path, headers={**local, "x-api-key": "user"}).finish()
            assert (reply.status, reply.error["reason"]) == (403, "admin_only"), line.path
    assert (await client.get("/is_paused", headers={**local, "x-api-key": "boss"})).json() == {"is_paused": False}
    open_one = serve(server={"enable_dev_endpoints": True, "host": "127.0.0.1"})
    assert (await open_one.get("/is_paused", headers=local)).status == 200


async def test_s02_guessing_the_admin_key_is_throttled(serve):
    client = serve(server={"enable_dev_endpoints": True, "admin_api_key": "boss", "auth_max_failures": 3})
    statuses = [(await client.get("/is_paused", headers={"x-api-key": str(at)})).status for at in range(5)]
    assert statuses == [403, 403, 403, 429, 429]


async def test_a_pause_freezes_what_runs_and_holds_what_comes(operator, state):
    whole = (await operator.chat("hi", max_tokens=600)).json()["choices"]
    running = operator.call("POST", "/v1/chat/completions", ask(max_tokens=600)).start()
    await busy(state)
    assert (await operator.post("/pause?mode=keep")).json() == {"status": "paused"}
    assert (await operator.get("/is_paused")).json() == {"is_paused": True}
    late = operator.call("POST", "/v1/chat/completions", ask(max_tokens=3)).start()
    await frozen(state.engine)
    steps = state.engine.stats.steps
    await asyncio.sleep(0.1)
    assert state.engine.stats.steps == steps
    assert not late.complete
    assert (await operator.post("/resume")).json() == {"status": "resumed"}
    await running.finish()
    await late.finish()
    assert running.json()["choices"] == whole
    assert late.json()["usage"]["completion_tokens"] == 3
    assert (await operator.get("/is_paused")).json() == {"is_paused": False}


@pytest.mark.parametrize(("mode", "reason"), [("abort", "abort"), ("wait", "length")])
async def test_a_pause_ends_what_runs_or_waits_for_it(operator, state, mode, reason):
    running = operator.call("POST", "/v1/chat/completions", ask(max_tokens=600)).start()
    await busy(state)
    assert (await operator.post(f"/pause?mode={mode}")).status == 200
    assert state.engine.ledger()["routes"] == 0
    await running.finish()
    assert running.json()["choices"][0]["finish_reason"] == reason
    left = operator.call("POST", "/v1/chat/completions", ask(max_tokens=2)).start()
    await asyncio.sleep(0.02)
    left.leave()  # a client that leaves before the pause ends
    await left.finish()
    assert operator.state.places.taken == 0
    assert (await operator.post("/resume")).status == 200
    assert (await operator.post("/pause?mode=later")).error["param"] == "mode"
    assert (await operator.get("/is_paused")).json() == {"is_paused": False}


async def test_a_pause_waits_for_all_rounds_of_a_beam_search(operator, state):
    running = operator.call(
        "POST", "/v1/chat/completions", ask(max_tokens=60, use_beam_search=True, n=2, logprobs=True)
    ).start()
    await busy(state)
    assert (await operator.post("/pause?mode=wait")).status == 200
    steps = state.engine.stats.steps
    await running.finish()
    assert state.engine.stats.steps == steps
    assert running.json()["usage"]["completion_tokens"] == 120
    await operator.post("/resume")


async def test_a_frozen_server_can_let_running_requests_end(operator, state):
    running = operator.call("POST", "/v1/chat/completions", ask(max_tokens=200)).start()
    await busy(state)
    await operator.post("/pause?mode=keep")
    assert (await asyncio.wait_for(operator.post("/pause?mode=wait"), 60)).json() == {"status": "paused"}
    await running.finish()
    assert running.json()["choices"][0]["finish_reason"] == "length"
    await operator.post("/resume")


async def test_a_paused_server_that_is_to_end_finishes_what_runs_and_waits(operator, state):
    running = operator.call("POST", "/v1/chat/completions", ask(max_tokens=200)).start()
    await busy(state)
    await operator.post("/pause?mode=keep")
    waiting = operator.call("POST", "/v1/chat/completions", ask(max_tokens=2)).start()
    await asyncio.sleep(0.02)
    await asyncio.wait_for(Lifespan(operator.state).drain(), 60)
    for call in (running, waiting):
        await call.finish()
        assert call.json()["choices"][0]["finish_reason"] == "length"


async def test_caches_are_forgotten(operator, state):
    text = "the quick brown fox jumps over the lazy dog " * 5
    await operator.chat(text)
    await quiet(state)
    running = operator.call("POST", "/v1/chat/completions", ask(max_tokens=2000)).start()
    await busy(state)
    assert (await operator.post("/reset_prefix_cache")).json() == {"success": False}
    running.leave()
    await running.finish()
    await quiet(state)
    for _ in range(100):
        if (await operator.post("/reset_prefix_cache")).json()["success"]:
            break
        await asyncio.sleep(0.01)
    again = (await operator.chat(text)).json()["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] == 0
    await quiet(state)
    assert (await operator.post("/reset_mm_cache")).json() == {"success": True}
    assert len(state.media.cache) == 0
    assert (await operator.post("/reset_encoder_cache")).status == 200


async def test_s03_settings_show_no_paths_and_no_keys(serve):
    client = serve(
        server={**HERE, "api_key": ("secret-word",), "admin_api_key": "boss-word", "ssl_keyfile": "/some/place"},
        model={"model": "/a/folder/of/mine"},
        media={"allowed_local_media_path": "/media/here"},
        chat={"tool_parser_plugin": "/some/tools.py", "reasoning_parser_plugin": "/some/reasoning.py"},
    )
    client.headers = {**LOCAL, "x-api-key": "boss-word"}
    for form in ("text", "json"):
        reply = await client.get(f"/server_info?config_format={form}")
        text = reply.content.decode()
        assert reply.status == 200
        assert "max_num_seqs" in text
        assert not any(word in text for word in ("secret-word", "boss-word", "/some", "/a/folder", "/media", "folder"))
    assert (await client.get("/server_info?config_format=xml")).error["param"] == "config_format"


async def test_s44_the_ledger_is_zero_when_idle_and_says_what_is_held(operator):
    async def held():
        return (await operator.get("/server_info")).json()["ledger"]["held"]

    await until_zero(held)
    found = (await operator.get("/server_info")).json()["ledger"]
    names = ("used", "slots", "encoder_in_use", "routes", "streams", "matchers", "inbox")
    assert {f"engine_{name}" for name in names} <= found["held"].keys()
    assert {"exchanges", "places", "body_bytes", "sessions", "media_reserved_bytes", "compiles"} <= found["held"].keys()
    assert found["cached"]["engine_free"] + found["cached"]["engine_cached"] == found["cached"]["engine_total"]
    assert all(found["process"][name] > 0 for name in ("tasks", "threads", "descriptors", "resident_bytes"))
    body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True}
    running = operator.call("POST", "/v1/completions", body).start()
    await busy(operator.state)
    now = await held()
    assert (now["exchanges"], now["places"]) == (1, 1)
    assert now["engine_slots"] == now["engine_live_rows"] == 1
    running.leave()
    await running.finish()
    await until_zero(held)


async def until_zero(held):
    async with asyncio.timeout(60):
        while any((await held()).values()):  # noqa: ASYNC110 (it is counted, nothing calls)
            await asyncio.sleep(0.01)


async def test_what_this_engine_cannot_do_is_501(operator):
    for path in ("/sleep?level=1", "/wake_up"):
        reply = await operator.post(path)
        assert reply.status == 501
        assert "stay on the device until it stops" in reply.error["message"], "true on every device"
    assert (await operator.get("/is_sleeping")).json() == {"is_sleeping": False}


async def busy(state) -> None:
    """Waits until a request runs."""
    for _ in range(1000):
        if state.engine.ledger().get("live_rows"):
            return
        await asyncio.sleep(0.005)


def ask(**fields):
    return {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True, "temperature": 0, **fields}
