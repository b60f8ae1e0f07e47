"""The device path on a CPU: an Accelerator whose streams are the calling thread, and whose graphs are plain calls.

All code above the Accelerator is real: plans in records, prep, padded steps, the device's sampler, and records used
alternately by the launcher's rules. Kernels fall back to their references. Asynchronous work of a driver runs at once.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import torch

from _fast.layout import STATE_COLUMNS, GraphKind, states_at
from _fast.plan import StepPlan
from engine.device.host import HostStream
from engine.device.memory import DeviceMemory
from engine.kernels.gemm.timed import TimedProducts


class HostLauncher:
    """The methods of _fast.launcher.Launcher, run in the calling thread."""

    def __init__(self, graphs: list[Callable[[], None]], records: torch.Tensor, turn: torch.Tensor) -> None:
        self._graphs, self._records, self._turn = graphs, records, turn
        self._others: list[tuple[list[Callable[[], None]], torch.Tensor, HostStream]] = []  # ranks from rank 1 on
        self.gap_s = 0.0  # gaps are not measured
        self._by_kind: dict[int, dict[tuple[int, int], tuple[int, ...]]] = {kind: {} for kind in GraphKind}
        self.counts = {"prep": 0, "forward": 0, "sample": 0, "step": 0, "finish": 0, "wait": 0, "pass": 0}

    def add_rank(self, graphs: list[Callable[[], None]], turn: torch.Tensor) -> None:
        self._others.append((graphs, turn, HostStream("stand-in")))

    def watch(self, error: int) -> None:
        pass  # ranks on a host raise

    def set_graph(self, kind: int, variant: int, size: int, *graphs: int) -> None:
        assert len(graphs) == 1 + len(self._others)
        self._by_kind[kind][variant, size] = graphs

    def _graph(self, kind: int, size: int, variant: int) -> tuple[int, ...] | None:
        """The graph of those bits of the variant that occur in graphs of this kind."""
        occurring = 0
        for kinds in (kind, *((GraphKind.DECODE, GraphKind.SAMPLE) if kind == GraphKind.STEP else ())):
            for bits, _ in self._by_kind[kinds]:
                occurring |= bits
        return self._by_kind[kind].get((variant & occurring, size))

    def pick(self, kind: int, count: int, variant: int = 0) -> int:
        sizes = {size for _, size in self._by_kind[kind] if self._graph(kind, size, variant) is not None}
        size = min((size for size in sizes if size >= count), default=0)
        return 0 if kind == GraphKind.MIXED and count > 64 and size > 1.25 * count else size

    def _take(self, plan: StepPlan, record: int) -> None:
        assert plan.number == record
        assert np.asarray(plan.record).ctypes.data == self._records[record].data_ptr()
        sizes = plan.max_rows, plan.max_tokens, plan.max_updates
        states = self._records[record][states_at(*sizes) :][: STATE_COLUMNS * plan.max_rows]
        states = states.view(-1, plan.max_rows) if plan.run_width else states[:0].view(STATE_COLUMNS, 0)
        self._records[record][plan.used_len : states_at(*sizes)] = -7  # the step must not read beyond the used length
        states[:, plan.num_rows :] = -7
        self._turn.fill_(record)
        for _, turn, _ in self._others:
            turn.fill_(record)

    def wait_until_read(self, record: int) -> None:
        pass  # all launched work has run

    def launch(self, plan: StepPlan, record: int, kind: int, size: int, sample_size: int, variant: int = 0) -> None:
        whole = kind == GraphKind.DECODE and plan.num_sampled == plan.num_rows
        if whole and self._graph(GraphKind.STEP, size, variant) is not None:
            self.counts["step"] += 1
            self._take(plan, record)
            self._run(GraphKind.STEP, size, variant)
        else:
            self.prep(plan, record)
            self.replay(kind, size, variant)
            if sample_size:
                self.replay(GraphKind.SAMPLE, sample_size, variant)
        self.finish()

    def prep(self, plan: StepPlan, record: int) -> None:
        self.counts["prep"] += 1
        self._take(plan, record)
        self._run(GraphKind.PREP, 1, 0)
        size = self.pick(GraphKind.DRAFT, plan.num_drafted)
        for number in range(plan.depth if size else 0):
            kind = GraphKind.FURTHER if number else GraphKind.DRAFT
            if self._graph(kind, size, 0) is not None:
                self.counts["pass"] += 1
                self._run(kind, size, 0)

    def replay(self, kind: int, size: int, variant: int = 0) -> None:
        self.counts["sample" if kind == GraphKind.SAMPLE else "forward"] += 1
        self._run(kind, size, variant)

    def _run(self, kind: int, size: int, variant: int) -> None:
        graph = self._graph(kind, size, variant)
        assert graph is not None
        together([self._graphs[graph[0]], *(own[n] for (own, _, _), n in zip(self._others, graph[1:]))], self.streams)

    @property
    def streams(self) -> list[HostStream]:
        """The streams of the ranks from rank 1 on."""
        return [stream for *_, stream in self._others]

    def finish(self) -> None:
        self.counts["finish"] += 1

    def wait(self, record: int, timeout: float) -> bool:
        self.counts["wait"] += 1
        return True


def together(bodies: list[Callable[[], None]], streams: list[HostStream]) -> None:
    """Runs the ranks' graphs at once, the first in the calling thread, and waits for all."""
    done: list[Future[None]] = [Future() for _ in streams]

    def run(body: Callable[[], None], into: Future[None]) -> None:
        try:
            into.set_result(body())
        except BaseException as error:
            into.set_exception(error)

    for stream, body, into in zip(streams, bodies[1:], done):
        stream.launch(run, body, into)
    bodies[0]()
    for into in done:
        into.result()


class HostMark:
    """An event: all earlier work has already run."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class HostSide:
    """A side stream: all launched work has already run."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def join(self, event: HostMark) -> None:
        pass


class HostBranch:
    """A branch that the calling thread runs at once."""

    def __init__(self) -> None:
        self.open = False
        self.count = 0

    def __enter__(self) -> None:
        assert not self.open, "the kernels before have not been joined"
        self.open = True
        self.count += 1

    def __exit__(self, *error: object) -> None:
        pass

    def join(self) -> None:
        assert self.open, "nothing was launched"
        self.open = False


class HostAccelerator:
    """Replaces engine.device.accelerator.Accelerator."""

    has_steady_loop = False  # the steady loop calls the driver

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.products = TimedProducts()
        self._graphs: list[Callable[[], None]] = []
        self.freed = 0  # number of calls to return unused memory

    def bind(self) -> None:
        pass  # every thread runs on the host

    def enter(self) -> None:
        pass

    def synchronize(self) -> None:
        pass  # all launched work has run

    def follow(self, other: HostAccelerator) -> None:
        pass  # streams are the calling thread

    def add_to(self, launcher: HostLauncher, turn: torch.Tensor) -> None:
        launcher.add_rank(self._graphs, turn)

    def pinned(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32)

    def pinned_bytes(self, size: int) -> torch.Tensor:
        return torch.full((size,), 0xFF, dtype=torch.uint8)  # NaN in all floats: nothing may read what is not written

    def event(self) -> HostMark:
        return HostMark()

    def side_stream(self) -> HostSide:
        return HostSide()

    def branch(self) -> HostBranch:
        return HostBranch()

    def keep_pinned(self, largest: int) -> None:
        pass  # no memory is pinned here

    def keep(self, size: int) -> None:
        pass  # torch requests memory from the host each time

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
