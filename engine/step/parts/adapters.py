"""The adapters part: rows whose requests chose an adapter by name (LoRA).

Owner: device thread. A row holds the place of its adapter (engine/lora/places.py) from its admission until its slot is
reset. The place's number is one of the slot's words; every layer with places reads the number of each token. A request
whose adapter has no place waits at the gate, outside the scheduler. Steps without a row with an adapter are plain: on
an accelerator they replay the graphs of the base model, other steps replay a variant.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import numpy as np

from _fast.scheduler import Scheduler
from _fast.steady import SPECIAL_VARIANT_SHIFT
from engine.base.config import EngineConfig
from engine.base.request import Request
from engine.base.stats import AdapterCounts
from engine.device.memory import gib
from engine.lora.adapter import Adapter
from engine.lora.device import device_memory_of, place_bytes
from engine.lora.host import HostMemory
from engine.lora.places import Places
from engine.lora.sites import DeviceSites, HostSites
from engine.models.base.model import Model
from engine.step.live import LiveRow, Place
from engine.step.parts.part import ABSENT, JOINS, Claim, StepPart, Steps
from engine.step.sizes import Sizes
from engine.step.step import Step

log = logging.getLogger("omniloop.engine")


class Adapters(StepPart):
    """The rows that hold places of adapters."""

    name = "adapters"
    ranks = "every"

    def __init__(self, config: EngineConfig, model: Model, paths: Collection[str], sizes: Sizes) -> None:
        """`paths`: of the layers that have places."""
        assert config.lora is not None, "the engine has adapters by name"
        self.config, self.paths = config.lora, paths
        self._own = len(model.adapters)  # adapters that are part of the checkpoint have the numbers before the places
        self._number = np.zeros(sizes.max_slots, np.int32)  # by slot: the place that the row holds; 0: none
        self.places: Places

    def gate(self, request: Request) -> bool:
        return request.lora is None or self.places.opens(adapter_of(request), request.arrival)

    def place(self, request: Request, place: Place, scheduler: Scheduler) -> None:
        if request.lora is not None:
            place.adapter = self._own + self.places.number(adapter_of(request))

    def admit(self, slot: int, row: LiveRow, words: np.ndarray) -> bool:
        if row.request.lora is None:
            return False
        self._number[slot] = row.place.adapter - self._own
        self.places.hold(int(self._number[slot]))
        return True

    def reset(self, slot: int, poison: bool) -> None:
        if self._number[slot]:
            self.places.release(int(self._number[slot]))
            self._number[slot] = 0

    def special(self, slot: int) -> int:
        return self.variant << SPECIAL_VARIANT_SHIFT

    def role(self, step: Step) -> int:
        return JOINS if self._number[step.rows.slots].any() else ABSENT

    @property
    def counts(self) -> AdapterCounts:
        """The places' counts; any thread may read them."""
        return AdapterCounts(self.places.num_used, self.places.swaps, self.places.swap_seconds)

    def ledger(self) -> dict[str, int]:
        return {"adapter_rows": self.places.num_rows}


class HostAdapters(Adapters):
    """The part on a CPU."""

    def __init__(self, config: EngineConfig, model: Model, sites: HostSites, sizes: Sizes) -> None:
        super().__init__(config, model, sites.keys(), sizes)
        self._sites = sites

    def start(self, steps: Steps) -> None:
        self.places = Places(self.config.max_loras, HostMemory(self._sites), steps.wake)


class DeviceAdapters(Adapters):
    """The part on an accelerator, whose graphs have a variant for steps with adapters."""

    changes_forward = True

    def __init__(self, config: EngineConfig, model: Model, sites: DeviceSites, sizes: Sizes) -> None:
        super().__init__(config, model, sites.keys(), sizes)
        self._sites, self._dtype = sites, model.dtype

    def claim(self) -> Claim:
        """The places, and a variant of the graphs."""
        each = place_bytes(self._sites, self.config.max_rank, self._dtype)
        return Claim(weight_bytes=each * self.config.max_loras, variants=1)

    def start(self, steps: Steps) -> None:
        accelerator, count = steps.backend.rank.accelerator, self.config.max_loras
        assert accelerator is not None, "an accelerator's places"
        rooms = max(1, self.config.max_cpu_loras or count)
        memory = device_memory_of(self._sites, accelerator, count, self.config.max_rank, self._dtype, rooms)
        self.places, self._rooms = Places(count, memory, steps.wake), memory.rooms
        each = gib(place_bytes(self._sites, self.config.max_rank, self._dtype))
        log.info("start: adapters: %d places (--max-loras) of %s for ranks to %d", count, each, self.config.max_rank)

    def warm_up(self, walk: bool) -> None:
        if not walk:  # before graphs are recorded: products are timed only at a start whose walk takes longer
            self._rooms.all()


def adapter_of(request: Request) -> Adapter:
    """The adapter of a request that chose one."""
    assert isinstance(request.lora, Adapter), "the host home gives requests their adapters"
    return request.lora
