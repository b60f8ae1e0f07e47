"""PlantedBackend: wraps a backend with the fault points of engine/base/faults; used only with --debug-faults.

Owner: the owner of the wrapped backend. In: the calls of an executor. Out: the same calls on the wrapped backend; at
the points between them a test can make a step fail. Engines without the flag use the backend directly, at no cost.

    begin | inputs      forward | forward      sampling | choose      home | collect | commit
"""

from __future__ import annotations

from typing import Any, cast

from engine.base.faults import Faults
from engine.step.backend.base import Backend
from engine.step.step import Step


class PlantedBackend:
    """Adds fault points to four methods; all other attributes are those of the wrapped backend."""

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
    """The backend, wrapped in a PlantedBackend if there are faults."""
    return backend if faults is None else cast(Backend, PlantedBackend(backend, faults))
