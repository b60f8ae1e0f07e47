"""Tensor descriptors, with which kernels load and store whole blocks (TMA; CUDA from sm_90 on).

Thread: any. In: tensors whose rows are 16-byte aligned. Out: descriptors, passed to a kernel by value, so graphs hold
them. Users: the products of this folder.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from engine.kernels.pdl import overlaps
from engine.kernels.target import HAS_TRITON

if HAS_TRITON:
    _tools: Any = importlib.import_module("triton.tools.tensor_descriptor")


def has_descriptors() -> bool:
    """Whether this device loads blocks by descriptors, which is true for devices whose kernels overlap."""
    return overlaps()


def is_aligned(tensor: Tensor) -> bool:
    """Whether every row is 16-byte aligned, which descriptors require."""
    return not (tensor.data_ptr() | tensor.stride(0) * tensor.element_size()) % 16


def describe(tensor: Tensor, *block: int) -> Any:
    """A descriptor of the tensor for blocks of this shape."""
    return _tools.TensorDescriptor.from_tensor(tensor, list(block))
