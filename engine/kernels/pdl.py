"""Programmatic dependent launch: a kernel starts while the previous kernel ends (CUDA from sm_90 on).

Between two dependent kernels of a graph the device is idle for about 1.3 microseconds. A kernel launched with
`launch_options()` may start as soon as every program of the previous kernel has called `allow_next` or ended. The early
kernel then waits in `grid_wait` until the previous kernel has written everything:

    kernel N    | grid_wait ... work ........ |
    kernel N+1       | its weights -> L2 | wait | work ...

The rule: before `grid_wait` a kernel reads only weights, and nothing that another kernel writes. A missing wait is a
silent race, so every kernel that is launched with `launch_options()` calls `grid_wait` before anything else. The
previous kernel may be waiting too, so several kernels may have started. But no kernel starts before the end of a kernel
that never calls `allow_next`, and the first kernel of a forward never calls it. So before `grid_wait` a kernel may also
read data that the step's prep and earlier steps wrote, with loads that bypass the unit's cache. Decode attention reads
its lists in this way, and the keys of all tokens except the step's own tokens. Programs that only fold states
(state/delta_fold) do not wait: no earlier kernel of the step reads what they write. Behind a kernel that calls
`wait_then_allow`, a kernel may compute from what earlier kernels wrote, and waits at its end (lora/shrink).
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
    """Whether kernels of this device overlap: the OVERLAP constant of each launch."""
    return target().begins_early


@functools.cache
def launch_options(joins: bool = False) -> dict[str, Any]:
    """Return the launch options for overlapping kernels.

    `joins`: the kernel waits for another stream too, so it starts after the end of the previous kernels.
    """
    return {"OVERLAP": True, "launch_pdl": not joins} if overlaps() else {"OVERLAP": False}


@triton.jit
def fetch_run(address, size):
    """Start a copy of `size` bytes from each address into the L2 cache, whose lines are never stale.

    address: [lanes] pointers; size: [lanes] int32 multiples of 16, 0 copies nothing. Only if kernels overlap.
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
    """`wait_previous` for loops, as assembly. Triton would move no load of a later iteration before a wait that it
    knows."""
    tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def grid_wait(OVERLAP: tl.constexpr):
    """Let the next kernel start, then wait until the previous kernels have written everything."""
    if OVERLAP:
        allow_next()
        wait_previous()


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    """Let the next kernel start before this kernel reads the addresses of its weights; `wait_alone` follows."""
    if OVERLAP:
        allow_next()


@triton.jit
def wait_alone(OVERLAP: tl.constexpr):
    """Wait like grid_wait; without `let_next_start` the next kernel starts after the end of this kernel."""
    if OVERLAP:
        wait_previous()


@triton.jit
def wait_then_allow(OVERLAP: tl.constexpr):
    """Like grid_wait, but the next kernel starts only after the wait, when the previous kernels have written
    everything."""
    if OVERLAP:
        wait_previous()
        allow_next()
