"""TowerRun: the tower run of one item, cut between layers into pieces, so that decode steps can run between pieces.

Owner: the stream, in step order. In: a PausingTower, and the item's features where the tower reads them. Out: the
item's rows, after the last piece. Between two pieces the run holds its hidden states and tables.

    step n: piece | decode        step n + 1: piece | decode        ...        step n + k: rows | decode and prompt
"""

from __future__ import annotations

import math

from torch import Tensor

from engine.encoders.tower import Features, PausingTower


class TowerRun:
    """A tower run; the first call of `advance` starts the tower."""

    def __init__(self, tower: PausingTower, features: Features) -> None:
        self._pieces = tower.pieces([features])

    def advance(self, work: float) -> Tensor | None:
        """Runs layers until `work` is done, in the unit of the item's weight. Returns the rows after the last layer."""
        done = 0.0
        try:
            while done < work:
                done += next(self._pieces)
        except StopIteration as end:
            made: list[Tensor] = end.value
            return made[0]
        return None

    def finish(self) -> Tensor:
        """Runs the remaining layers and returns the rows."""
        rows = self.advance(math.inf)
        assert rows is not None, "a run ends with its rows"
        return rows
