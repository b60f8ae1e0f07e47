"""Facts of the device this process computes on, and `triton`/`tl` for the kernel files.

Thread: any; everything is computed once and never changes. Where there is neither CUDA nor ROCm, `triton` and `tl` are
stand-ins: a kernel file still imports, `@triton.jit` hands its function back unchanged, and `tl.constexpr` is a mere
name. Calling such a function is a bug of the launcher that did so.
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


@dataclass(frozen=True, slots=True)
class Target:
    """What kernels and their launchers need to know about the device."""

    kind: Literal["cpu", "cuda", "hip"]
    arch: str  # "sm_90", "gfx942", or the CPU's vector extension ("avx512", "avx2", "default")
    num_units: int  # streaming multiprocessors, compute units or cores
    warp_size: int  # threads in a warp or wavefront; 1 on a CPU
    shared_memory: int  # bytes a block may use; 0 on a CPU

    @property
    def begins_early(self) -> bool:
        """Whether a kernel may begin while the one before it ends, and load blocks by descriptors."""
        return self.kind == "cuda" and int(self.arch.removeprefix("sm_")) >= 90

    @property
    def multiplies_float8(self) -> bool:
        """Whether the matrix units take e4m3 as files have it; gfx942 takes another, with half the scale."""
        if self.kind == "hip":
            return self.arch == "gfx950"
        return self.kind == "cuda" and int(self.arch.removeprefix("sm_")) >= 89

    @property
    def loads_past_registers(self) -> bool:
        """Whether a pipelined load goes straight into shared memory: further stages cost no registers."""
        return self.kind == "cuda"

    @property
    def runs_ptx(self) -> bool:
        """Whether kernels may hold instructions of NVIDIA's assembler as text."""
        return self.kind == "cuda"

    @property
    def widens_fp8(self) -> bool:
        """Whether units turn the e4m3 of checkpoints into wider numbers and back: AMD's before gfx950 know another."""
        return self.kind == "cuda" and int(self.arch.removeprefix("sm_")) >= 89


# Cards that a process may pretend to have, by architecture: the largest of each.
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
    """From now on `target` names this card, which need not be here: of a process that launches nothing.

    Before kernel files are imported and asked: they remember what follows from a card.
    """
    assert HAS_TRITON, "import triton first: a kernel file without it has no kernels"
    pretended[:] = [card]
    target.cache_clear()


@functools.cache
def target() -> Target:
    """The first accelerator where torch sees one, else the CPU."""
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
RUNTIMES = {"libcudart.so": "cuda", "libamdhip64.so": "hip"}  # how the file's name begins, and its functions' names
# What every step calls, where the runtime hands a call on to the driver as it came: a core that has slept since the
# last one finds neither's code in its caches. The two share handles and numbers of errors.
DRIVER, DIRECT = "libcuda.so", ("GraphLaunch", "EventRecord", "EventSynchronize")
PRODUCTS = "libcublasLt.so"  # its products can be had by an algorithm of one's choice (gemm/cublaslt)


def runtime_calls() -> dict[str, int]:
    """Addresses of the functions that a step calls, in the runtime library that torch has loaded; names without prefix.

    Streams, events and graphs are torch's own, so it must be the very library that made them: nothing is loaded here.
    Those of DIRECT are the driver's where it has been loaded.
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
    """The path of the vendor's library of products, as torch has loaded it; None: gemm/cublaslt does not know it."""
    if target().kind != "cuda":
        return None
    return next((path for path in _loaded() if os.path.basename(path).startswith(PRODUCTS)), None)


def kernel_cache(key: str) -> Any:
    """A place of one's own in Triton's cache of compiled kernels, by a hexadecimal key: its `get_file` and `put`."""
    return importlib.import_module("triton.runtime.cache").get_cache_manager(key)


def _loaded() -> list[str]:
    """Paths of what this process has mapped."""
    with open("/proc/self/maps") as lines:
        return sorted({line.split(maxsplit=5)[5].rstrip("\n") for line in lines if "/" in line})


def _addresses(path: str, prefix: str, names: tuple[str, ...]) -> dict[str, int]:
    """Of functions of a library that is loaded."""
    library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    return {name: ctypes.cast(getattr(library, prefix + name), ctypes.c_void_p).value or 0 for name in names}


class _NoTriton:
    """Stands where `triton` or `triton.language` would: decorators return their function, other names are objects."""

    def jit(self, function: Any = None, **_options: Any) -> Any:
        return function if function is not None else lambda inner: inner

    def heuristics(self, _values: Any) -> Any:
        return lambda inner: inner

    def constexpr(self, value: Any) -> Any:
        return value

    def cdiv(self, a: int, b: int) -> int:
        return -(-a // b)

    def next_power_of_2(self, n: int) -> int:
        return 1 << max(n - 1, 0).bit_length()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return object()


# Triton takes a third of a second to import, so a CPU build of torch does without even where it is installed, unless
# it is imported already: the tests do so, to run the kernels in its interpreter and to cross-compile them.
HAS_TRITON = "triton" in sys.modules or (
    bool(torch.version.cuda or torch.version.hip) and importlib.util.find_spec("triton") is not None
)
if HAS_TRITON:
    triton: Any = importlib.import_module("triton")
    tl: Any = importlib.import_module("triton.language")
else:
    triton = tl = _NoTriton()
