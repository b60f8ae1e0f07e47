"""A CUDA or HIP device as the engine uses it: a compute stream, side streams, pinned memory, graphs, launchers.

Owner: the device thread launches and waits. The CPU's counterpart of the stream is engine/device/host.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from _fast.launcher import Launcher
    from engine.device.memory import DeviceMemory


class SideStream:
    """A second CUDA stream, for copies that run while a forward does: `with` launches on it."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._stream = torch.cuda.Stream(device)
        self._device = device
        self._entered: Any = None

    def __enter__(self) -> None:
        import torch

        self._entered = torch.cuda.stream(self._stream)
        self._entered.__enter__()

    def __exit__(self, *error: object) -> None:
        self._entered.__exit__(None, None, None)

    def join(self, event: torch.cuda.Event) -> None:
        """The compute stream goes on when the event has fired; the host does not wait."""
        import torch

        torch.cuda.current_stream(self._device).wait_event(event)


SMALL_PINNED = 1 << 16  # bytes; of smaller blocks several are in flight at a time
SMALL_BYTES, SMALL_TENSORS = 1 << 20, 8  # torch.cuda's kSmallSize; two of them fill a segment


class Accelerator:
    """A CUDA or HIP device as the engine uses it: a stream, pinned memory, graphs. Owner: the device thread.

    A step's first kernel reads its plan in the host's memory and its last one writes the tokens there, so everything
    of it runs on `compute` in order.
    """

    has_steady_loop = hasattr(os, "eventfd")  # the GIL-free loop waits for the inbox on one

    def __init__(self, device: str) -> None:
        """Binds the calling thread to the device and to the compute stream."""
        import torch

        from engine.kernels.gemm.algorithms import Algorithms
        from engine.kernels.gemm.long_products import LongProducts
        from engine.kernels.gemm.scaled import ScaledProducts

        self.device = torch.device(device)
        self.bind()
        self.algorithms = Algorithms()
        self.scaled = ScaledProducts()
        self.long = LongProducts()
        self.compute = torch.cuda.Stream(self.device)
        torch.cuda.set_stream(self.compute)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[Any] = []  # referenced here because a graph's memory lives as long as the graph

    def bind(self) -> None:
        """Binds the calling thread to the device."""
        import torch

        torch.cuda.set_device(self.device)

    def pinned(self, count: int) -> torch.Tensor:
        """Zeros int32 [count] on the host, in pages that the device copies from directly."""
        import torch

        return torch.zeros(count, dtype=torch.int32, pin_memory=True)

    def event(self) -> torch.cuda.Event:
        """Fires when what the current stream held at its `record` has run; waiting for it lets the core go."""
        import torch

        return torch.cuda.Event(blocking=True)

    def side_stream(self) -> SideStream:
        """A stream of its own."""
        return SideStream(self.device)

    def keep_pinned(self, largest: int) -> None:
        """Takes pinned blocks of every size up to `largest` bytes from the driver, and leaves them for reuse.

        What special steps send later finds its room here, so a running server asks the driver for none.
        """
        import torch

        sizes = [1 << bits for bits in range(largest.bit_length())]  # torch rounds up to a power of two
        held = [
            torch.empty(size, dtype=torch.uint8, pin_memory=True)
            for size in sizes
            for _ in range(16 if size <= SMALL_PINNED else 4)
        ]
        del held

    def keep(self, size: int) -> None:
        """Takes so many bytes from the driver, and leaves them to what is asked for later, in one piece or in many.

        And SMALL_TENSORS of the largest size that torch counts as small: small ones come from segments of their own.
        """
        import torch

        torch.empty(size, dtype=torch.uint8, device=self.device)
        small = [torch.empty(SMALL_BYTES, dtype=torch.uint8, device=self.device) for _ in range(SMALL_TENSORS)]
        del small

    def capture(self, body: Callable[[], None], met: bool = False) -> int:
        """Runs `body` once as it is (so that nothing in it is met for the first time), then records it as a graph.

        `met`: all of it has run before, so recording is enough. Returns the executable graph's handle. All graphs share
        one memory pool, so they must run one after the other.
        """
        import torch

        if not met:
            body()
            self.compute.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            body()
        finally:
            graph.capture_end()
        self._graphs.append(graph)
        return int(graph.raw_cuda_graph_exec())

    def recorded(self, body: Callable[[], None], met: bool = False) -> Callable[[], None]:
        """`capture` for those who launch from Python: returns what replays the graph on the current stream."""
        self.capture(body, met)
        replay: Callable[[], None] = self._graphs[-1].replay
        return replay

    def launcher(self, records: torch.Tensor, turn: torch.Tensor, ring: torch.Tensor) -> Launcher:
        """A step's GIL-free calls: graphs that read a line of `records` and fill one of `ring`, and when it is filled.

        Both are pinned and have as many lines; `turn`, on the device, is the one that comes next.
        """
        from _fast.launcher import Launcher
        from engine.kernels.target import runtime_calls

        return Launcher(
            runtime_calls(),
            self.compute.cuda_stream,
            [record.data_ptr() for record in records],
            turn.data_ptr(),
            [line.data_ptr() for line in ring],
            ring.shape[1],
        )

    def memory(self) -> DeviceMemory:
        """The device's memory now."""
        from engine.device.memory import device_memory

        return device_memory()

    def ledger(self) -> dict[str, int]:
        """Bytes of the device and of pinned memory (any thread)."""
        from engine.device.memory import held_bytes

        return held_bytes(self.device)

    def free_unused(self) -> None:
        """Gives back to the driver what torch keeps for reuse, and waits for the device: never while all goes well."""
        import torch

        torch.cuda.empty_cache()

    def peak_of(self, work: Callable[[], None]) -> int:
        """Bytes that `work` holds at its worst, beyond what is held now."""
        import torch

        self.compute.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        work()
        self.compute.synchronize()
        return int(torch.cuda.max_memory_allocated(self.device)) - before

    def close(self) -> None:
        """Waits for what was launched, and gives back what the vendor's library keeps per stream."""
        import torch

        self.compute.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
