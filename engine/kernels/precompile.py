"""Kernels compiled before they are launched, several at a time: a walk through a model's steps that computes nothing.

Thread: the device's, with a pool of its own while it lasts. Triton compiles a kernel where it is first launched, one
after the other, for a third of a second each; older versions then have a C compiler build what launches it, for a fifth
of one. Inside a walk the calling thread launches nothing: each launch only names its kernel, and the pool compiles and
loads new ones. Most of that time is LLVM's, the assembler's and the C compiler's, which need no GIL, so threads do.

    walk | launch launch launch ... none of them runs | waits |
    pool | compiles, loads ....... | compiles, loads ........ |
         | compiles, loads  | compiles, loads ... |

What the kernels would have written stays as it was: nothing in a walk may take an index or a length from there.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from engine.kernels.target import HAS_TRITON, triton

MAX_THREADS = 8  # beyond, they wait for each other's Python: with 16 an H100's 8B took 0.8 s longer
_walking = threading.Lock()  # launches are Triton's, so engines that start at the same time take turns


def precompile(walk: Callable[[], None], threads: int, bind: Callable[[], None]) -> None:
    """Calls `walk`; when this returns, every kernel that it would have launched is compiled and loaded.

    `bind` gives each of the pool's threads the device. A kernel that cannot be compiled raises what its launch would
    have raised. Where nothing compiles, on a CPU and in Triton's interpreter, there is no walk either.
    """
    if not HAS_TRITON or triton.knobs.runtime.interpret:
        return
    with _walking:
        # A copy: Triton keeps the pool in a context variable, and leaves it there when a kernel failed.
        contextvars.copy_context().run(_compile, walk, min(threads, MAX_THREADS), bind)


class _Pool(ThreadPoolExecutor):
    """What Triton hands its compilations to."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(_ready, call, *args, **kwargs)


def _ready(compile_kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A compiled kernel, ready to be launched."""
    kernel = compile_kernel(*args, **kwargs)
    # Asked for, it loads the kernel and makes what launches it; a Triton without it does both at the first launch.
    if isinstance(getattr(type(kernel), "run", None), property):
        _ = kernel.run
    return kernel


def _compile(walk: Callable[[], None], threads: int, bind: Callable[[], None]) -> None:
    pool = _Pool(threads, thread_name_prefix="omniloop-compile", initializer=bind)
    try:
        with triton.AsyncCompileMode(pool), _noted():  # the first one waits on leaving, and raises
            walk()
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _noted() -> Iterator[None]:
    """Launches on this thread inside are not launched; each new kind is handed to Triton to be compiled."""
    kernels: Any = triton.JITFunction
    launch, mine, met = kernels.run, threading.get_ident(), set[Hashable]()

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if threading.get_ident() != mine:
            return launch(kernel, *args, grid=grid, warmup=warmup, **options)
        # Triton's own answer, whether it knows the kernel, takes ten times as long and is asked for once per kind.
        kind = (id(kernel), *map(_kind, args), *options, *map(_kind, options.values()))
        if kind not in met:
            met.add(kind)
            launch(kernel, *args, grid=grid, warmup=True, **options)
        return None

    kernels.run = note
    try:
        yield
    finally:
        kernels.run = launch


def _kind(value: Any) -> Hashable:
    """What a kernel is specialised on in an argument: all that Triton looks at, and of numbers the value itself."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16, value.untyped_storage().nbytes() < 1 << 31
    base = getattr(value, "base", None)  # of a descriptor
    if base is not None:
        return base.dtype, *value.block_shape
    return type(value), value
