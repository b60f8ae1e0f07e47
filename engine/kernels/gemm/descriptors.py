"""Tensor descriptors: kernels load and store whole blocks by them (TMA; CUDA from sm_90 on).

Thread: any. In: tensors whose rows begin at multiples of 16 bytes. Out: descriptors, passed to a kernel by value, so a
graph holds them. Users: the products of this folder.
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
    """Whether this device loads blocks by descriptors: the devices whose kernels overlap do."""
    return overlaps()


def is_aligned(tensor: Tensor) -> bool:
    """Whether every row begins at a multiple of 16 bytes, as a descriptor wants."""
    return not (tensor.data_ptr() | tensor.stride(0) * tensor.element_size()) % 16


def describe(tensor: Tensor, *block: int) -> Any:
    """The tensor, read or written in blocks of these sides."""
    return _tools.TensorDescriptor.from_tensor(tensor, list(block))
