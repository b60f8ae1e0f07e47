"""Packing: an adapter's tensors become the matrices of its sites, in the model's dtype.

Owner: the thread of the pool that loads the adapter. In: a Plan, and the tensors one after the other. Out: PackedSite
and PackedExperts. The scale is multiplied into B in float32, before B is rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.base.errors import AdapterError
from engine.lora.adapter import PackedExperts, PackedSite
from engine.lora.plan import Piece, Plan
from engine.lora.targets import ExpertsTarget, LinearTarget


class Packing:
    """The sites of one adapter while they are filled."""

    __slots__ = ("_plan", "_sites")

    def __init__(self, plan: Plan, dtype: torch.dtype) -> None:
        """Allocates the sites, filled with zeros."""
        self._plan = plan
        self._sites = {path: _empty(target, plan.ranks[path], dtype) for path, target in plan.targets.items()}

    def add(self, name: str, tensor: Tensor) -> None:
        """Copies a tensor of the file into its place. AdapterError if it holds NaN or infinity."""
        piece = self._plan.pieces[name]
        site = self._sites[piece.target.path]
        if not bool(torch.isfinite(tensor.abs().amax())):
            raise AdapterError(f"{name} holds NaN or infinity; the adapter is damaged")
        if isinstance(site, PackedExperts):
            _add_experts(site, piece, tensor)
        else:
            _add_linear(site, piece, tensor)
        if piece.half == "b" and site.a.dtype == torch.float16:
            parts = [site.b[each] for each in piece.pieces]
            if not all(bool(torch.isfinite(part.abs().amax())) for part in parts):
                raise AdapterError(f"{name}: float16 cannot hold its product with the scale; use --dtype bfloat16")

    def sites(self) -> dict[str, PackedSite | PackedExperts]:
        """All sites; every tensor was added."""
        return dict(self._sites)


def _empty(target: LinearTarget | ExpertsTarget, rank: int, dtype: torch.dtype) -> PackedSite | PackedExperts:
    """A site of zeros."""
    a_shape = len(target.rows) * rank, target.in_features
    if isinstance(target, ExpertsTarget):
        count = target.num_experts
        ups = tuple(torch.zeros(count, rows, rank, dtype=dtype) for rows in target.rows)
        return PackedExperts(torch.zeros(count, *a_shape, dtype=dtype), ups)
    return PackedSite(
        torch.zeros(a_shape, dtype=dtype), tuple(torch.zeros(rows, rank, dtype=dtype) for rows in target.rows)
    )


def _add_linear(site: PackedSite, piece: Piece, tensor: Tensor) -> None:
    """Adds a tensor [rank, in] or [rows, rank]."""
    target, rank = piece.target, piece.rank
    assert isinstance(target, LinearTarget)
    if piece.half == "a":
        for each in piece.pieces:
            site.a[each * site.rank : each * site.rank + rank] = tensor
        return
    scaled = tensor.float() * piece.scale
    for each, rows in zip(piece.pieces, scaled.split([target.rows[each] for each in piece.pieces])):
        site.b[each][:, :rank] = target.arranged(each, rows)


def _add_experts(site: PackedExperts, piece: Piece, tensor: Tensor) -> None:
    """Adds a tensor of one expert, or of all experts."""
    target, rank = piece.target, piece.rank
    assert isinstance(target, ExpertsTarget)
    count = target.num_experts
    at = slice(None) if piece.expert is None else slice(piece.expert, piece.expert + 1)
    if piece.expert is not None:
        found = tensor[None]
    elif (piece.half == "a") is not piece.swapped:  # lora_A: [experts * rank, n]
        found = tensor.view(count, rank, -1)
    else:  # lora_B: [n, rank * experts]
        found = tensor.view(-1, rank, count).permute(2, 0, 1)
    if piece.swapped:
        found = found.transpose(1, 2)
    if piece.half == "a":  # [experts, rank, in]
        for each in piece.pieces:
            site.a[at, each * site.rank : each * site.rank + rank] = found
        return
    scaled = found.float() * piece.scale  # [experts, rows, rank]
    if target.interleaved and piece.expert is None:
        parts = tuple(scaled[:, each :: len(piece.pieces)] for each in range(len(piece.pieces)))
    else:
        parts = scaled.split([target.rows[each] for each in piece.pieces], 1)
    for each, rows in zip(piece.pieces, parts):
        site.b[each][at, :, :rank] = rows
