"""The device path on a CPU with the real launcher and the GIL-free loop: a stand-in runtime calls graphs as functions.

The stand-in (tests/fast/oracles/runtime.c) takes the launcher's calls as CUDA's runtime would. A launched graph calls
back into Python, which runs the graph's body on CPU tensors. Executor, launcher, steady loop, ring and inbox are the
real ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from _fast.launcher import Launcher
from tests.engine.host_accelerator import HostAccelerator
from tests.fast.oracles.runtime import BODIES, addresses, library


class StandInAccelerator(HostAccelerator):
    """Replaces engine.device.accelerator.Accelerator."""

    has_steady_loop = True

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[BaseException] = []  # errors of graph bodies: C cannot propagate them
        self._run = BODIES(self._run_graph)  # the runtime stores only its address
        library().set_bodies(self._run)

    def capture(self, body: Callable[[], None], met: bool = False) -> int:
        return super().capture(body, met) + 1  # a handle is not null

    def _run_graph(self, handle: int) -> None:
        try:
            self._graphs[handle - 1]()
        except BaseException as error:
            self.errors.append(error)

    def launcher(self, records: torch.Tensor, turn: torch.Tensor, ring: torch.Tensor) -> Launcher:  # type: ignore[override]
        lines, places = ([line.data_ptr() for line in tensor] for tensor in (ring, records))
        return Launcher(addresses(), 1, places, turn.data_ptr(), lines, ring.shape[1])
