"""The CPU as the engine sees it: a stream that runs launched work in order, events, and the cores that it may use.

Owner: the device thread launches and waits; the stream's own thread runs the work. `HostStream` takes the place of an
accelerator's stream, so that the step loop is the same for both: launch step N+1, then wait for the event of step N.

    device thread   launch fwd N+1 | wait event N ........ | commit N, launch sample N+1 | wait ...
    stream          ... fwd N, sample N (event N) | fwd N+1 ..................... sample N+1 (event N+1)
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from engine.base.errors import ConfigError

LEAST_CAPABILITY = (8, 0)  # lowest supported compute capability of NVIDIA cards


class HostStream:
    """Runs launched calls one after the other on its own thread; the CPU's counterpart of a CUDA stream."""

    def __init__(self, name: str = "omniloop-stream") -> None:
        self._work: SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def launch(self, call: Callable[..., None], *args: Any) -> None:
        """Queues `call(*args)`; the call must not raise (steps store their errors)."""
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
                # The variables would keep the last step's tensors alive while this thread waits.
                del item, call, args


def choose_device(requested: str) -> str:
    """ "cpu", or "cuda:0" for the first accelerator (torch also calls ROCm devices cuda); "auto" prefers cuda:0."""
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
    if torch.version.hip is None:
        _check_capability(requested, torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0))
    return "cuda:0"


def _check_capability(requested: str, card: str, capability: tuple[int, int]) -> None:
    """Refuses an NVIDIA card without bfloat16 units, because every kernel multiplies in bfloat16."""
    if capability < LEAST_CAPABILITY:
        raise ConfigError(
            f"--device {requested}: {card} has compute capability {capability[0]}.{capability[1]} and no bfloat16 "
            "units; cards of 8.0 and above have them (A100, A10, L4, H100, B200, RTX 3060 to 5090): use one of these, "
            "or --device cpu; see /docs/hardware"
        )


def usable_cores() -> int:
    """Cores this process may run on (its affinity mask, which container limits usually set)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
