"""The device as the engine sees it: a stream that runs launched work in order, and events that tell how far it is.

Owner: the device thread launches and waits; the stream's own thread runs. On an accelerator (`Accelerator`) streams
belong to the driver; on a CPU it is `HostStream`, a thread that stands where the accelerator would, so that the step
loop is the same for both: launch step N+1, then wait for the event of step N.

    device thread   launch fwd N+1 | wait event N ........ | commit N, launch sample N+1 | wait ...
    stream          ... fwd N, sample N (event N) | fwd N+1 ..................... sample N+1 (event N+1)
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from _fast.launcher import Launcher
    from engine.memory import DeviceMemory


class HostEvent:
    """Fires when everything launched before it has run; `fired_at` is time.perf_counter() seconds."""

    __slots__ = ("_lock", "fired_at")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.fired_at = 0.0

    def fire(self) -> None:
        """Called once, on the stream's thread."""
        self.fired_at = time.perf_counter()
        self._lock.release()

    def wait(self, timeout: float) -> bool:
        """Blocks without the GIL until the event has fired; False after `timeout` seconds."""
        if not self._lock.acquire(timeout=timeout):
            return False
        self._lock.release()
        return True


class HostStream:
    """Runs launched calls one after the other on its own thread; the CPU's counterpart of a CUDA stream."""

    def __init__(self, name: str = "omniloop-stream") -> None:
        self._work: SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def launch(self, call: Callable[..., None], *args: Any) -> None:
        """Queues `call(*args)`; it must not raise (steps keep their own errors)."""
        self._work.put((call, args))

    def close(self, timeout: float = 10.0) -> None:
        """Runs what was launched, then ends the thread."""
        self._work.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        import torch

        with torch.inference_mode():
            while (item := self._work.get()) is not None:
                call, args = item
                call(*args)
                # Names would keep the last step's tensors alive while this thread waits.
                del item, call, args


class SideStream:
    """A stream beside the compute stream, for copies that run while a forward does: `with` launches on it."""

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

        torch.cuda.set_device(device)
        self.device = torch.device(device)
        self.algorithms = Algorithms()
        self.scaled = ScaledProducts()
        self.long = LongProducts()
        self.compute = torch.cuda.Stream(self.device)
        torch.cuda.set_stream(self.compute)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[Any] = []  # kept: a graph's memory lives as long as it does

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
        """Takes so many bytes from the driver, and leaves them to what is asked for later, in one piece or in many."""
        import torch

        torch.empty(size, dtype=torch.uint8, device=self.device)

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
        from engine.memory import device_memory

        return device_memory()

    def ledger(self) -> dict[str, int]:
        """Bytes of the device and of pinned memory (any thread)."""
        from engine.memory import held_bytes

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


def choose_device(requested: str) -> str:
    """ "cpu", or "cuda:0" for the first accelerator (torch calls ROCm's devices cuda too); "auto" prefers that one."""
    import torch

    from engine.kernels.target import HAS_TRITON

    if requested == "cpu" or (requested == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if requested not in ("auto", "cuda"):
        raise ConfigError(f"--device {requested}: must be auto, cpu or cuda")
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        cause = "it is a build for CPUs" if built is None else "is the driver there, and may this process open it?"
        raise ConfigError(f"--device cuda: torch {torch.__version__} sees no accelerator ({cause}); use --device cpu")
    if not HAS_TRITON:
        raise ConfigError(f"--device {requested}: the kernels need Triton, which is not installed; use --device cpu")
    return "cuda:0"


def usable_cores() -> int:
    """Cores this process may run on (its affinity mask, which container limits usually set)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory() -> int:
    """Bytes of host memory that can be taken without swapping: MemAvailable, within the cgroup's limit."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    free = int(line.split()[1]) * 1024
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            text = limit.read().strip()
            if text != "max":
                free = min(free, int(text) - int(used.read()))
    except OSError:
        pass
    return max(free, 0)
