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


def checked_once(check: Callable[..., Any], tensor: type) -> Callable[..., tuple[Any, Any]]:
    """Wraps the check of a binary operation's operands: runs it once for each pair of element types and numbers.

    An operand without dimensions gets the other's type, but its data stay one number, which NumPy extends.
    """
    element_types: dict[Any, list[Any]] = {}
    types: dict[tuple[str, str], tuple[Any, Any] | None] = {}

    def operands(self: Any, left: Any, right: Any, *rules: bool, **named: bool) -> tuple[Any, Any]:
        key = *[side.dtype.name if type(side) is tensor else (type(side), side) for side in (left, right)], rules
        if named:
            key += tuple(named.items())
        if key not in element_types:
            element_types[key] = [side.dtype for side in check(self, left, right, *rules, **named)]
        sides = []
        for side, element_type in zip((left, right), element_types[key]):
            if type(side) is not tensor:
                side = self.scalar_constant(side, element_type)
            elif side.dtype.name != element_type.name:
                side = self.cast(side, element_type)
            sides.append(side)
        left, right = sides
        pair = left.type.name, right.type.name
        if pair not in types:
            types[pair] = broadcast_types(left.type, right.type)
        if (found := types[pair]) is None:
            return self.broadcast_impl_value(left, right)
        if found[0] is not None:
            left = tensor(left.handle, found[0])
        if found[1] is not None:
            right = tensor(right.handle, found[1])
        return left, right

    return operands


def broadcast_types(left: Any, right: Any) -> tuple[Any, Any] | None:
    """New types of two operands, of which at most one changes: it has no dimensions. None: NumPy must extend one."""
    if left.is_block() and right.is_block():
        return (None, None) if list(left.shape) == list(right.shape) else None
    if left.is_block():
        return None, left.with_element_ty(right.scalar)
    return right.with_element_ty(left.scalar) if right.is_block() else None, None


def without_constants(unwrap: Callable[[Any], Any], constexpr: type, tensor: type) -> Callable[[Any], Any]:
    """Wraps the search for constants in an argument: a tensor has none."""

    def value(argument: Any) -> Any:
        kind = type(argument)
        return argument if kind is tensor else argument.value if kind is constexpr else unwrap(argument)

    return value


def patch_attribute(place: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
    """Makes a function of `tl` run in the interpreter, without the check that only the compiler needs."""
    from triton.runtime.interpreter import interpreter_semantic

    inner = getattr(member, "__wrapped__", member)

    def run(*arguments: Any, **named: Any) -> Any:
        named["_semantic"] = interpreter_semantic
        return inner(*arguments, **named)

    scope.set_attr(place, name, run)


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter() -> Iterator[None]:
    """Skips three quarters of the interpreter's work on small tensors, which does not affect results.

    At each launch and at each call of a jitted function, `tl.sum` among them, the interpreter searches all of `tl` for
    functions to replace. For each sum of integers it checks overflow, for an assertion of the debug mode. At each load
    it builds its table of types, and for each tensor the type and the shape anew. Each operation on two operands checks
    their types, and copies a number into a tensor of the other operand's shape. Each result is checked once more.
    """
    import triton.language as tl
    from triton import knobs
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    with pytest.MonkeyPatch.context() as patch:
        if knobs.runtime.interpret:
            patch.setattr(interpreter, "_patch_attr", patch_attribute)
            replaced = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
            patch.setattr(interpreter, "_patch_lang", lambda _function: type(replaced)())
            assert not builder.options.debug
            patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
            patch.setattr(interpreter, "_get_np_dtype", by_name(interpreter._get_np_dtype))
            patch.setattr(tl.block_type, "__init__", once_a_block(tl.block_type.__init__))
            patch.setattr(tl.tensor, "__init__", once_a_type(tl.tensor.__init__))
            patch.setattr(interpreter.TensorHandle, "__post_init__", lambda _handle: None)
            check = TritonSemantic.binary_op_type_checking_impl
            patch.setattr(TritonSemantic, "binary_op_type_checking_impl", checked_once(check, tl.tensor))
            unwrap = tl.core._unwrap_if_constexpr
            patch.setattr(tl.core, "_unwrap_if_constexpr", without_constants(unwrap, tl.constexpr, tl.tensor))
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
