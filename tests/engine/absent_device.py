"""An engine on an absent GPU: tensors have no memory, and kernels are recorded instead of compiled.

Tensors of torch's meta device have only shapes and offsets; here they claim to be on a CUDA device, so launchers
launch. Triton's own binder reports the kernel of each launch: argument specializations, constants and options. All
tokens are 0. Must run in a separate process that has imported triton before any kernel file.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

import engine.run.start
import engine.sampling.device
import engine.sampling.lines
import engine.sampling.pending
import engine.step.backend.device.startup
import engine.weights.load
from engine.device.memory import DeviceMemory
from engine.kernels import pdl, tune
from engine.kernels.precompile import kind_of
from engine.kernels.target import Target, target
from tests.engine.host_accelerator import HostAccelerator

HOPPER = Target("cuda", "sm_90", 132, 32, 227 << 10)
Kernel = tuple[str, str, str]  # (name, specialization of its arguments with their constants, options)


class Driver:
    """Triton's driver for the absent card."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


class AbsentAccelerator(HostAccelerator):
    """Graphs are plain calls, as in HostAccelerator."""

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("meta")

    def memory(self) -> DeviceMemory:
        return DeviceMemory(total=80 << 30, free=80 << 30)


class Met:
    """Recorded kernels by first launch: in the walk at start, later during the start, after the start."""

    def __init__(self) -> None:
        self.at_start: set[Kernel] = set()
        self.later: set[Kernel] = set()
        self.since: set[Kernel] = set()
        self.kinds: dict[Hashable, Kernel] = {}  # precompile's kinds of launches, and the kernel of each
        self._now = self.later

    def walk(self, walk: Callable[[], None], _threads: int, _bind: Callable[[], None]) -> None:
        """Replaces precompile."""
        self._now = self.at_start
        walk()
        self._now = self.later

    def ready(self) -> None:
        """Marks the end of the start."""
        self._now = self.since

    def note(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """Replaces a launch."""
        *_, binder = kernel.device_caches[0]
        _, special, others = binder(*args, **options)
        found = kernel.__name__, str(special), str(others)
        assert self.kinds.setdefault(kind_of(kernel, args, options), found) == found, "one kind has several kernels"
        if found not in self.at_start | self.later:
            self._now.add(found)


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> Met:
    """Makes `device="cuda"` the absent card for one test, and records its kernels."""
    found = Met()
    be_a_hopper(monkeypatch)
    monkeypatch.setattr(triton.JITFunction, "run", lambda kernel, *args, **more: found.note(kernel, *args, **more))
    monkeypatch.setattr(engine.step.backend.device.startup, "precompile", found.walk)
    monkeypatch.setattr(engine.run.start, "choose_device", lambda _asked: "meta")
    monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: AbsentAccelerator())
    monkeypatch.setattr(engine.weights.load, "upload_for", lambda _device: None)
    monkeypatch.setattr(engine.weights.load, "draw", lambda _name, tensor, _seed: tensor)
    for module in (engine.sampling.device, engine.sampling.lines, engine.sampling.pending):
        monkeypatch.setattr(module, "send", lambda values, device: torch.from_numpy(values.copy()).to(device))
    monkeypatch.setattr(engine.sampling.pending, "home", lambda lines: torch.zeros(lines.shape, dtype=lines.dtype))
    return found


def be_a_hopper(patch: pytest.MonkeyPatch) -> None:
    """Replaces what torch and Triton report about the device and its tensors."""
    triton.runtime.driver.set_active(Driver())
    facts = SimpleNamespace(
        major=9, minor=0, multi_processor_count=HOPPER.num_units, warp_size=HOPPER.warp_size,
        shared_memory_per_block_optin=HOPPER.shared_memory,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as while_asked:
        while_asked.setattr(torch.cuda, "is_available", lambda: True)
        while_asked.setattr(torch.cuda, "get_device_properties", lambda _device: facts)
        for cached in (target, pdl.overlaps, pdl.launch_options, tune.few_rows_cut):
            cached.cache_clear()
        assert target() == HOPPER  # caches the target for all later calls
    is_cuda, data_ptr = Tensor.is_cuda, Tensor.data_ptr
    patch.setattr(Tensor, "is_cuda", property(lambda self: self.is_meta or is_cuda.__get__(self)))
    patch.setattr(
        Tensor, "data_ptr", lambda self: self.storage_offset() * self.element_size() if self.is_meta else data_ptr(self)
    )
    for name in ("zeros", "empty"):  # without a driver no memory can be pinned
        make = getattr(torch, name)
        patch.setattr(torch, name, lambda *size, make=make, pin_memory=False, **more: make(*size, **more))
