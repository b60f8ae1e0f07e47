"""TowerRun: the run of one item's tower, cut between layers, so that steps of rows that decode come in between.

Owner: the stream, in step order. In: a tower that may pause, and the item's features where the tower reads them. Out:
the item's rows, behind the last piece. Between two pieces the run holds its hidden states and tables.

    step n: piece | decode        step n + 1: piece | decode        ...        step n + k: rows | decode and prompt
"""

from __future__ import annotations

import math

from torch import Tensor

from engine.encoders.tower import Features, PausingTower


class TowerRun:
    """Begins with the first piece."""

    def __init__(self, tower: PausingTower, features: Features) -> None:
        self._pieces = tower.pieces([features])

    def advance(self, work: float) -> Tensor | None:
        """Runs as many layers as do so much work, in the unit of the item's weight; the rows when all have run."""
        done = 0.0
        try:
            while done < work:
                done += next(self._pieces)
        except StopIteration as end:
            made: list[Tensor] = end.value
            return made[0]
        return None

    def finish(self) -> Tensor:
        """The rows; runs what is left."""
        rows = self.advance(math.inf)
        assert rows is not None, "a run ends with its rows"
        return rows
