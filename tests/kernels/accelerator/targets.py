"""The six targets every Triton kernel must compile for, and the check that it does: no such card is needed.

cases_compile*.py list kernels as name -> (kernel, argument types, constants, options), take `cases` of them as
parameters and hand each to `compiles`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# target -> bytes of shared memory that a block may use
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 << 10),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 << 10),
    "sm_100": (GPUTarget("cuda", 100, 32), 227 << 10),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 << 10),
    "gfx950": (GPUTarget("hip", "gfx950", 64), 160 << 10),
    "gfx1100": (GPUTarget("hip", "gfx1100", 32), 64 << 10),
}


# Where kernels may begin before the one before them has ended; elsewhere constants that are for CUDA alone are off.
OVERLAPPING = {"sm_90", "sm_100"}
FLOAT8 = {"sm_90", "sm_100", "gfx950"}  # whose matrix units take e4m3


def compiles(
    target: str, kernel: Any, signature: dict[str, str], constants: dict[str, Any], options: dict, aligned: bool = False
) -> Any:
    """Compiles for the target, fails unless the shared memory fits; returns what the compiler made.

    `aligned`: pointers and the cache's stride are multiples of 16, as a launch finds them: copies then go straight
    into shared memory.
    """
    device, shared = TARGETS[target]
    if target not in OVERLAPPING:
        constants = {
            name: 0 if name in ("OVERLAP", "AHEAD", "LEAD", "MATERIALISE") else value
            for name, value in constants.items()
        }
    if target not in FLOAT8 and "NATIVE" in constants:
        constants = {**constants, "NATIVE": False}
    if device.backend != "cuda" and "PAIRS" in constants:
        constants = {**constants, "PAIRS": False}
    types = {**signature, **dict.fromkeys(constants, "constexpr")}
    even = [
        kernel.arg_names.index(name)
        for name, kind in types.items()
        if aligned and (kind.startswith("*") or name == "block_stride")
    ]
    attributes = {(number,): [["tt.divisibility", 16]] for number in even}
    source = ASTSource(kernel, types, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=device, options=options)
    assert made.asm["cubin" if device.backend == "cuda" else "hsaco"]
    assert made.metadata.shared <= shared, f"{made.metadata.shared} bytes of shared memory on {target}, not {shared}"
    return made


def in_float16(kernels: dict[str, tuple], *names: str) -> dict[str, tuple]:
    """The same kernels, as encoders of float16 checkpoints launch them."""
    found = {}
    for name in names:
        kernel, signature, *rest = kernels[name]
        found[f"{name} in float16"] = (kernel, {k: t.replace("bf16", "fp16") for k, t in signature.items()}, *rest)
    return found


def cases(kernels: dict[str, tuple]) -> list[Any]:
    """(name, target): in `make test` each variant for a target in turn, and each kernel for one of CUDA and of HIP.

    Of a kernel with more than three variants every second one is taken. The other pairs are marked `full`. `kernels`
    that follow one another begin with different targets.
    """
    order, found, met = ("sm_90", "gfx942", "sm_80", "gfx1100", "sm_100", "gfx950"), [], Counter[Any]()
    variants = Counter(kernel for kernel, *_ in kernels.values())
    first = {kernel: 2 * number for number, kernel in enumerate(variants)}
    for name, (kernel, *_) in kernels.items():
        number = met[kernel]
        turns = (0, 1) if variants[kernel] == 1 else (number // 2,) if variants[kernel] > 3 else (number,)
        left = variants[kernel] > 3 and number % 2
        short = set() if left else {order[(first[kernel] + turn) % len(order)] for turn in turns}
        found += [pytest.param(name, target, marks=() if target in short else pytest.mark.full) for target in TARGETS]
        met[kernel] += 1
    return found
