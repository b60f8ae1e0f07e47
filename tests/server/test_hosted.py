"""The app on foreign servers: plain uvicorn, bare ASGI messages; start, streams, disconnects, mounts, drain."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import orjson
import pytest
import pytest_asyncio
import uvicorn

from engine import Engine
from engine.base.errors import ConfigError
from server.flags.command_line import UsageError
from server.hosted import Hosted, hosted
from server.start import lifespan, load
from server.start.lifespan import Lifespan
from server.state import AppState
from tests import tiny
from tests.end_to_end.process import ROOT
from tests.server.asgi import Call
from tests.server.conftest import config_of, quiet
from tests.server.live import listening

pytestmark = pytest.mark.asyncio(loop_scope="session")
LONG = {"max_tokens": 1500, "ignore_eos": True, "stream": True}


async def until(happened: Callable[[], object]) -> None:
    for _ in range(3000):
        if happened():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen within 30 s")


def small(**groups: Any) -> Hosted:
    return Hosted(config_of(model={"model": str(tiny.checkpoint("qwen3")), "num_threads": 1}, **groups))


@asynccontextmanager
async def living(app: Hosted) -> AsyncIterator[dict[str, Any]]:
    """Runs the app between the two lifespan messages; yields the answer to the first."""
    told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    told.put_nowait({"type": "lifespan.startup"})
    task = asyncio.ensure_future(app({"type": "lifespan"}, told.get, said.put))
    first = await said.get()
    yield first
    told.put_nowait({"type": "lifespan.shutdown"})
    await asyncio.wait_for(task, 30)
    assert said.qsize() == (1 if first["type"].endswith("complete") else 0)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served() -> AsyncIterator[tuple[Hosted, int]]:
    """Yields (app, port) of the app under an unmodified uvicorn, with lifespan."""
    app = small()
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, lifespan="on", log_config=None, access_log=False, http="httptools"))
    server.capture_signals = nullcontext  # type: ignore[method-assign, assignment]
    serving = asyncio.get_running_loop().create_task(server.serve([listener]))
    await until(lambda: server.started)
    yield app, listener.getsockname()[1]
    server.should_exit = True
    await asyncio.wait_for(serving, 30)
    assert app.state.pool._shutdown, "the lifespan was told of the end"


async def post(port: int, body: dict[str, Any], path: str = "/v1/completions") -> tuple[asyncio.StreamReader, Any]:
    """Sends a request on a socket of its own; returns (reader, writer)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = orjson.dumps(body)
    head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nX-Request-Id: same\r\n"
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return reader, writer


async def pieces(port: int, body: dict[str, Any]) -> list[bytes]:
    """The chunks of a chunked answer, without timestamps."""
    reader, writer = await post(port, body)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    found = []
    while size := int(await reader.readline(), 16):
        found.append(re.sub(rb'"created":\d+', b"", await reader.readexactly(size)))
        assert await reader.readexactly(2) == b"\r\n"
    writer.close()
    return found


@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}], ids=["plain", "logprobs"])
async def test_a_foreign_server_sends_the_same_pieces(served, tiny_client, fields):
    """The frames are equal, with as many writes as steps."""
    app, port = served
    body = {"prompt": "once upon a time", "max_tokens": 12, "ignore_eos": True, "stream": True, "temperature": 0}
    theirs = await pieces(port, body | fields)
    async with listening(tiny_client) as url:
        ours = await pieces(int(url.rpartition(":")[2]), body | fields)
    assert [piece.replace(b'"model":"' + name_of(tiny_client), b"") for piece in ours] == [
        piece.replace(b'"model":"' + app.state.names[0].encode(), b"") for piece in theirs
    ]
    assert 8 <= len(theirs) <= 14


def name_of(client: Any) -> bytes:
    return client.state.names[0].encode()


async def test_a_client_that_leaves_is_noticed(served):
    app, port = served
    before = app.state.metrics.finished["abort"]
    reader, writer = await post(port, {"prompt": "hello", **LONG})
    await reader.readuntil(b"data: ")
    assert app.state.places.taken == 1
    writer.transport.abort()
    assert not (await quiet(app.state))["routes"]
    await until(lambda: not app.state.open_exchanges)
    assert app.state.metrics.finished["abort"] == before + 1
    assert app.state.places.taken == app.state.body_budget.used == 0


async def test_a_client_that_leaves_before_the_first_token_is_noticed(served):
    app, port = served
    app.state.engine.pause()
    try:
        _, writer = await post(port, {"prompt": "hello", "max_tokens": 4})
        await until(lambda: app.state.places.taken == 1)
        writer.transport.abort()
        await until(lambda: not app.state.open_exchanges)
        assert app.state.places.taken == 0
    finally:
        app.state.engine.resume()


async def test_paths_are_those_behind_the_mount(served):
    app, _ = served
    for root, path, status in (("/llm", "/llm/v1/models", 200), ("/llm", "/v1/models", 200), ("", "/llm/health", 404)):
        call = Call(app, "GET", path)
        scope = {**call.scope(), "root_path": root}
        await app(scope, call.receive, call.send)
        assert call.status == status, path


async def test_the_socket_s_path_is_that_behind_the_mount_too(served):
    app, _ = served
    found = []
    for root, path in (("/llm", "/llm/v1/realtime"), ("", "/v1/realtime"), ("", "/llm/v1/realtime")):
        call = Call(app, "GET", path)
        said: list[dict[str, Any]] = []

        async def keep(message: dict[str, Any], said: list[dict[str, Any]] = said) -> None:
            said.append(message)

        await app({**call.scope(), "type": "websocket", "root_path": root}, call.receive, keep)
        found.append(said[0]["status"])
    assert found == [501, 501, 404]


async def test_a_model_that_cannot_be_served_fails_the_start(caplog):
    async with living(Hosted(config_of(model={"model": "/nowhere"}))) as first:
        assert first["type"] == "lifespan.startup.failed"
        assert "no such folder" in first["message"]


@pytest.mark.parametrize("asked", [True, False], ids=["a stop", "a timeout"])
async def test_loading_that_is_cut_short_is_not_waited_for(monkeypatch, asked):
    """While a device thread loads a model, it takes no commands for seconds."""

    async def endless(state):
        await asyncio.Event().wait()

    async def waits(engine, timeout):
        raise AssertionError("somebody waits for the device thread")

    monkeypatch.setattr(load, "load", endless)
    monkeypatch.setattr(Engine, "stop", waits)
    lifespan = Lifespan(AppState(config_of(server={"startup_timeout": 0.01})))
    if asked:
        lifespan.stop()
        await lifespan.start()
    else:
        with pytest.raises(ConfigError, match="loading took longer than --startup-timeout"):
            await lifespan.start()
    assert lifespan.cut_short
    await lifespan.close()


async def test_an_import_that_still_runs_at_the_end_is_not_waited_for(monkeypatch):
    """Without a cache, numba compiles for half a minute while librosa is imported."""
    monkeypatch.setattr(lifespan, "POOL_S", 0.05)
    begun, ended = threading.Event(), threading.Event()
    state = AppState(config_of())
    life = Lifespan(state)
    importing = state.pool.submit(lambda: (begun.set(), ended.wait()))
    try:
        await until(begun.is_set)
        await life.close()
        assert life.cut_short
    finally:
        ended.set()
    await asyncio.wrap_future(importing)


async def test_idle_threads_of_the_pool_are_waited_for():
    state = AppState(config_of())
    life = Lifespan(state)
    await asyncio.wrap_future(state.pool.submit(lambda: None))
    await life.close()
    assert not life.cut_short


async def test_the_end_waits_for_what_runs_and_then_refuses():
    app = small(server={"shutdown_timeout": 30.0})
    async with living(app) as first:
        assert first["type"] == "lifespan.startup.complete"
        assert (await Call(app, "GET", "/health").finish()).status == 200
        body = orjson.dumps({"prompt": "hello", **LONG, "max_tokens": 64})
        running = Call(app, "POST", "/v1/completions", body).start()
        await running.wrote.wait()
    await running.finish()
    assert running.content.endswith(b"data: [DONE]\n\n")
    assert b'"finish_reason":"length"' in running.content
    late = await Call(app, "GET", "/health").finish()
    assert (late.status, late.error["reason"]) == (503, "draining")


async def test_a_stream_that_does_not_end_in_time_gets_an_error():
    app = small(server={"shutdown_timeout": 0.05})
    async with living(app):
        running = Call(app, "POST", "/v1/completions", orjson.dumps({"prompt": "hello", **LONG})).start()
        await running.wrote.wait()
    await running.finish()
    assert b'"reason":"draining"' in running.content
    assert running.content.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("flag", ["--port", "--uds", "--ssl-keyfile", "--max-header-bytes", "--header-timeout"])
async def test_flags_of_the_host_are_refused(flag):
    more = ["--ssl-certfile", "c"] if flag == "--ssl-keyfile" else []
    with pytest.raises(UsageError, match=f"{flag}: has no effect in a hosted app"):
        hosted(flag, "2048", *more)


async def test_an_app_has_no_commands():
    with pytest.raises(UsageError, match="takes flags only"):
        hosted("check")


async def test_only_scaleout_imports_ray_and_nothing_imports_scaleout():
    of_ray = re.compile(r"^\s*(from|import) (ray\b|server\.scaleout)", re.M)
    users = [path.name for path in (ROOT / "server").rglob("*.py") if of_ray.search(path.read_text(encoding="utf-8"))]
    assert users == ["scaleout.py"]


async def test_what_cuts_recordings_is_imported_in_the_pool_once_no_request_is_open(monkeypatch):
    names: list[str] = []
    monkeypatch.setattr(lifespan.quiet, "prepare", lambda: names.append(threading.current_thread().name))
    state = AppState(config_of())
    state.idle.set()
    request = object()
    state.open_exchanges.add(request)  # type: ignore[arg-type]
    preparing = asyncio.ensure_future(Lifespan(state).prepare_recordings(0.0))
    try:
        await until(lambda: not state.idle.is_set())
        for _ in range(3):
            await asyncio.sleep(0)
        assert names == []
        state.open_exchanges.clear()
        state.idle.set()
        await preparing
        assert len(names) == 1
        assert names[0] != threading.main_thread().name
    finally:
        preparing.cancel()
        state.pool.shutdown()
