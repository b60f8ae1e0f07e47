"""Probe: a canary that a caller waits for, shared by all callers that ask while it runs.

Owner: loop. In: the engine. Out: nothing, or an EngineError. Callers at the same time share one step of
a token.
"""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

from engine.base.errors import NotReadyError
from engine.engine import Engine
from server.ops.canary import answer_of

_running: WeakKeyDictionary[Engine, asyncio.Task[None]] = WeakKeyDictionary()


async def probed(engine: Engine) -> None:
    """Wait until the engine has answered a probe. Raises EngineError; leaving does not end the probe."""
    task = _running.get(engine)
    if task is None or task.done():
        task = _running[engine] = asyncio.get_running_loop().create_task(_probe(engine))
    await asyncio.shield(task)


async def _probe(engine: Engine) -> None:
    try:
        async with asyncio.timeout(engine.config.step_timeout):
            await answer_of(engine)
    except TimeoutError:
        raise NotReadyError("stalled", "the engine does not answer") from None
