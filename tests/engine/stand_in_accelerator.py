"""The device path on a CPU with the real launcher and the GIL-free loop: a stand-in runtime calls graphs as functions.

The stand-in (tests/fast/oracles/runtime.c) takes the launcher's calls as CUDA's runtime would. A launched graph calls
back into Python, which runs the graph's body on CPU tensors. Executor, launcher, steady loop, ring and inbox are the
real ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from _fast.launcher import Launcher
from engine.device.host import HostStream
from tests.engine.host_accelerator import HostAccelerator, together
from tests.fast.oracles.runtime import BODIES, addresses, library


class StandInAccelerator(HostAccelerator):
    """Replaces engine.device.accelerator.Accelerator."""

    has_steady_loop = True

    def __init__(self, first: StandInAccelerator | None = None) -> None:
        """`first`: rank 0's; None: this is rank 0."""
        super().__init__()
        self.errors: list[BaseException] = []  # errors of graph bodies: C cannot propagate them
        self._first, self.streams = first or self, list[HostStream]()  # of the ranks from rank 1 on
        self._ahead: list[Callable[[], None]] = []  # graphs launched on the ranks before the last
        if first is None:
            self.of: list[tuple[int, Callable[[], None]]] = []  # by handle: rank, body
            self._run = BODIES(self._run_graph)  # the runtime stores only its address
            library().set_bodies(self._run)
        else:
            first.streams.append(HostStream("stand-in"))
        self.number = len(self._first.streams)

    def capture(self, body: Callable[[], None], met: bool = False) -> int:
        super().capture(body, met)
        self._first.of.append((self.number, body))
        return len(self._first.of)  # a handle is not null

    def add_to(self, launcher: Launcher, turn: torch.Tensor) -> None:  # type: ignore[override]
        launcher.add_rank(1 + self.number, turn.data_ptr())

    def _run_graph(self, handle: int) -> None:
        rank, body = self.of[handle - 1]
        try:
            if rank == 0 and self._ahead:
                raise AssertionError(f"rank 0's next graph before {len(self.streams)} other ranks' graphs")
            self._ahead.append(body)
            if rank == len(self.streams):  # the last rank's launch: all run at once
                bodies, self._ahead = self._ahead, []
                together(bodies, self.streams)
        except BaseException as error:
            self.errors.append(error)

    def launcher(self, records: torch.Tensor, turn: torch.Tensor, ring: torch.Tensor) -> Launcher:  # type: ignore[override]
        lines, places = ([line.data_ptr() for line in tensor] for tensor in (ring, records))
        return Launcher(addresses(), 1, places, turn.data_ptr(), lines, ring.shape[1])
