"""ExpertWatch: the expert load, in /metrics and, with --log-level debug, in the log.

Owner: loop. In: a scrape or a tick of the status line, which requests counts; at most one step in EVERY is counted.
Out: the newest counts. A scrape does not wait for the counts that it requests: the next scrape or tick reports them.
Without scrapes and ticks nothing is counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from engine.base.errors import NotReadyError

if TYPE_CHECKING:
    from engine import Engine
    from engine.step.parts.expert_load import LayerLoad

log = logging.getLogger("omniloop.experts")

EVERY = 128  # least number of steps between two counts


class ExpertWatch:
    """The expert load of one engine whose model has experts."""

    def __init__(self, engine: Engine) -> None:
        self.layers: list[LayerLoad] = []  # counts of the newest counted step
        self._engine = engine
        self._looked_at = 0  # the engine's step number at the newest count
        self.looking: asyncio.Task[None] | None = None

    def ask(self) -> None:
        """Request counts from the engine, unless it counted less than EVERY steps ago."""
        steps = self._engine.stats.steps
        if steps - self._looked_at < EVERY or (self.looking is not None and not self.looking.done()):
            return
        self._looked_at = steps
        self.looking = asyncio.get_running_loop().create_task(self._look())

    def close(self) -> None:
        """Cancel a count that the engine has not returned."""
        if self.looking is not None:
            self.looking.cancel()

    async def _look(self) -> None:
        with contextlib.suppress(NotReadyError):  # the engine stops
            found = await self._engine.look_at_experts()
            if found:
                self.layers = found
                log.debug("%s", line(found))


def line(layers: list[LayerLoad]) -> str:
    """A log line: for each layer, the number of experts that tokens chose, and the busiest expert's share of
    the tokens.
    """
    shares = "; ".join(f"{layer.layer}: {layer.touched}, {layer.largest:.1%}" for layer in layers)
    return f"experts of a step by layer, and the share of tokens at the busiest one: {shares}"
