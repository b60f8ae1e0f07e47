"""The output format of the bench commands: a table of numbers, and JSON of the numbers and the options."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


def on_loop(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work` on a loop like the server's (uvloop)."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def number(value: Any) -> str:
    """A cell of a table."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def words_of(flags: dict[str, Any]) -> list[str]:
    """Flags as words of a command line."""
    return [f"--{name}={text_of(value)}" for name, value in flags.items()]


def text_of(value: Any) -> str:
    """A flag's value as its text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value) if isinstance(value, list | dict | tuple) else str(value)


def finish(options: Any, found: dict[str, Any]) -> int:
    """Print the numbers and write --json; returns the exit status."""
    width = max(map(len, found), default=0)
    for name, value in found.items():
        print(f"{name:<{width}}  {number(value):>12}", flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({**found, "options": dataclasses.asdict(options)}, file, indent=1)
    return 0
