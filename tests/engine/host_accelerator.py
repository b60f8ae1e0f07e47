"""The device path on a CPU: an Accelerator whose streams are the calling thread, and whose graphs are plain calls.

Everything above it is the real thing: plans in records, prep, padded steps, the device's sampler, records taken in
turns by the launcher's rules. Kernels fall back to their references. What a driver would do asynchronously happens at
once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from _fast.plan import StepPlan
from engine.kernels.gemm.algorithms import Algorithms
from engine.memory import DeviceMemory


class HostLauncher:
    """The calls of _fast.launcher.Launcher, in the calling thread."""

    def __init__(self, graphs: list[Callable[[], None]], records: torch.Tensor, turn: torch.Tensor) -> None:
        self._graphs, self._records, self._turn = graphs, records, turn
        self.gap_s = 0.0  # no clock of the device's is asked
        self._prep = -1
        self._forward: dict[tuple[int, int], int] = {}
        self._sample: dict[int, int] = {}
        self._step: dict[int, int] = {}
        self.counts = {"prep": 0, "forward": 0, "sample": 0, "step": 0, "finish": 0, "wait": 0}

    def set_prep(self, graph: int) -> None:
        self._prep = graph

    def set_forward(self, kind: int, size: int, graph: int) -> None:
        self._forward[kind, size] = graph

    def set_sample(self, size: int, graph: int) -> None:
        self._sample[size] = graph

    def set_step(self, size: int, graph: int) -> None:
        self._step[size] = graph

    def pick(self, kind: int, count: int) -> int:
        size = min((size for of, size in self._forward if of == kind and size >= count), default=0)
        return 0 if kind == 1 and count > 64 and size > 1.25 * count else size

    def pick_sample(self, count: int) -> int:
        return min((size for size in self._sample if size >= count), default=0)

    def _take(self, plan: StepPlan, record: int) -> None:
        assert plan.number == record
        assert np.asarray(plan.record).ctypes.data == self._records[record].data_ptr()
        self._records[record][plan.used_len :] = -7  # what does not count must not be read
        self._turn.fill_(record)

    def claim(self, record: int) -> None:
        pass  # everything launched has run

    def launch(self, plan: StepPlan, record: int, kind: int, size: int, sample_size: int) -> None:
        if kind == 0 and plan.num_sampled == plan.num_rows:
            self.counts["step"] += 1
            self._take(plan, record)
            self._graphs[self._step[size]]()
        else:
            self.prep(plan, record)
            self.forward(kind, size)
            if sample_size:
                self.sample(sample_size)
        self.finish()

    def prep(self, plan: StepPlan, record: int) -> None:
        self.counts["prep"] += 1
        self._take(plan, record)
        self._graphs[self._prep]()

    def forward(self, kind: int, size: int) -> None:
        self.counts["forward"] += 1
        self._graphs[self._forward[kind, size]]()

    def sample(self, size: int) -> None:
        self.counts["sample"] += 1
        self._graphs[self._sample[size]]()

    def finish(self) -> None:
        self.counts["finish"] += 1

    def wait(self, record: int, timeout: float) -> bool:
        self.counts["wait"] += 1
        return True


class HostMark:
    """An event: what was asked for before it has run."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class HostAccelerator:
    """Stands where engine.device.Accelerator would."""

    has_steady_loop = False  # it calls the driver

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.algorithms = Algorithms()
        self._graphs: list[Callable[[], None]] = []
        self.freed = 0  # times that unused memory was given back

    def pinned(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32)

    def event(self) -> HostMark:
        return HostMark()

    def keep_pinned(self, largest: int) -> None:
        pass  # nothing is pinned here

    def keep(self, size: int) -> None:
        pass  # torch asks the host each time

    def capture(self, body: Callable[[], None], met: bool = False) -> int:
        if not met:
            body()
        self._graphs.append(body)
        return len(self._graphs) - 1

    def recorded(self, body: Callable[[], None], met: bool = False) -> Callable[[], None]:
        self.capture(body, met)
        return body

    def launcher(self, records: torch.Tensor, turn: torch.Tensor, ring: torch.Tensor) -> HostLauncher:
        assert len(ring) == len(records)
        return HostLauncher(self._graphs, records, turn)

    def ledger(self) -> dict[str, int]:
        return {}

    def free_unused(self) -> None:
        self.freed += 1

    def peak_of(self, work: Callable[[], None]) -> int:
        work()
        return 1 << 20

    def memory(self) -> DeviceMemory:
        return DeviceMemory(total=1 << 40, free=1 << 40)

    def close(self) -> None:
        pass
