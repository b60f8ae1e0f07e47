"""Faults: failures on purpose, for tests of what a failure reaches and how long it takes to recover (R21 to R24).

Owner: made with the configuration where --debug-faults is given, else never armed; any thread asks, faults are armed on
the loop. In: a fault for a point, from POST /debug/faults. Out: at that point an error, a pause or a spoilt row, as
often as was asked for. Points of a step, in their order; a fault with a `token` meets only steps that have a row of a
prompt that begins with that token:

    device thread, stream   inputs - forward - sampling        inputs: nothing is computed yet
    device thread           home - commit                      home: tokens arrive; commit: before they count
    loop, pool              handler - decoder - disk - memory
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from engine.base.errors import InvalidLogitsError

log = logging.getLogger("omniloop.planted")

STEP = ("inputs", "forward", "sampling", "home", "commit")
KINDS = {
    **dict.fromkeys(STEP, ("raise", "oom", "lost", "hang", "slow", "nan")),
    "handler": ("raise", "slow"),
    "decoder": ("raise", "hang", "crash"),  # crash: of processes that decode (--media-isolation)
    "disk": ("full", "slow"),
    "memory": ("held",),
}
FOREVER_S = 3600.0
TEXTS = {  # in the words of the runtimes, which engine/base/errors reads
    "raise": "planted at {point}",
    "oom": "CUDA out of memory: planted at {point}",
    "lost": "CUDA error: an illegal memory access was encountered: planted at {point}",
}


class PlantedError(RuntimeError):
    """A failure that was asked for."""


@dataclass(slots=True)
class Fault:
    """One that is armed."""

    point: str
    kind: str
    count: int = 1  # how often it is still to happen
    seconds: float = FOREVER_S  # of hang and slow
    token: int = -1  # the first one of a prompt; -1: any step
    size: int = 0  # bytes: of memory that counts as held
    slots: set[int] = field(default_factory=set)  # of rows whose prompts begin with the token


class Faults:
    """What is armed, and what has happened."""

    def __init__(self) -> None:
        self.armed: list[Fault] = []
        self.happened: Counter[str] = Counter()  # by "point kind"
        self._over = threading.Event()  # set by `clear`: what hangs goes on
        self._lock = threading.Lock()

    def arm(self, fault: Fault) -> None:
        """Raises ValueError for a point or a kind that is none."""
        kinds = KINDS.get(fault.point, ())
        if fault.kind not in kinds:
            known = ", ".join(kinds) if kinds else f"a point is one of {', '.join(KINDS)}"
            raise ValueError(f"{fault.kind!r} at {fault.point!r}: {known}")
        with self._lock:
            self._over.clear()
            self.armed.append(fault)

    def clear(self) -> None:
        """Nothing is armed any more; what hangs goes on."""
        with self._lock:
            self.armed = []
            self._over.set()

    def at(self, point: str, step: Any = None) -> None:
        """A thread has come to a point; `step`: of the engine (engine/step/step), where the point is one of a step."""
        if not self.armed:
            return
        if step is not None and point == STEP[0]:
            for fault in self.armed:
                _find_rows(fault, step)
        taken = self._taken(point, step)
        if taken is not None:
            self._happen(taken, point, step)

    def _happen(self, fault: Fault, point: str, step: Any) -> None:
        log.warning("fault: %s at %s", fault.kind, point)
        if fault.kind in ("hang", "slow"):
            self._over.wait(fault.seconds)
        elif fault.kind == "nan":
            _spoil(fault, step)
        elif fault.kind == "full":
            raise OSError(errno.ENOSPC, "planted: no space left on device")
        elif fault.kind in TEXTS:
            raise PlantedError(TEXTS[fault.kind].format(point=point))

    def takes(self, point: str, kind: str) -> bool:
        """Whether a fault of this kind happens now, which the caller brings about."""
        fault = self._taken(point, None, kind)
        if fault is not None:
            log.warning("fault: %s at %s", kind, point)
        return fault is not None

    def held(self) -> int:
        """Bytes of memory that count as held in addition to the real ones."""
        return sum(fault.size for fault in self.armed if fault.point == "memory")

    def _taken(self, point: str, step: Any, kind: str = "") -> Fault | None:
        with self._lock:
            for fault in self.armed:
                if fault.point != point or (kind and fault.kind != kind) or (not kind and fault.kind == "crash"):
                    continue
                if not _meets(fault, step):
                    continue
                fault.count -= 1
                self.happened[f"{point} {fault.kind}"] += 1
                if fault.count <= 0:
                    self.armed = [other for other in self.armed if other is not fault]
                return fault
        return None


def _meets(fault: Fault, step: Any) -> bool:
    """Whether a step has a row for the fault. Logits to spoil exist only in rows that sample: a chunk may not."""
    if fault.token < 0 and fault.kind != "nan":
        return True
    if step is None:
        return False
    slots = set((step.sampled_slots if fault.kind == "nan" else step.rows.slots).tolist())
    return bool(slots if fault.token < 0 else slots & fault.slots)


def _find_rows(fault: Fault, step: Any) -> None:
    """Notes slots whose prompts begin in this step with the fault's token; others' are forgotten."""
    plan = step.plan
    for row in range(plan.num_rows):
        if plan.row_computed[row] == 0:
            slot = int(plan.row_slot[row])
            fault.slots.discard(slot)
            if int(plan.token_ids[plan.row_start[row]]) == fault.token:
                fault.slots.add(slot)


def _spoil(fault: Fault, step: Any) -> None:
    """One sampled row of the step gets what is no number: its logits, where the host has them, else what comes home."""
    sampled = step.sampled_slots.tolist()
    places = [place for place, slot in enumerate(sampled) if fault.token < 0 or slot in fault.slots]
    if not places:
        return
    logits = step.notes.get("logits")
    if logits is not None:
        logits[places[0]] = float("nan")
        return
    row = int(step.rows.sampled[places[0]])
    step.home.invalid.setdefault(row, InvalidLogitsError())
    step.home.drop(row)
