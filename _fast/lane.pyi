import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from _fast.detok import Detokenizer
from _fast.histogram import Histogram

class Lane:
    open: bool
    last_at: float
    written_at: float
    def __init__(
        self,
        machine: Detokenizer,
        gaps: Histogram,
        before: bytes,
        behind: bytes,
        transport: asyncio.WriteTransport,
        fd: int,
        failed: Callable[[Exception], None],
        last_at: float,
    ) -> None: ...
    def close(self) -> None: ...

def deliver(
    routes: Mapping[int, tuple[Any, int]], ids: list[int], tokens: list[int], finishes: list[int], start: int, stop: int
) -> int: ...
