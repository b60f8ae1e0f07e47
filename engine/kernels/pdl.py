"""Programmatic dependent launch: a kernel begins while the kernel before it ends (CUDA from sm_90 on).

Between two dependent kernels of a graph lie about 1.3 microseconds in which nothing runs. A kernel that was launched
with `launch_options()` may start as soon as every program of the kernel before it has called `allow_next` or ended. The
early kernel then waits in `grid_wait` until the kernel before it has written everything:

    kernel N    | grid_wait ... work ........ |
    kernel N+1       | its weights -> L2 | wait | work ...

The rule: before `grid_wait` a kernel reads weights only, and nothing that another kernel writes. A kernel that forgets
to wait is a silent race, so every kernel that is given `launch_options()` calls `grid_wait` first of all. The kernel
before may be waiting too, so several kernels may have started. But no kernel starts before a kernel that never calls
`allow_next` has ended, and the first kernel of a forward never calls `allow_next`: so a kernel may also read what the
step's prep and earlier steps wrote, past the unit's own cache. Decode attention reads its lists so, and the keys of all
tokens but the step's own.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from engine.kernels.target import HAS_TRITON, target, tl, triton

if HAS_TRITON:
    _cuda: Any = importlib.import_module("triton.language.extra.cuda")
    wait_previous, allow_next = _cuda.gdc_wait, _cuda.gdc_launch_dependents
else:
    wait_previous = allow_next = None


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
    """Starts to copy size bytes from each address into the second-level cache, where no line is ever stale.

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
def wait_in_loop():
    """`wait_previous` inside a loop, as assembly: Triton moves no load of a later round before a wait that it knows."""
    tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def grid_wait(OVERLAP: tl.constexpr):
    """The next kernel may start; everything before this line is then written by the kernels before."""
    if OVERLAP:
        allow_next()
        wait_previous()


@triton.jit
def wait_then_allow(OVERLAP: tl.constexpr):
    """As grid_wait, but the next kernel starts when everything before this line is written."""
    if OVERLAP:
        wait_previous()
        allow_next()
