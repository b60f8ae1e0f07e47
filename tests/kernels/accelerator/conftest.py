"""Products of the interpreter whose order of sums is ours, for cases that compare bits."""

from __future__ import annotations

import pytest


@pytest.fixture
def ordered_sums(monkeypatch):
    """`tl.dot` adds its products one after the other along the depth, so that equal rows give equal bits everywhere.

    The interpreter multiplies by NumPy, whose BLAS adds in an order that depends on the processor, on the shape and on
    a row's number within the tile. A device's products do not depend on the row's number.
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
