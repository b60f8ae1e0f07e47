"""Makes a Weight from the matrices of a checkpoint, in the form for its device.

Owner: the thread that builds the model. In: matrices on the device, and a Placement, one for all weights of a model.
Out: panels on a CPU; on an accelerator the matrix itself, in one of two forms. Quantised matrices have three more
forms.
"""

# ruff: noqa: PT018 (arguments are checked in few lines)
from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.kernels.gemm.codes import Codes, alike, joined
from engine.kernels.gemm.dense import DenseWeight
from engine.kernels.gemm.float8_weight import pack_float8, takes
from engine.kernels.gemm.group_panels import pack_group_panels
from engine.kernels.gemm.group_weight import pack_groups
from engine.kernels.gemm.invariant import InvariantWeight
from engine.kernels.gemm.panels import pack_paired, pack_panels
from engine.kernels.gemm.parts import PartsWeight
from engine.kernels.gemm.split_k import arrivals
from engine.kernels.gemm.timed import TimedProducts
from engine.kernels.gemm.weight import Weight
from engine.kernels.target import target


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """The device of the weights, and how the device multiplies by them."""

    dtype: torch.dtype  # the activations' dtype
    device: str
    invariant: bool = False  # a row's bits do not depend on other rows on an accelerator (on a CPU they never do)
    products: TimedProducts = field(default_factory=TimedProducts)  # the accelerator's
    float8_units: bool = field(default_factory=lambda: target().multiplies_float8)  # FP8 products are supported


def stacked(pieces: list[Tensor]) -> Tensor:
    """Stacks the pieces along the rows, without a copy if they are contiguous already, as from an accelerator's
    loader."""
    first, *others = pieces
    end = first.data_ptr() + first.numel() * first.element_size()
    storage = first.untyped_storage().data_ptr()
    for piece in others:
        follows = piece.data_ptr() == end and piece.untyped_storage().data_ptr() == storage
        if not (follows and piece.dtype == first.dtype and first.is_contiguous() and piece.is_contiguous()):
            return torch.cat(pieces)
        end += piece.numel() * piece.element_size()
    rows = sum(piece.shape[0] for piece in pieces)
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def pack(weight: Tensor, bias: Tensor | None, placement: Placement) -> Weight:
    """weight [N, K] float32 or bfloat16, bias [N] or None -> Weight; on a CPU a copy, so the originals can be freed."""
    assert weight.dim() == 2, f"weight has shape {tuple(weight.shape)}; [out_features, in_features] is needed"
    if placement.device == "cpu":
        return pack_panels(weight, bias)
    return pack_unchanged(weight, bias, placement)


def pack_gated(gate: Tensor, up: Tensor, placement: Placement) -> Weight:
    """gate and up [I, K], without biases -> Weight for `gated`."""
    assert gate.dim() == 2 and gate.shape == up.shape, f"gate {tuple(gate.shape)} and up {tuple(up.shape)} must match"
    if placement.device == "cpu":
        return pack_paired((gate, up), None)
    return pack_unchanged(stacked([gate, up]), None, placement)


def pack_unchanged(weight: Tensor, bias: Tensor | None, placement: Placement) -> Weight:
    """A Weight of the unchanged matrix [N, K] (gated: all gate rows, then all up rows) on an accelerator; not a
    copy."""
    narrow = None if bias is None else bias.to(weight.dtype)  # once here, not in every call
    if weight.is_cuda:
        arrivals(weight.device)  # allocated here, since a product may first run while a graph is captured
    if placement.invariant:
        return InvariantWeight(weight.contiguous(), narrow)
    return DenseWeight(weight.contiguous(), narrow, placement.products.algorithms)


def pack_pieces(pieces: list[Codes | Tensor], bias: Tensor | None, placement: Placement, gated: bool) -> Weight:
    """A Weight of stacked matrices, quantised or floats [N, K]; `gated`: gate's rows, then as many of up.

    Adjacent matrices in the same form become one product: qkv | z | b | a are two if only b and a are floats.
    """
    runs = _runs(pieces)
    if len(runs) == 1 and isinstance(runs[0], Codes):
        return _pack_codes(runs[0], bias, placement, gated)
    parts = (
        _pack_codes(run, None, placement, gated=False) if isinstance(run, Codes) else pack(run, None, placement)
        for run in runs
    )
    widths = tuple(len(run.values if isinstance(run, Codes) else run) for run in runs)
    return PartsWeight(tuple(parts), widths, bias)


def _runs(pieces: list[Codes | Tensor]) -> list[Codes | Tensor]:
    """Adjacent matrices in the same form, joined."""
    runs = [[pieces[0]]]
    for piece in pieces[1:]:
        if _is_alike(runs[-1][0], piece):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return [_as_one(run) for run in runs]


def _is_alike(first: Codes | Tensor, piece: Codes | Tensor) -> bool:
    if isinstance(first, Codes) and isinstance(piece, Codes):
        return alike([first, piece])
    return isinstance(first, Tensor) and isinstance(piece, Tensor) and first.dtype == piece.dtype


def _as_one(run: list[Codes | Tensor]) -> Codes | Tensor:
    codes = [piece for piece in run if isinstance(piece, Codes)]
    return joined(codes) if codes else stacked([piece for piece in run if isinstance(piece, Tensor)])


def _pack_codes(codes: Codes, bias: Tensor | None, placement: Placement, gated: bool) -> Weight:
    if placement.device == "cpu":
        return pack_group_panels(codes.with_float_inputs(), bias, gated)
    if placement.float8_units and takes(codes):
        return pack_float8(codes, bias, placement.dtype, placement.products.scaled, placement.invariant)
    return pack_groups(codes.with_float_inputs(), bias, placement.products.long, placement.invariant)
