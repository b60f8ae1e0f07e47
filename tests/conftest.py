"""How `make test` distributes tests over the cores: whole files go to one worker, timing tests run alone.

pytest-xdist gives all tests of a file to one worker, so their shared fixtures are made once. The files in APART have
long cases that share nothing: their cases are distributed one by one. Files with tests marked `alone` come last: such a
test takes an exclusive lock that every other test shares, so no other test runs at the same time. Tests marked
`covering` run few combinations of their parameters (tests/covering.py).
"""

from __future__ import annotations

import fcntl
import gc
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.covering import covering

APART = ("tests/kernels/test_triton.py",)


@pytest.fixture(autouse=True, scope="session")
def equal_times() -> Iterator[None]:
    """All steps take the same time, so servers with drafts verify every draft: the number of steps is known."""
    budget = sys.modules.get("engine.run.budget")
    with pytest.MonkeyPatch.context() as patch:
        if budget is not None:
            from engine.step.times import Times

            patch.setattr(budget, "times_of", lambda _runtime: Times(np.ones(1), np.ones(1), np.zeros(1)))
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks cases that only `make test-full` runs; orders the rest: long single cases first, `alone` files last."""
    tests = defaultdict(list)
    for item in items:
        if item.get_closest_marker("covering") and not item.get_closest_marker("full"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        strength = cases[0].get_closest_marker("covering").args[0]
        taken = set(covering([parameters(case) for case in cases], strength))
        for number, case in enumerate(cases):
            if number not in taken:
                case.add_marker(pytest.mark.full)
    last = {item.path for item in items if item.get_closest_marker("alone")}
    items.sort(key=lambda item: (item.path in last) - (item.nodeid.partition("::")[0] in APART))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collects no garbage while imports and parameters only add objects: a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freezes the objects that imports created: a garbage collection inside a test need not walk through them."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.unfreeze()  # libraries warn about objects that they find leaked when the process ends


def parameters(case: Any) -> dict[str, str]:
    """A case's parameters: the argument of each `parametrize` mark, or a fixture's name -> the value of this case."""
    found, fixtures = {}, dict(case.callspec.params)
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        found[",".join(names)] = repr([case.callspec.params[name.strip()] for name in names])
        for name in names:
            fixtures.pop(name.strip(), None)
    return found | {name: repr(value) for name, value in fixtures.items()}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadscope: a worker gets a whole file, or a single case if the file is in APART."""
    if config.getoption("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class FileScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return nodeid if path in APART else path

    return FileScheduling(config, log)


class Turns:
    """Two lock files. Tests share `room`; an `alone` test locks it exclusively. A waiting test holds `door`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.room, self.door = (open(folder / f"{name}.lock", "w") for name in ("room", "door"))  # noqa: SIM115
        self.kept = False  # `room` stays locked: this test and the next one are marked `alone`

    def enter(self, alone: bool) -> None:
        if self.kept:
            return
        fcntl.flock(self.door, fcntl.LOCK_EX)
        fcntl.flock(self.room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(self.door, fcntl.LOCK_UN)

    def leave(self, keep: bool) -> None:
        self.kept = keep
        if not keep:
            fcntl.flock(self.room, fcntl.LOCK_UN)


TURNS = pytest.StashKey[Turns]()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.stash[TURNS] = Turns(config.rootpath / "build")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Takes the locks before the test's time is measured."""
    if (turns := item.config.stash.get(TURNS, None)) is None:
        return (yield)
    alone = item.get_closest_marker("alone") is not None
    turns.enter(alone)
    try:
        return (yield)
    finally:
        turns.leave(alone and nextitem is not None and nextitem.get_closest_marker("alone") is not None)
