"""DeviceProfile: an accelerator's kernels and copies between start and stop, as torch's profiler sees them.

Owner: device thread; start and stop run between two steps. Out: Spans for a Trace, on a track for each stream of the
device. The profiler costs some microseconds per kernel and seconds at its first start, so it has a separate switch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from engine.base.trace import OF_DEVICE, STREAMS, Span


class DeviceProfile:
    """One run of the profiler."""

    def __init__(self, devices: Sequence[torch.device | str]) -> None:
        """`devices`: of the ranks."""
        from torch.profiler import ProfilerActivity, profile

        self._devices = devices
        self._profile = profile(activities=[ProfilerActivity.CUDA], acc_events=True)

    def start(self) -> None:
        self._profile.start()

    def stop(self) -> list[Span]:
        """Stops the profiler; returns the spans of kernels and copies since `start`."""
        for device in self._devices:
            torch.cuda.synchronize(device)
        self._profile.stop()
        clock_offset = time.time() - time.perf_counter()  # the profiler uses the wall clock
        found: Any = self._profile.profiler
        events = found.kineto_results.events()
        return [span_of(event, clock_offset) for event in events if str(event.device_type()).endswith("CUDA")]


def span_of(event: Any, clock_offset: float) -> Span:
    """The Span of a kernel or a copy, on the track of its stream. Rank 0 has device 0."""
    begun, ended = event.start_ns() / 1e9 - clock_offset, event.end_ns() / 1e9 - clock_offset
    track = STREAMS + OF_DEVICE * event.device_index() + event.device_resource_id() % OF_DEVICE
    return Span(track, event.name(), begun, ended, {})
