"""Kernels that begin while the one before them ends (programmatic dependent launch; CUDA from sm_90 on).

Between two dependent kernels of a graph lie about 1.3 microseconds in which nothing runs. A kernel launched with
`launch_options()` may start as soon as every program of the kernel before it has called `begin` or ended; it then waits
inside `begin` until that kernel has written everything:

    kernel N    | begin ... work ............ |
    kernel N+1       | its weights -> L2 | wait | work ...

The rule: before `begin` a kernel touches nothing that another kernel writes; weights are all it may read. One that
forgets to wait is a silent race, so every kernel that is given `launch_options()` calls `begin` first of all. How far
ahead of itself a kernel starts is not bounded by the one before it: that one may be waiting too. But none passes a
kernel that never calls `begin`, as a forward's first does not: what the step's prep and earlier steps wrote may be read
too, past the unit's own cache. Decode attention does: its lists, and the keys of all tokens but the step's own.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from engine.kernels.target import HAS_TRITON, target, tl, triton

if HAS_TRITON:
    _cuda: Any = importlib.import_module("triton.language.extra.cuda")
    wait_before, let_next_start = _cuda.gdc_wait, _cuda.gdc_launch_dependents
else:
    wait_before = let_next_start = None


@functools.cache
def overlaps() -> bool:
    """Whether kernels of this device overlap; the OVERLAP constant of each launch."""
    return target().begins_early


@functools.cache
def launch_options() -> dict[str, Any]:
    """What a launch passes on for it."""
    return {"OVERLAP": True, "launch_pdl": True} if overlaps() else {"OVERLAP": False}


@triton.jit
def fetch_run(address, size):
    """Brings size bytes from each address into the second-level cache, where no line is ever stale; nobody waits.

    [lanes] pointers, and int32 multiples of 16, 0 for nothing; only where kernels overlap.
    """
    tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ne.s32 p, $2, 0;
        @p cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [address, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def wait_in_round():
    """`wait_before` within a loop, spelled out: where Triton knows it, it loads nothing for later rounds before it."""
    tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def begin(OVERLAP: tl.constexpr):
    """The next kernel may start; everything before this line is then written by the kernels before."""
    if OVERLAP:
        let_next_start()
        wait_before()
