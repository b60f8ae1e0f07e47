"""Patches for the interpreter: without its needless work, and with a fixed order of sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest


def by_name(search: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Caches the search by the type's name: block types are not hashable, but their names differ."""
    known: dict[str, Any] = {}

    def found(kind: Any) -> Any:
        if kind.name not in known:
            known[kind.name] = search(kind)
        return known[kind.name]

    return found


def once_a_block(make: Callable[..., None]) -> Callable[..., None]:
    """Wraps block_type's constructor: runs it once for each element type and shape."""
    known: dict[Any, dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple([getattr(side, "value", side) for side in shape])
        if key not in known:
            make(self, element_ty, shape)
            known[key] = dict(self.__dict__)
        self.__dict__.update(known[key])

    return init


def once_a_type(make: Callable[..., None]) -> Callable[..., None]:
    """Wraps tensor's constructor: runs it once for each type, and then sets only the values."""
    known: dict[str, dict[str, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        if type.name not in known:
            make(self, handle, type)
            known[type.name] = dict(self.__dict__)
        self.__dict__.update(known[type.name])
        self.handle = handle

    return init


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter() -> Iterator[None]:
    """Skips three quarters of the interpreter's work on small tensors, which does not affect results.

    At each launch and at each call of a jitted function, `tl.sum` among them, the interpreter searches all of `tl` for
    functions to replace. For each sum of integers it checks overflow, for an assertion of the debug mode. At each load
    it builds its table of types, and for each tensor the type and the shape anew.
    """
    import triton.language as tl
    from triton import knobs
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    with pytest.MonkeyPatch.context() as patch:
        if knobs.runtime.interpret:
            replaced = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
            patch.setattr(interpreter, "_patch_lang", lambda _function: type(replaced)())
            assert not builder.options.debug
            patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
            patch.setattr(interpreter, "_get_np_dtype", by_name(interpreter._get_np_dtype))
            patch.setattr(tl.block_type, "__init__", once_a_block(tl.block_type.__init__))
            patch.setattr(tl.tensor, "__init__", once_a_type(tl.tensor.__init__))
        yield


@pytest.fixture
def ordered_sums(monkeypatch):
    """`tl.dot` adds its products one after the other along the depth, so that equal rows give equal bits everywhere.

    The interpreter multiplies with NumPy, whose BLAS adds in an order that depends on the processor, the shape and the
    row's index within the tile. A device's products do not depend on the row's index.
    """
    import numpy as np
    from triton.runtime import interpreter

    def create_dot(_builder, a, b, d, *_precision):
        left, right = (operand.data.astype(d.data.dtype) for operand in (a, b))
        sums = np.zeros_like(d.data)
        for depth in range(left.shape[-1]):
            sums += left[..., depth : depth + 1] * right[..., depth : depth + 1, :]
        return interpreter.TensorHandle(sums + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
