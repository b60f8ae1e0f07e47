"""Faults: planted failures, for tests of how far a failure reaches and how long recovery takes (R21 to R24).

Owner: made with the configuration if --debug-faults is given. The loop arms faults, any thread checks for them. In: a
fault for a point, from POST /debug/faults. Out: an error, a pause or a spoilt row at that point, as often as requested.
A fault with a `token` affects only steps with a row whose prompt begins with that token. Points of a step, in order:

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
TEXTS = {  # error texts as the runtimes word them; engine/base/errors recognises these
    "raise": "planted at {point}",
    "oom": "CUDA out of memory: planted at {point}",
    "lost": "CUDA error: an illegal memory access was encountered: planted at {point}",
}


class PlantedError(RuntimeError):
    """A planted failure."""


@dataclass(slots=True)
class Fault:
    """An armed fault."""

    point: str
    kind: str
    count: int = 1  # how many more times the fault happens
    seconds: float = FOREVER_S  # duration of hang and slow
    token: int = -1  # the first token of the affected prompts; -1: any step
    size: int = 0  # bytes of memory that count as held
    slots: set[int] = field(default_factory=set)  # slots of rows whose prompts begin with the token


class Faults:
    """The armed faults, and a count of those that have happened."""

    def __init__(self) -> None:
        self.armed: list[Fault] = []
        self.happened: Counter[str] = Counter()  # by "point kind"
        self._over = threading.Event()  # set by `clear`: hanging threads continue
        self._lock = threading.Lock()

    def arm(self, fault: Fault) -> None:
        """Arms a fault. Raises ValueError for an unknown point or kind."""
        kinds = KINDS.get(fault.point, ())
        if fault.kind not in kinds:
            known = ", ".join(kinds) if kinds else f"a point is one of {', '.join(KINDS)}"
            raise ValueError(f"{fault.kind!r} at {fault.point!r}: {known}")
        with self._lock:
            self._over.clear()
            self.armed.append(fault)

    def clear(self) -> None:
        """Disarms all faults and releases threads that hang."""
        with self._lock:
            self.armed = []
            self._over.set()

    def at(self, point: str, step: Any = None) -> None:
        """A thread has reached a point; `step`: the engine's step (engine/step/step), at points of a step."""
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
        """Whether the caller must now fail in the way of `kind`; counts the fault as happened."""
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
    """Whether a step has a row for the fault. Only rows that sample have logits to spoil; a prefill chunk may not."""
    if fault.token < 0 and fault.kind != "nan":
        return True
    if step is None:
        return False
    slots = set((step.sampled_slots if fault.kind == "nan" else step.rows.slots).tolist())
    return bool(slots if fault.token < 0 else slots & fault.slots)


def _find_rows(fault: Fault, step: Any) -> None:
    """Adds slots whose prompts begin in this step with the fault's token, and removes the slots of other prompts."""
    plan = step.plan
    for row in range(plan.num_rows):
        if plan.row_computed[row] == 0:
            slot = int(plan.row_slot[row])
            fault.slots.discard(slot)
            if int(plan.token_ids[plan.row_start[row]]) == fault.token:
                fault.slots.add(slot)


def _spoil(fault: Fault, step: Any) -> None:
    """Writes NaN to the logits of a sampled row if the host has them, else spoils the row's result from the device."""
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
