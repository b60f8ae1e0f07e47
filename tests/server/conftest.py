"""One engine for all server tests: the embedded model, loaded once, behind apps of any configuration.

Everything runs on the session's event loop in asyncio's debug mode. There a slow callback, or a coroutine that is never
awaited, causes a warning, and warnings are errors.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from engine.engine import Engine
from server.app import make_app
from server.flags.config import Config
from server.start import folders, load
from server.state import AppState
from tests import tiny
from tests.engine_kit import GONE
from tests.server.asgi import Client

SMALL = {
    "scheduler": {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_num_queued_reqs": 64},
    "model": {"num_threads": 1},
    "cache": {"num_gpu_blocks_override": 1024},
    "chat": {"pool_threads": 2},
    "limits": {"max_queue_wait": 0.0},  # no refusals that depend on the machine's speed
}


def config_of(**groups: dict[str, Any]) -> Config:
    """A Config with the given fields of some groups."""
    config = Config()
    for group in {*SMALL, *groups}:
        fields = {**SMALL.get(group, {}), **groups.get(group, {})}
        config = dataclasses.replace(config, **{group: dataclasses.replace(getattr(config, group), **fields)})
    return config


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def state() -> AsyncIterator[AppState]:
    """A ready server's state."""
    async with ready(config_of()) as state:
        yield state


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tiny_state() -> AsyncIterator[AppState]:
    """The state of a server with a tiny text model and room for a thousand prompts, for tests of many requests."""
    model = {"model": str(tiny.checkpoint("qwen3")), "num_threads": 1}
    async with ready(config_of(model=model, scheduler={"max_num_seqs": 64, "max_num_queued_reqs": 1024})) as state:
        yield state


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pooling() -> AsyncIterator[Callable[[Path], Awaitable[Client]]]:
    """A function that returns a client of a server with a pooling checkpoint, started once: await pooling(folder)."""
    served: dict[str, Client] = {}
    async with AsyncExitStack() as stack:

        async def client_of(
            folder: Path, max_model_len: int = 0, max_inflight_per_key: int = 0, **flags: Any
        ) -> Client:
            key = f"{folder} {max_model_len} {max_inflight_per_key} {flags}"
            if key not in served:
                model = {"model": str(folder), "num_threads": 1, "max_model_len": max_model_len}
                rows = {"max_num_seqs": 16, "max_num_queued_reqs": 64}
                limits = {"max_inflight_per_key": max_inflight_per_key}
                config = config_of(model=model, scheduler=rows, limits=limits, pooling=flags)
                state = await stack.enter_async_context(ready(config))
                served[key] = Client(make_app(state))
                served[key].state = state  # type: ignore[attr-defined]
            return served[key]

        yield client_of


@asynccontextmanager
async def ready(config: Config) -> AsyncIterator[AppState]:
    """A state with a running engine."""
    asyncio.get_running_loop().set_debug(True)
    state = AppState(config)
    await folders.fetch(state)
    state.engine = Engine(state.config.engine(state.folder))
    await load.load(state)
    state.phase = "ready"
    yield state
    if state.media is not None:
        await state.media.close()
    await state.engine.stop(0.0)
    state.pool.shutdown()


@pytest.fixture
def serve(state: AppState) -> Callable[..., Client]:
    """Makes a client for an app with other settings on the same engine: serve(limits={"max_n": 2})."""
    return maker(state)


@pytest.fixture
def tiny_client(tiny_state: AppState) -> Client:
    """A client of the tiny model."""
    return maker(tiny_state)()


def maker(state: AppState) -> Callable[..., Client]:
    """A function that makes clients; see `serve`."""

    def make(phase: str = "ready", **groups: Any) -> Client:
        other = AppState(config_of(**groups))
        other.pool.shutdown()
        loaded = (
            "engine",
            "tokenizer",
            "renderer",
            "vocabulary",
            "defaults",
            "parsers",
            "media",
            "grammars",
            "pool",
            "whisper",
        )
        for name in loaded:
            setattr(other, name, getattr(state, name))
        other.batches.files.pool = other.pool
        for places in (other.places, other.batches.places):
            places.size(state.engine.limits.max_open, state.engine.limits.max_rows, other.config.pool_threads)
        other.phase = phase  # type: ignore[assignment]
        client = Client(make_app(other))
        client.state = other  # type: ignore[attr-defined]
        return client

    return make


@pytest.fixture
def client(serve: Callable[..., Client]) -> Client:
    return serve()


@pytest.fixture
def submitted(client: Client, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list of the requests that the engine gets."""
    seen: list[Any] = []
    submit = client.state.engine.submit
    monkeypatch.setattr(client.state.engine, "submit", lambda request: seen.append(request) or submit(request))
    return seen


async def until(happens: Callable[[], object]) -> None:
    """Waits until the condition holds, at most 20 s."""
    async with asyncio.timeout(20):
        while not happens():  # noqa: ASYNC110 (no event to await)
            await asyncio.sleep(0.005)


async def quiet(state: AppState) -> dict[str, int]:
    """The engine's ledger once nothing runs; waits at most 5 s."""
    for _ in range(500):
        held = state.engine.ledger()
        if not any(held.get(name) for name in GONE):
            break
        await asyncio.sleep(0.01)
    return held
