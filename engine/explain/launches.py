"""Launches: a context that records the kernels launched inside it, in order, and the model's object that launched each.

Thread: the thread that enters. The context replaces Triton's launch and _fast's functions, so a process can have only
one at a time. Names: our kernels by file and function ("gemm/split_k.split_kernel"), functions of _fast/cpu by name,
operations of torch, such as the vendor's matrix product, by name ("torch.mm").

    with Launches(owners, "cuda:0", pretend=True) as launches:       tensors without memory; nothing is launched
    with Launches(owners, "cpu", pretend=False) as launches:         kernels are launched as usual, and recorded
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, NamedTuple

from _fast import cpu
from engine.explain.pretence import Pretence, without_driver
from engine.kernels.target import HAS_TRITON, triton

# The functions of _fast/cpu that compute; they take addresses.
COMPUTING = (
    "linear", "coded_linear", "norm", "point", "qkv_rope_store", "paged_attention", "dense_attention", "delta_rule",
    "ssd", "state_convolution", "selective",
)  # fmt: skip
HERE, LAYERS = "engine.kernels.", "engine.layers."


class Launch(NamedTuple):
    """One kernel, once."""

    owner: str  # the path of the model's object that launched the kernel; "": the model itself
    kernel: str


class Launches:
    """A context that records launches; it can be entered once."""

    def __init__(self, owners: Mapping[int, str], device: str, pretend: bool) -> None:
        """`owners`: id() of each object that may launch -> its path."""
        self.launched: list[Launch] | None = None  # None: launches are not recorded
        self.tensors = Pretence(device, self._note_torch, pretend)
        self._owners, self._pretend = owners, pretend
        self._inside = ExitStack()

    def __enter__(self) -> Launches:
        self._inside.enter_context(self._replaced(cpu, dict.fromkeys(COMPUTING, self._host)))
        if self._pretend:
            self._inside.enter_context(self._replaced(cpu, {"advise_huge": lambda _: lambda *_: None}))
            self._inside.enter_context(without_driver())
        if HAS_TRITON:
            self._inside.enter_context(self._replaced(triton.JITFunction, {"run": self._device}))
        self._inside.enter_context(self.tensors)
        return self

    def __exit__(self, *error: Any) -> None:
        self._inside.close()

    @contextmanager
    def _replaced(self, where: Any, made: Mapping[str, Callable[[Any], Any]]) -> Iterator[None]:
        """Replaces attributes of a module or a class by the results of the functions in `made`."""
        found = {name: getattr(where, name) for name in made}
        for name, make in made.items():
            setattr(where, name, make(found[name]))
        try:
            yield
        finally:
            for name, value in found.items():
                setattr(where, name, value)

    def _host(self, function: Any) -> Any:
        """Wraps a function of _fast/cpu."""

        def run(*args: Any) -> None:
            self._note(f"_fast/cpu.{function.__name__}")
            if not self._pretend:
                function(*args)

        return run

    def _device(self, launch: Any) -> Any:
        """Wraps Triton's launch of a kernel."""

        def run(kernel: Any, *args: Any, **options: Any) -> Any:
            if not options.get("warmup"):
                file = kernel.fn.__module__.removeprefix(HERE).replace(".", "/")
                self._note(f"{file}.{kernel.fn.__name__}")
            return None if self._pretend else launch(kernel, *args, **options)

        return run

    def _note_torch(self, name: str) -> None:
        self._note(f"torch.{name}")

    def of(self, run: Callable[[], object]) -> list[Launch]:
        """The launches of `run`."""
        self.launched = []
        try:
            run()
            return self.launched
        finally:
            self.launched = None

    def _note(self, kernel: str) -> None:
        if self.launched is None:
            return
        frame: FrameType | None = sys._getframe(1)
        owner, made = None, ""
        while frame is not None and owner is None:
            asks = frame.f_locals.get("self")
            owner = self._owners.get(id(asks))
            if owner is None and not made and type(asks).__module__.startswith(LAYERS):  # lives for one step
                made = f"({type(asks).__name__})"
                if hasattr(asks, "add_to") and self.launched:  # a part's result that the stream adds later
                    owner, made = self.launched[-1].owner, ""
            frame = frame.f_back
        self.launched.append(Launch(".".join(filter(None, (owner, made))), kernel))
