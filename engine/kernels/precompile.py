"""Parallel compilation of kernels before their first launch, by a walk through a model's steps that computes nothing.

Thread: the device's, with its own pool during the walk. Triton compiles each kernel at its first launch, one after the
other, in about 0.3 s each; older versions then need 0.2 s for a C compiler to build the launcher. In a walk the calling
thread launches nothing: each launch only names its kernel, and the pool compiles and loads new kernels. Most of the
time is spent in LLVM, the assembler and the C compiler without the GIL, so threads are sufficient.

    walk | launch launch launch ... no kernel runs    | waits |
    pool | compiles, loads ....... | compiles, loads ........ |
         | compiles, loads  | compiles, loads ... |

Each kernel's key in Triton's cache contains a hash of all of Triton's files (0.4 GB), which takes 0.3 s. `hashed`
computes it on a thread from the beginning of a start, while the model's weights are read.

Kernels' outputs stay unwritten during a walk, so code in a walk must not read a length from them, and reads indices
only from `new_indices`.
"""

from __future__ import annotations

import contextvars
import functools
import importlib
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from engine.kernels.target import HAS_TRITON, triton

MAX_THREADS = 8  # more threads wait for each other's Python: with 16 an H100's 8B took 0.8 s longer
_walks = contextvars.ContextVar("walks", default=False)  # of the calling thread
_walking = threading.Lock()  # `_noted` replaces Triton's global launch, so only one engine walks at a time


def precompile(walk: Callable[[], None], threads: int, bind: Callable[[], None]) -> None:
    """Call `walk`; on return every kernel that it would have launched is compiled and loaded.

    `bind` sets the device in each thread of the pool. If a kernel cannot be compiled, this raises the exception of its
    launch. On a CPU and in Triton's interpreter nothing is compiled, so `walk` is not called.
    """
    if not HAS_TRITON or triton.knobs.runtime.interpret:
        return
    hashed().result()
    with _walking:
        # In a copy of the context: Triton stores the pool in a context variable and leaves it there if a kernel fails.
        contextvars.copy_context().run(_compile, walk, min(threads, MAX_THREADS), bind)


@functools.cache
def hashed() -> Future[object]:
    """The hash of Triton's files, which Triton caches; the first call begins its thread."""
    pool: ThreadPoolExecutor = ThreadPoolExecutor(1, "omniloop-hash")
    cache: Any = importlib.import_module("triton.runtime.cache") if HAS_TRITON else None
    found = pool.submit(getattr(cache, "triton_key", bool))  # `bool` does nothing: this Triton has no such function
    pool.shutdown(wait=False)
    return found


def new_indices(*shape: int, dtype: torch.dtype, device: str | torch.device) -> Tensor:
    """Memory that a kernel fills with indices for torch's kernels; zeros during a walk, whose kernels do not run."""
    make = torch.zeros if _walks.get() else torch.empty
    return make(shape, dtype=dtype, device=device)


class _Pool(ThreadPoolExecutor):
    """The executor to which Triton submits compilations."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(_ready, call, *args, **kwargs)


def _ready(compile_kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compile a kernel and make it ready for launch."""
    kernel = compile_kernel(*args, **kwargs)
    # Reading this property loads the kernel and makes its launcher. Tritons without it do both at the first launch.
    if isinstance(getattr(type(kernel), "run", None), property):
        _ = kernel.run
    return kernel


def _compile(walk: Callable[[], None], threads: int, bind: Callable[[], None]) -> None:
    _walks.set(True)  # in a copy of the context
    pool = _Pool(threads, thread_name_prefix="omniloop-compile", initializer=bind)
    try:
        with triton.AsyncCompileMode(pool), _noted():  # AsyncCompileMode waits on exit, and raises errors
            walk()
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _noted() -> Iterator[None]:
    """Within this context, launches of this thread do not run; each new kind of launch is only compiled by Triton."""
    kernels: Any = triton.JITFunction
    launch, mine, met = kernels.run, threading.get_ident(), set[Hashable]()

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if threading.get_ident() != mine:
            return launch(kernel, *args, grid=grid, warmup=warmup, **options)
        # Triton's own lookup takes ten times as long, and before the walk's end, in Triton 3.6, as long as a load from
        # its cache, 2 ms. So it is called once per kind.
        kind = kind_of(kernel, args, options)
        if kind not in met:
            met.add(kind)
            launch(kernel, *args, grid=grid, warmup=True, **options)
        return None

    kernels.run = note
    try:
        yield
    finally:
        kernels.run = launch


def kind_of(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Hashable:
    """What Triton specialises a kernel on for a launch: launches of one kind run one variant of the kernel."""
    params = {param.name: param for param in kernel.params}
    named = [_kind(params.get(name), value) for name, value in options.items()]
    return id(kernel), *map(_kind, params.values(), args), *options, *named


def _kind(param: Any, value: Any) -> Hashable:
    """What Triton specialises a kernel on for this argument; `param` None: an option of the compiler.

    Of a number at run time: its type, whether it is 1, and whether 16 divides it."""
    if type(value) is int and param is not None and not param.is_constexpr:
        wide = value.bit_length() > 31
        return wide if param.do_not_specialize else (wide, value == 1, value % 16 == 0)
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16, value.untyped_storage().nbytes() < 1 << 31
    base = getattr(value, "base", None)  # a descriptor's tensor
    if base is not None:
        return base.dtype, *value.block_shape
    return type(value), value
