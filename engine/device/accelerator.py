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
    """A second CUDA stream, for copies that run during a forward; work inside `with` is launched on it."""

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
        """Makes the compute stream, not the host, wait for the event."""
        import torch

        torch.cuda.current_stream(self._device).wait_event(event)


class Branch:
    """A second stream for a kernel that runs during later kernels of the compute stream; in a graph, a branch.

        compute  a | b ........ | join | c      with branch: d; b; join(); c
        branch       | d ... |

    Memory is allocated outside of `with`: it belongs to the compute stream. Each `with` is followed by a `join`.
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        self._side = SideStream(device)
        self._begun, self._ended = torch.cuda.Event(), torch.cuda.Event()

    def __enter__(self) -> None:
        self._begun.record()
        self._side.__enter__()
        self._side.join(self._begun)

    def __exit__(self, *error: object) -> None:
        self._ended.record()
        self._side.__exit__(*error)

    def join(self) -> None:
        """Makes the compute stream wait for the kernels of the last `with`."""
        self._side.join(self._ended)


SMALL_PINNED = 1 << 16  # bytes; more blocks are reserved up to this size, because several are in flight at a time
SMALL_BYTES, SMALL_TENSORS = 1 << 20, 8  # torch.cuda's kSmallSize; two such tensors fill a segment


class Accelerator:
    """A CUDA or HIP device as the engine uses it: a stream, pinned memory, graphs. Owner: the device thread.

    A step's first kernel reads the plan from host memory and its last kernel writes the tokens to host memory, so all
    of a step's work runs on `compute`, in order.
    """

    has_steady_loop = hasattr(os, "eventfd")  # the GIL-free loop waits for the inbox on an eventfd

    def __init__(self, device: str) -> None:
        """Binds the calling thread to the device and to the compute stream."""
        import torch

        from engine.kernels.gemm.timed import TimedProducts
        from engine.kernels.precompile import hashed

        hashed()  # during the start of the driver
        self.device = torch.device(device)
        self.products = TimedProducts()  # of a further rank: replaced by one that shares the first rank's choices
        self.compute = torch.cuda.Stream(self.device)
        self.enter()
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[Any] = []  # referenced here because a graph's memory lives as long as the graph

    def bind(self) -> None:
        """Binds the calling thread to the device."""
        import torch

        torch.cuda.set_device(self.device)

    def enter(self) -> None:
        """Binds the calling thread to the device and to the compute stream."""
        import torch

        torch.cuda.set_stream(self.compute)
        self.bind()

    def synchronize(self) -> None:
        """Waits for all work on the compute stream."""
        self.compute.synchronize()

    def follow(self, other: Accelerator) -> None:
        """Makes the compute stream, not the host, wait for what another accelerator's stream has now."""
        self.compute.wait_stream(other.compute)

    def pinned(self, count: int) -> torch.Tensor:
        """A zeroed int32 [count] in pinned host memory."""
        import torch

        return torch.zeros(count, dtype=torch.int32, pin_memory=True)

    def pinned_bytes(self, size: int) -> torch.Tensor:
        """uint8 [size] in pinned host memory, with any content. The driver reserves a power of two of bytes."""
        import torch

        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def event(self) -> torch.cuda.Event:
        """An event that fires when the work before its `record` has run; the thread that waits for it sleeps."""
        import torch

        return torch.cuda.Event(blocking=True)

    def side_stream(self) -> SideStream:
        """A new side stream."""
        return SideStream(self.device)

    def branch(self) -> Branch:
        """A new branch."""
        return Branch(self.device)

    def keep_pinned(self, largest: int) -> None:
        """Allocates pinned blocks of every size up to `largest` bytes and frees them into torch's cache for reuse.

        Later copies of special steps use these blocks: a running server allocates no pinned memory from the driver."""
        import torch

        sizes = [1 << bits for bits in range(largest.bit_length())]  # torch rounds up to a power of two
        held = [
            torch.empty(size, dtype=torch.uint8, pin_memory=True)
            for size in sizes
            for _ in range(16 if size <= SMALL_PINNED else 4)
        ]
        del held

    def keep(self, size: int) -> None:
        """Allocates `size` bytes and frees them into torch's cache, for later allocations of any size.

        Also allocates SMALL_TENSORS of the largest size that torch counts as small, because torch has separate segments
        for small tensors."""
        import torch

        torch.empty(size, dtype=torch.uint8, device=self.device)
        small = [torch.empty(SMALL_BYTES, dtype=torch.uint8, device=self.device) for _ in range(SMALL_TENSORS)]
        del small

    def capture(self, body: Callable[[], None], met: bool = False) -> int:
        """Runs `body` once, so that nothing is compiled or loaded during the capture, then records it as a graph.

        `met`: the body has run before, so recording is enough. Returns the executable graph's handle. All graphs share
        one memory pool, so graphs must run one after the other."""
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
        """`capture` for callers in Python: returns a function that replays the graph on the current stream."""
        self.capture(body, met)
        replay: Callable[[], None] = self._graphs[-1].replay
        return replay

    def launcher(self, records: torch.Tensor, turn: torch.Tensor, ring: torch.Tensor) -> Launcher:
        """A step's GIL-free calls: launches of graphs that read a line of `records` and fill a line of `ring`; waits.

        Both tensors are pinned and have the same number of lines. `turn`, on the device, is the next line's index."""
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

    def add_to(self, launcher: Launcher, turn: torch.Tensor) -> None:
        """Adds the device to a launcher as its next rank; `turn`: as in `launcher`. Binds the calling thread."""
        self.bind()
        launcher.add_rank(self.compute.cuda_stream, turn.data_ptr())

    def memory(self) -> DeviceMemory:
        """The device's memory now."""
        from engine.device.memory import device_memory

        return device_memory(self.device)

    def ledger(self) -> dict[str, int]:
        """Bytes of the device and of pinned memory (any thread)."""
        from engine.device.memory import held_bytes

        return held_bytes(self.device)

    def free_unused(self) -> None:
        """Returns torch's cached memory to the driver and waits for the device; only called after a failure."""
        import torch

        torch.cuda.empty_cache()

    def peak_of(self, work: Callable[[], None]) -> int:
        """The peak of the bytes that `work` allocates, beyond the bytes allocated now."""
        import torch

        self.compute.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        work()
        self.compute.synchronize()
        return int(torch.cuda.max_memory_allocated(self.device)) - before

    def close(self) -> None:
        """Waits for launched work, and frees the workspaces that the vendor's library holds per stream."""
        import torch

        self.compute.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
