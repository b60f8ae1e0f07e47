"""Recurrent layers on a CPU: calls of the C kernels of `_fast/cpu`, which compute token by token from the base.

The functions take the references' arguments. Inputs, states and tails are float32 or bfloat16; calls with other dtypes,
such as float64, go to the references. No bit depends on how a sequence is cut into steps, on other rows or on threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from _fast import cpu
from engine.attention.state_meta import MAX_CHECKPOINTS, StateMeta
from engine.kernels.state.delta import DeltaShape, DeltaWeights, StatePages, delta_rule_reference
from engine.kernels.state.places import Place
from engine.kernels.state.selective import (
    SelectiveInputs,
    SelectiveShape,
    SelectiveWeights,
    selective_conv_reference,
    selective_scan_reference,
)
from engine.kernels.state.ssd import SsdShape, SsdWeights, ssd_reference

FLOATS = (torch.float32, torch.bfloat16)
ORDERS = {"none": 0, "before gate": 1, "behind gate": 2, "bare": 3}


def delta_rule_on_host(
    projected: Tensor, weights: DeltaWeights, shape: DeltaShape, cache: StatePages, meta: StateMeta
) -> Tensor:
    places = (*cache.state, *cache.tail)
    limits = (
        (shape.key_dim, cpu.KEY_MAX), (shape.value_dim, cpu.KEY_MAX), (shape.taps, cpu.TAPS_MAX),
        (shape.ring, cpu.PORTION - 1),
    )  # fmt: skip
    if not _fits(projected.dtype, places, (places[1], places[5]), limits):
        return delta_rule_reference(projected, weights, shape, cache, meta)
    _check(projected, shape.columns[-1], cache, (weights.taps, weights.a_log, weights.dt_bias))
    out = projected.new_empty(len(projected), shape.value_width)
    cpu.delta_rule(
        out.data_ptr(), projected.data_ptr(), _pages(cache, shape.ring), _rows(meta), _places(places),
        weights.taps.data_ptr(), weights.a_log.data_ptr(), weights.dt_bias.data_ptr(), _gain(weights.norm).data_ptr(),
        len(projected), projected.stride(0), shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim,
        shape.taps, shape.eps, shape.per_channel, shape.sigmoid, projected.dtype is torch.bfloat16,
        weights.norm.dtype is torch.bfloat16,
    )  # fmt: skip
    return out


def ssd_on_host(projected: Tensor, weights: SsdWeights, shape: SsdShape, cache: StatePages, meta: StateMeta) -> Tensor:
    places = (*cache.state, *cache.tail)
    limits = ((shape.state_size, cpu.KEY_MAX), (shape.taps, cpu.TAPS_MAX), (shape.ring, cpu.PORTION - 1))
    if not _fits(projected.dtype, places, (places[1], places[4]), limits):
        return ssd_reference(projected, weights, shape, cache, meta)
    numbers = (weights.taps, weights.bias, weights.a_log, weights.dt_bias, weights.d)
    _check(projected, shape.columns[-1], cache, numbers)
    gain = None if weights.norm is None else _gain(weights.norm)
    order = ORDERS[shape.norm]
    out = projected.new_empty(len(projected), shape.inner)
    cpu.ssd(
        out.data_ptr(), projected.data_ptr(), _pages(cache, shape.ring), _rows(meta), _places(places),
        weights.taps.data_ptr(), _address(weights.bias), weights.a_log.data_ptr(), weights.dt_bias.data_ptr(),
        weights.d.data_ptr(), _address(gain), len(projected), projected.stride(0), shape.heads, shape.head_dim,
        shape.groups, shape.state_size, shape.taps, shape.eps, order, projected.dtype is torch.bfloat16,
        gain is not None and gain.dtype is torch.bfloat16,
    )  # fmt: skip
    return out


def selective_conv_on_host(
    projected: Tensor, weights: SelectiveWeights, shape: SelectiveShape, cache: StatePages, meta: StateMeta
) -> Tensor:
    places = (cache.state[1], cache.tail[3])
    if not _fits(projected.dtype, places, places, ((shape.taps, cpu.TAPS_MAX),)):
        return selective_conv_reference(projected, weights, shape, cache, meta)
    _check(projected, 2 * shape.inner, cache, (weights.taps, weights.bias))
    out = projected.new_empty(len(projected), shape.inner)
    cpu.state_convolution(
        out.data_ptr(), projected.data_ptr(), _pages(cache, shape.ring), _rows(meta), _places(places),
        weights.taps.data_ptr(), _address(weights.bias), len(projected), projected.stride(0), shape.inner, shape.taps,
        projected.dtype is torch.bfloat16,
    )  # fmt: skip
    return out


def selective_scan_on_host(
    given: SelectiveInputs, weights: SelectiveWeights, shape: SelectiveShape, cache: StatePages, meta: StateMeta
) -> Tensor:
    inputs, dtype = (given.x, given.steps, given.b, given.c, given.z), given.x.dtype
    places = (cache.state[0], *cache.tail[:3])
    if not _fits(dtype, places, places[1:], ((shape.state_size, cpu.FEW_STATES),)):
        return selective_scan_reference(given, weights, shape, cache, meta)
    widths = (shape.inner, shape.inner, shape.state_size, shape.state_size, shape.inner)
    numbers = (weights.a_log, weights.dt_bias, weights.d)
    for each, width in zip(inputs, widths):
        assert each.dtype is dtype, f"inputs have {dtype} and {each.dtype}; one dtype was due"
        assert len(each) == len(given.x), f"{len(given.x)} and {len(each)} tokens"
        _check(each, width, cache, numbers)
    out = given.x.new_empty(len(given.x), shape.inner)
    cpu.selective(
        out.data_ptr(), tuple(each.data_ptr() for each in inputs), tuple(each.stride(0) for each in inputs),
        _pages(cache, shape.ring), _rows(meta), _places(places), weights.a_log.data_ptr(), weights.dt_bias.data_ptr(),
        weights.d.data_ptr(), len(given.x), shape.inner, shape.state_size, dtype is torch.bfloat16,
    )  # fmt: skip
    return out


def _fits(
    dtype: torch.dtype, places: Sequence[Place], inputs: Sequence[Place], limits: Sequence[tuple[int, int]]
) -> bool:
    """True if the C kernels support the dtypes (`inputs` must have `dtype`) and each (size, limit) of `limits`."""
    floats = dtype in FLOATS and all(place.dtype in FLOATS for place in places)
    return floats and all(place.dtype is dtype for place in inputs) and all(size <= most for size, most in limits)


def _check(x: Tensor, columns: int, cache: StatePages, numbers: Sequence[Tensor | None]) -> None:
    assert x.shape[1] == columns, f"{list(x.shape)}: {columns} columns were due"
    assert x.stride(1) == 1, f"columns are apart: strides {x.stride()}"
    assert cache.pages.stride(1) == 1, f"a page's bytes are apart: strides {cache.pages.stride()}"
    for each in numbers:
        if each is not None:
            assert each.dtype is torch.float32, f"weights have {each.dtype}; float32 was due"
            assert each.is_contiguous(), f"weights are apart: strides {each.stride()}"


def _gain(weight: Tensor) -> Tensor:
    """Checks and returns a norm's weight: contiguous, float32 or bfloat16."""
    assert weight.dtype in FLOATS, f"a norm's weight has {weight.dtype}; float32 or bfloat16 was due"
    assert weight.is_contiguous(), f"a norm's weight is apart: strides {weight.stride()}"
    return weight


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _pages(cache: StatePages, ring: int) -> tuple[int, int, int]:
    return cache.pages.data_ptr(), cache.pages.stride(0), ring


def _rows(meta: StateMeta) -> tuple[int, ...]:
    """Returns addresses in the order of StateMeta's fields, the stride of runs, and the number of rows."""
    ids = (meta.base_run, meta.write_run, meta.tail_run, meta.base, meta.new_base, meta.query_start, meta.start)
    checks = (meta.checkpoint_run, meta.checkpoint_at)
    assert all(each.dtype is torch.int32 for each in (meta.runs, *ids, *checks)), "a step's rows are int32"
    assert all(each.is_contiguous() for each in (meta.runs[0], *ids, *checks)), "a step's rows are apart"
    assert all(each.shape[1] == MAX_CHECKPOINTS for each in checks), f"{MAX_CHECKPOINTS} checkpoints a row were due"
    found = (each.data_ptr() for each in chain((meta.runs,), ids, checks))
    return (*found, meta.runs.stride(0), len(meta.base))


def _places(places: Sequence[Place]) -> tuple[tuple[int, ...], ...]:
    return tuple(
        (place.first, place.per_page, place.rows, place.width, int(place.dtype is torch.bfloat16)) for place in places
    )
