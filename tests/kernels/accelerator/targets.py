"""The six targets for which every Triton kernel must compile, and the check that it does; no card is needed.

cases_compile*.py list kernels as name -> (kernel, argument types, constants, options), take `cases` of them as
parameters, and pass each to `compiles`.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from functools import partial
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


# The order in which kernels and their forms are assigned to targets: CUDA and HIP alternate.
TURNS = ("sm_90", "gfx1100", "sm_100", "gfx950", "sm_80", "gfx942")
# Targets where a kernel may begin before the previous one has ended; elsewhere these constants are 0.
OVERLAPPING = {"sm_90", "sm_100"}
OVERLAPS = ("OVERLAP", "PREFETCH", "LEAD", "MATERIALISE")
FLOAT8 = {"sm_90", "sm_100", "gfx950"}  # matrix units with e4m3
# `make test` sets this variable: kernels are compiled for a few targets, and without LLVM's optimiser, which takes half
# of the time; LLVM selects instructions and registers all the same. `make test-full` optimises, for all targets. Texts
# with inline assembly are always optimised for CUDA, because ptxas loses with long texts what LLVM saves.
QUICK = os.environ.get("OMNILOOP_QUICK_CASES") == "1"
WHOLE = {"sm_90", "gfx942"}  # targets whose assembler runs for every kernel


def compiles(
    target: str, kernel: Any, signature: dict[str, str], constants: dict[str, Any], options: dict, aligned: bool = False
) -> Any:
    """Compiles for the target, and fails unless the shared memory fits; returns the compiled kernel.

    `aligned`: pointers and the cache's stride are multiples of 16, as in a launch; then copies go straight into shared
    memory.
    """
    device, shared = TARGETS[target]
    if target not in OVERLAPPING:
        constants = {name: 0 if name in OVERLAPS else value for name, value in constants.items()}
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
    with triton.knobs.runtime.scope(), pytest.MonkeyPatch.context() as patch:
        if QUICK or target not in WHOLE:
            triton.knobs.runtime.add_stages_inspection_hook = partial(assembled_where_needed, patch)
        made = triton.compile(source, target=device, options=options)
    assert made.asm["cubin" if device.backend == "cuda" else "hsaco"]
    assert made.metadata.shared <= shared, f"{made.metadata.shared} bytes of shared memory on {target}, not {shared}"
    return made


def assert_four_words_a_thread(made: Any) -> None:
    """Checks the layout of the matrix unit's instruction: each thread holds four adjacent words of one row."""
    text = made.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\S.*)$", text, re.MULTILINE))
    held = re.findall(r"mma\.sync.*: tensor<\d+x4xi32, (#\w+)>", text)
    assert held
    for layout in held:
        assert "sizePerThread = [1, 4], threadsPerWarp = [32, 1]" in layouts[layout]


def assembled_where_needed(
    patch: pytest.MonkeyPatch, backend: Any = None, stages: Any = None, *_rest: Any
) -> tuple[str, str]:
    """Triton's hook: only kernels with inline assembly are assembled; with QUICK, LLVM does not optimise.

    The text of other kernels comes entirely from Triton and LLVM; ptxas takes as long as LLVM.
    """
    if stages is not None:
        binary = "cubin" if "cubin" in stages else "hsaco"
        lower, assemble, own = stages["llir"], stages[binary], []

        def lowered(module: Any, metadata: Any) -> Any:
            own.append("tt.elementwise_inline_asm" in str(module))
            if QUICK and (binary == "hsaco" or not own[-1]):
                patch.setenv("DISABLE_LLVM_OPT", "1")
            return lower(module, metadata)

        stages["llir"] = lowered
        stages[binary] = lambda text, metadata: assemble(text, metadata) if own[-1] else text.encode()
    return "quick" * QUICK, ""  # parts of the key in Triton's cache


def in_float16(kernels: dict[str, tuple], *names: str) -> dict[str, tuple]:
    """The same kernels with float16 arguments, as encoders of float16 checkpoints launch them."""
    found = {}
    for name in names:
        kernel, signature, *rest = kernels[name]
        found[f"{name} in float16"] = (kernel, {k: t.replace("bf16", "fp16") for k, t in signature.items()}, *rest)
    return found


def first_of_each(values: Iterable[Any], kind: Callable[[Any], Any]) -> list[Any]:
    """Parameters: `make test` takes the first value of each kind; the others, which differ in sizes, are `full`."""
    known: set[Any] = set()
    found = []
    for value in values:
        found.append(pytest.param(*value, marks=pytest.mark.full if kind(value) in known else ()))
        known.add(kind(value))
    return found


def cases(kernels: dict[str, tuple], elsewhere: Collection[Any] = ()) -> list[Any]:
    """(name, target): `make test` compiles a kernel's first form for one vendor and its middle form for the other.

    Each kernel begins at the next target. Another file compiles the kernels of `elsewhere` likewise. Here their first
    form is compiled for Hopper, and their last one for CDNA. Other pairs are marked `full`.
    """
    forms, short = defaultdict(list), set()
    for name, (kernel, *_) in kernels.items():
        forms[kernel].append(name)
    for number, (kernel, names) in enumerate(forms.items()):
        if kernel in elsewhere:
            short |= set(zip((names[0], *names[1:][-1:]), ("sm_90", "gfx942")))
        else:
            spread = names[0], names[len(names) // 2]
            short |= {(name, TURNS[(number + turn) % len(TURNS)]) for turn, name in enumerate(spread)}
    return [
        pytest.param(name, target, marks=() if (name, target) in short else pytest.mark.full)
        for name in kernels
        for target in TARGETS
    ]
