"""MemoryWatch: sheds load before the kernel kills the process for its memory, and shuts it down cleanly if it must.

Owner: loop. In: once a second, the memory of this process and its helpers in bytes (engine/device/host_memory: without
pages of files, which the kernel drops by itself). Out: above the soft limit, media and large bodies are refused, the
cache of media is emptied and freed memory is returned to the system; below nine tenths of this limit they are accepted
again. Above the hard limit `exhausted` is called once: the server drains and exits, and its supervisor starts a new
one.

    held   ......... soft ---- no media, no large bodies ---- hard ---- drain, exit 70
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Literal, Protocol

from engine.device.host_memory import memory_limit, resident_memory
from mm.heap import trim_heap
from server.ops.metrics import MemoryNumbers
from server.ops.trimming import Trimming

if TYPE_CHECKING:
    from engine.engine import Engine
    from mm.load import MediaLoader
    from server.flags.config import Config
    from server.ops.limits import BodyBudget
    from server.ops.pool import Pool

log = logging.getLogger("omniloop")

LOOK_S = 1.0
ENOUGH = 0.9  # load is accepted again below this fraction of the soft limit
GIB = 1 << 30
Level = Literal["ok", "soft", "hard"]


class Watched(Protocol):
    """The parts of AppState that a watch acts on."""

    config: Config
    engine: Engine
    media: MediaLoader | None
    body_budget: BodyBudget
    pool: Pool

    @property
    def open_exchanges(self) -> Collection[object]: ...


class MemoryWatch:
    """Watches the memory between `start` and `close`."""

    def __init__(
        self,
        state: Watched,
        exhausted: Callable[[], None],
        held: Callable[[], int] | None = None,
        limit: int = 0,
    ) -> None:
        """`held`, `limit`: bytes; None and 0: read from the kernel."""
        self.level: Level = "ok"
        self.held = 0
        self.limit = limit or memory_limit()
        self.shed = 0  # how often load was shed
        health = state.config.health
        self.soft, self.hard = health.rss_soft_fraction * self.limit, health.rss_hard_fraction * self.limit
        self._state = state
        self._exhausted = exhausted
        self._read = held or self._resident
        self._trimming = Trimming(state.pool)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start watching, once the model is loaded. Limits that loading already exceeds are raised, with a warning in
        the log.
        """
        self.held = self._read()
        if self.held >= self.soft:
            usual, most = self.soft, max(self.limit, self.held)
            self.soft = (self.held + most) / 2
            self.hard = max(self.hard, (self.soft + most) / 2)
            log.warning(
                "after loading the server has %.1f GiB, above --rss-soft-fraction (%.1f of %.1f GiB): load is shed "
                "from %.1f GiB on; a smaller model or KV cache, or a larger limit, leaves room",
                self.held / GIB,
                usual / GIB,
                self.limit / GIB,
                self.soft / GIB,
            )
        self.look()

    def numbers(self) -> MemoryNumbers:
        """Numbers for the metrics."""
        return MemoryNumbers(self.limit, self.held, self.shed)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look(self) -> None:
        """Check the memory and set the level, once a second."""
        self.held = self._read()
        if self.held >= self.hard and self._state.config.health.rss_hard_fraction < 1:
            self._set("hard")
            self._exhausted()
            return
        if self.held >= self.soft:
            self._set("soft")
        elif self.held < ENOUGH * self.soft:
            self._set("ok")
        self._trimming.look(self.held, idle=not self._state.open_exchanges)
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self.look)

    def _set(self, level: Level) -> None:
        if level == self.level:
            return
        before, self.level = self.level, level
        state, sheds = self._state, level != "ok"
        state.body_budget.closed = sheds
        if state.media is not None:
            state.media.shedding = sheds
        words = "the server has %.2f of %.2f GiB of memory: %s"
        what = {
            "ok": "media and large bodies are taken again",
            "soft": "it takes no media and no large bodies (--rss-soft-fraction)",
            "hard": "it drains and exits (--rss-hard-fraction)",
        }[level]
        log.log(logging.INFO if level == "ok" else logging.ERROR, words, self.held / GIB, self.limit / GIB, what)
        if sheds and before == "ok":
            self.shed += 1
            if state.media is not None:
                state.media.cache.clear()
            state.pool.submit(trim_heap)

    def _resident(self) -> int:
        media, faults = self._state.media, self._state.engine.config.faults
        held = resident_memory(() if media is None else media.helpers.pids())
        return held if faults is None else held + faults.held()
