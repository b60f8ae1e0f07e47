"""PlantedBackend: a backend whose calls pass the points of engine/base/faults; only where --debug-faults is given.

Owner: as the backend that it wraps. In: the calls of an executor. Out: the same calls of the wrapped backend, between
points at which a test may let a step fail. Engines without the flag have the backend itself, so no plain step asks.

    begin | inputs      forward | forward      sampling | choose      home | collect | commit
"""

from __future__ import annotations

from typing import Any, cast

from engine.base.faults import Faults
from engine.step.backend.base import Backend
from engine.step.step import Step


class PlantedBackend:
    """Everything that is not a point is the wrapped backend's."""

    def __init__(self, backend: Backend, faults: Faults) -> None:
        self._backend, self._faults = backend, faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def begin(self, step: Step) -> None:
        self._backend.begin(step)
        self._faults.at("inputs", step)

    def forward(self, step: Step) -> None:
        self._backend.forward(step)
        self._faults.at("forward", step)

    def choose(self, step: Step) -> None:
        self._faults.at("sampling", step)
        self._backend.choose(step)

    def collect(self, step: Step, behind: Step | None) -> None:
        self._faults.at("home", step)
        self._backend.collect(step, behind)
        self._faults.at("commit", step)


def planted(backend: Backend, faults: Faults | None) -> Backend:
    """The backend for an executor."""
    return backend if faults is None else cast(Backend, PlantedBackend(backend, faults))
