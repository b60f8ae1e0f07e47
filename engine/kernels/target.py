"""Properties of this process's device, and `triton`/`tl` for the kernel files.

Thread: any; everything is computed once and never changes. Without CUDA and ROCm, `triton` and `tl` are stand-ins:
kernel files can still be imported, `@triton.jit` returns its function unchanged, and `tl.constexpr` is only a name. A
launcher that calls such a function has a bug.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from typing import Any, Literal

import torch

from engine.kernels.launchers import separate


@dataclass(frozen=True, slots=True)
class Target:
    """Properties of the device that kernels and their launchers need."""

    kind: Literal["cpu", "cuda", "hip"]
    arch: str  # "sm_90", "gfx942", or the CPU's vector extension ("avx512", "avx2", "default")
    num_units: int  # streaming multiprocessors, compute units or cores
    warp_size: int  # threads in a warp or wavefront; 1 on a CPU
    shared_memory: int  # bytes a block may use; 0 on a CPU

    @property
    def begins_early(self) -> bool:
        """Whether a kernel may start while the previous kernel ends, and load blocks through descriptors."""
        return self.kind == "cuda" and int(self.arch.removeprefix("sm_")) >= 90

    @property
    def multiplies_float8(self) -> bool:
        """Whether the matrix units support the e4m3 of checkpoints; gfx942's variant has values half as large."""
        if self.kind == "hip":
            return self.arch == "gfx950"
        return self.kind == "cuda" and int(self.arch.removeprefix("sm_")) >= 89

    @property
    def loads_past_registers(self) -> bool:
        """Whether pipelined loads go directly to shared memory, so that more stages cost no registers."""
        return self.kind == "cuda"

    @property
    def bounds_registers(self) -> bool:
        """Whether a launch may say how many registers a thread has at most."""
        return self.kind == "cuda"

    @property
    def runs_ptx(self) -> bool:
        """Whether kernels may contain inline PTX."""
        return self.kind == "cuda"

    @property
    def widens_fp8(self) -> bool:
        """Whether instructions convert the checkpoints' e4m3 to wider numbers and back; AMD before gfx950 has another
        e4m3."""
        return self.kind == "cuda" and int(self.arch.removeprefix("sm_")) >= 89


# Cards that a process may pretend to have, by architecture: the largest card of each.
CARDS = {
    "sm_80": Target("cuda", "sm_80", 108, 32, 163 << 10),
    "sm_90": Target("cuda", "sm_90", 132, 32, 227 << 10),
    "sm_100": Target("cuda", "sm_100", 148, 32, 227 << 10),
    "gfx942": Target("hip", "gfx942", 304, 64, 64 << 10),
    "gfx950": Target("hip", "gfx950", 256, 64, 160 << 10),
    "gfx1100": Target("hip", "gfx1100", 96, 32, 64 << 10),
}
pretended: list[Target] = []


def pretend(card: Target) -> None:
    """Make `target` return this card, even if the machine lacks it; for processes that launch nothing.

    Must be called before kernel files are imported and used, because they cache facts that depend on the card.
    """
    assert HAS_TRITON, "import triton first: a kernel file without it has no kernels"
    pretended[:] = [card]
    target.cache_clear()


@functools.cache
def target() -> Target:
    """Return the first accelerator that torch sees, else the CPU."""
    if pretended:
        return pretended[0]
    if not torch.cuda.is_available():
        return Target("cpu", torch.backends.cpu.get_cpu_capability().lower(), os.cpu_count() or 1, 1, 0)
    facts: Any = torch.cuda.get_device_properties(0)
    if torch.version.hip:
        arch = facts.gcnArchName.split(":")[0]
        return Target("hip", arch, facts.multi_processor_count, facts.warp_size, facts.shared_memory_per_block)
    arch = f"sm_{facts.major}{facts.minor}"
    shared = facts.shared_memory_per_block_optin
    return Target("cuda", arch, facts.multi_processor_count, facts.warp_size, shared)


CALLS = (
    "GraphLaunch", "MemcpyAsync", "EventCreateWithFlags", "EventDestroy", "EventRecord", "EventQuery",
    "EventSynchronize", "EventElapsedTime", "GetErrorString",
)  # fmt: skip
RUNTIMES = {"libcudart.so": "cuda", "libamdhip64.so": "hip"}  # prefix of the file's name -> of its functions' names
# Functions that every step calls and that the runtime only forwards to the driver. They are called in the driver,
# because after a pause the code of both is no longer in the core's caches. Both share handles and error numbers.
DRIVER, DIRECT = "libcuda.so", ("GraphLaunch", "EventRecord", "EventSynchronize")
PRODUCTS = "libcublasLt.so"  # gemm/cublaslt selects the algorithms of its products


def runtime_calls() -> dict[str, int]:
    """Return addresses of the functions that a step calls, in the runtime library that torch loaded; without prefix.

    torch's streams, events and graphs belong to the library that made them, so no library is loaded here. The functions
    of DIRECT come from the driver if it has been loaded.
    """
    loaded = _loaded()
    for path in loaded:
        for start, prefix in RUNTIMES.items():
            if not os.path.basename(path).startswith(start):
                continue
            calls = _addresses(path, prefix, CALLS)
            for driver in loaded:
                if prefix == "cuda" and os.path.basename(driver).startswith(DRIVER):
                    calls |= _addresses(driver, "cu", DIRECT)
            return calls
    raise RuntimeError(
        f"torch {torch.__version__} has loaded none of {', '.join(RUNTIMES)}: steps need a build of torch that links "
        "the CUDA or HIP runtime as a shared library"
    )


def products_library() -> str | None:
    """Return the path of the vendor's matrix-product library that torch loaded; None: gemm/cublaslt does not support
    it."""
    if target().kind != "cuda":
        return None
    return next((path for path in _loaded() if os.path.basename(path).startswith(PRODUCTS)), None)


def kernel_cache(key: str) -> Any:
    """Return the manager of an entry in Triton's kernel cache (`get_file`, `put`); key is hexadecimal."""
    return importlib.import_module("triton.runtime.cache").get_cache_manager(key)


def _loaded() -> list[str]:
    """Return the paths of all files that this process has mapped."""
    with open("/proc/self/maps") as lines:
        return sorted({line.split(maxsplit=5)[5].rstrip("\n") for line in lines if "/" in line})


def _addresses(path: str, prefix: str, names: tuple[str, ...]) -> dict[str, int]:
    """Return the addresses of functions of a library that is already loaded."""
    library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    return {name: ctypes.cast(getattr(library, prefix + name), ctypes.c_void_p).value or 0 for name in names}


class _NoTriton:
    """Stand-in for `triton` and `triton.language`: decorators return their function, other names are objects."""

    def jit(self, function: Any = None, **_options: Any) -> Any:
        return function if function is not None else lambda inner: inner

    def heuristics(self, _values: Any) -> Any:
        return lambda inner: inner

    def constexpr(self, value: Any) -> Any:
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return object()


# The import of Triton takes 0.3 s, so with a CPU build of torch it is not imported even if installed. The exception:
# tests import it first, to run the kernels in its interpreter and to cross-compile them.
HAS_TRITON = "triton" in sys.modules or (
    bool(torch.version.cuda or torch.version.hip) and importlib.util.find_spec("triton") is not None
)
if HAS_TRITON:
    tl: Any = importlib.import_module("triton.language")
    separate(importlib.import_module("triton.runtime.build"))
else:
    tl = _NoTriton()


class _Host:
    """`triton` with other cdiv and next_power_of_2 for launchers.

    Triton's own functions serve its compiler too, and take 3 us a call: a tenth of a launch with four calls.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def cdiv(self, a: int, b: int) -> int:
        """a / b, rounded up; b > 0."""
        return -(-a // b)

    def next_power_of_2(self, n: int) -> int:
        """The least power of two that is at least n; n > 0."""
        return 1 << (n - 1).bit_length()


triton: Any = _Host(importlib.import_module("triton") if HAS_TRITON else tl)
