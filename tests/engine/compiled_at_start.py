"""Starts a model with an empty kernel cache; prints which kernels were compiled when, for test_on_device_start.

Run: TRITON_CACHE_DIR=EMPTY python -m tests.engine.compiled_at_start FOLDER SETTINGS (a JSON object)
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import triton

from engine.step.backend.device.startup import Startup
from tests.engine.kinds import every_kind
from tests.engine_kit import running


async def main(folder: str, settings: str) -> dict[str, Any]:
    """Names of the kernels compiled during the start and after it, and the start's seconds by phase."""
    at_start: list[str] = []
    later: list[str] = []
    found = later
    real = Startup.compile

    def compiling(start: Startup, threads: int) -> None:
        nonlocal found
        found = at_start
        real(start, threads)
        found = later

    def listener(*, src: Any, cache_hit: bool, **_facts: Any) -> None:
        if not cache_hit:  # on a hit the kernel was compiled for another launch
            found.append(src.name)

    Startup.compile = compiling  # type: ignore[method-assign]
    triton.knobs.compilation.listener = listener
    async with running(folder, device="cuda", **json.loads(settings)) as engine:
        await every_kind(engine)
        return {"at_start": at_start, "later": later, "startup": engine.startup}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
