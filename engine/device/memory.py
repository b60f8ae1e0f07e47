"""An accelerator's memory in numbers, and the message for the operator if memory does not suffice at start.

Owner: device thread, at start. In: the driver's and torch's counters. Out: DeviceMemory, plain bytes, so that sizing
(engine/cache/sizing) is pure arithmetic; one line for the operator when an allocation fails."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from engine.base.errors import ConfigError, is_out_of_memory

GIB = 1 << 30
# Phase of the start -> what to change if the phase does not fit.
REMEDIES = {
    "weights": "serve a smaller model, or free the device of other processes",
    "drafter": "name a smaller drafter in --speculative-config, or leave the flag out",
    "buffers": "lower --max-num-seqs, --max-num-queued-reqs, --max-num-batched-tokens or --max-model-len",
    "cache": "lower --gpu-memory-utilization or --kv-cache-memory-bytes",
    "profiling": "lower --max-num-batched-tokens or --max-num-seqs",
    "graphs": "give fewer --cudagraph-capture-sizes, or --enforce-eager",
    "warmup": "lower --gpu-memory-utilization or --max-num-batched-tokens",
}
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+ [KMGT]?i?B)")


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory counters at one moment, in bytes."""

    total: int
    free: int  # bytes that the driver can still allocate
    allocated: int = 0  # live tensors of this process
    reserved: int = 0  # bytes that torch allocated from the driver; at least `allocated`

    @property
    def used(self) -> int:
        """Bytes of live tensors, the driver and other processes; memory that torch only caches counts as free."""
        return self.total - self.free - (self.reserved - self.allocated)


def device_memory(device: torch.device | str | None = None) -> DeviceMemory:
    """The counters of an accelerator now; None is the current one."""
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total, free, torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device))


def held_bytes(device: torch.device) -> dict[str, int]:
    """Ledger entries: bytes of device memory and pinned host memory that torch holds; when idle, as after warm-up.

    Pinned memory is allocated at start and never freed: records, rings and decoders' buffers. Thread: any.
    """
    return {
        "device_bytes": torch.cuda.memory_allocated(device),
        "device_reserved_bytes": torch.cuda.memory_reserved(device),
        "pinned_bytes": int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)),
    }


def gib(count: int) -> str:
    """A number of bytes as text in GiB."""
    return f"{count / GIB:.2f} GiB"


@contextmanager
def enough_for(phase: str, memory: Callable[[], DeviceMemory]) -> Iterator[None]:
    """Turns an out-of-memory error in a phase of the start (a key of REMEDIES) into a ConfigError."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(out_of_memory(error, phase, memory())) from error


def out_of_memory(error: BaseException, phase: str, now: DeviceMemory) -> str:
    """The message: how much was requested, how much there is, which flag to lower."""
    found = _ASKED.search(str(error))
    asked = f"{found[1]} more were asked for" if found else "an allocation failed"
    others = now.used - now.allocated
    return (
        f"out of device memory during {phase}: {asked}, {gib(now.free)} of {gib(now.total)} are free "
        f"({gib(now.reserved)} held here, {gib(others)} by the driver and other processes); {REMEDIES[phase]}"
    )
