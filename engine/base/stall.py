"""StallWatch: notices a device thread that has stopped turning, whatever it waits for (SECURITY S41).

Owner: loop. In: the time of the device thread's last turn, read once a second. Out: one call of Engine.on_stall.
The device thread itself waits without a timeout, because the driver's calls have none, so the watch costs a turn
nothing. Time in which this loop does not run either (a stopped process, a suspended machine) does not count.

    device   turn  turn  turn  (a step that never ends) .....................................
    loop      look   look   look   look  [step_timeout: not ready, not live]  [stall_exit: on_stall]
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from engine.base.config import EngineConfig

LOOK_S = 1.0


class Watched(Protocol):
    """The part of the engine that a watch uses."""

    config: EngineConfig

    @property
    def last_beat(self) -> float:
        """time.monotonic() of the device thread's last turn."""

    def on_stall(self, seconds: float) -> None:
        """Called once, when there has been no turn for step_timeout and stall_exit seconds."""


class StallWatch:
    """Looks from its creation to `close`."""

    def __init__(self, engine: Watched) -> None:
        self._engine = engine
        config = engine.config
        self._limit = config.step_timeout + config.failures.stall_exit
        self._every = min(LOOK_S, self._limit / 4)
        self._beat = 0.0
        self._silent = 0.0  # seconds for which `last_beat` has not changed
        self._timer = asyncio.get_running_loop().call_later(self._every, self._look)

    def close(self) -> None:
        """Looks no more."""
        self._timer.cancel()

    def _look(self) -> None:
        beat = self._engine.last_beat
        self._silent = self._silent + self._every if beat == self._beat else 0.0
        self._beat = beat
        if self._silent >= self._limit:
            self._engine.on_stall(self._silent)
            return
        self._timer = asyncio.get_running_loop().call_later(self._every, self._look)
