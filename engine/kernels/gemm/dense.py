"""Unquantized linear layers: y = x W^T + bias, with W packed once at load.

Packing (CPU): panels of 64 output rows, [ceil(N/64), K, 64], so one microkernel streams a panel front to back for a
single token and keeps it in cache for many. Each output is one fused multiply-add chain over k = 0..K-1, whatever the
number of tokens: the base of the engine's batch invariance. bfloat16 weights stay bfloat16 in memory (float32 ones too,
when every value survives the narrowing) and are widened in registers, which is exact. Users: every layer with weights.

On an accelerator the matrix stays as it is, in the activations' dtype, and the vendor's library multiplies, by the
algorithm that gemm/fastest found. Where kernels/tune says so, few rows go to gemm/split_k, and gated products of more
rows to gemm/gated_one_wave or gemm/gated_persistent. Weights packed for it go to gemm/invariant, which keeps the
promise above.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from _fast import cpu
from engine.kernels.activation import Activation, glu
from engine.kernels.gemm.descriptors import is_aligned
from engine.kernels.gemm.epilogue import Unscaled, empty_rows, empty_unscaled
from engine.kernels.gemm.fastest import Kind, multiplied, note
from engine.kernels.gemm.gated_one_wave import one_wave_product
from engine.kernels.gemm.gated_persistent import gated_product, gated_reference
from engine.kernels.gemm.invariant import invariant_linear
from engine.kernels.gemm.split_k import Split, arrivals, split_linear
from engine.kernels.norm import rms_norm
from engine.kernels.tune import few_rows, many_gated, one_wave_gated

GatedProduct = Callable[[Tensor, Tensor, Tensor | None, Tensor, Activation], None]  # x, weight, bias, out

PANEL = 64  # output rows in a panel
HUGE_PAGE = 2 << 20  # bytes

_invariant = False  # of what is packed from now on


def set_invariant(value: bool) -> None:
    """Whether weights packed for an accelerator give a row the same bits in any company (on a CPU they always do).

    Process-wide; the runtime sets it once, before weights load.
    """
    global _invariant
    _invariant = value


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """Weights of one linear layer, ready for `linear` or `gated_linear`. Owner: the model; read only."""

    panels: Tensor  # [num_panels, in_features, 64] float32 or bfloat16; rows past out_features are zero
    bias: Tensor | None  # [num_panels * 64] float32, zero-padded
    out_features: int  # of a gated layer: twice the width of its result
    in_features: int
    gated: bool = False  # each panel holds 32 gate rows, then the 32 up rows that go with them
    plain: bool = False  # on an accelerator: panels is the weight itself, [out_features, in_features], bias unpadded
    invariant: bool = False  # plain: multiplied by gemm/invariant

    def weight(self) -> Tensor:
        """The unpacked weight, [out_features, in_features] (gated: all gate rows, then all up rows); a copy."""
        if self.plain:
            return self.panels
        return self._unpack(self.panels.transpose(1, 2).reshape(-1, self.in_features))

    def plain_bias(self) -> Tensor | None:
        """The bias in the order of `weight`, [out_features]; float32, on an accelerator the weight's dtype."""
        if self.plain:
            return self.bias
        return None if self.bias is None else self._unpack(self.bias[:, None]).flatten()

    def _unpack(self, rows: Tensor) -> Tensor:
        if not self.gated:
            return rows[: self.out_features]
        halves = rows.view(-1, 2, PANEL // 2, rows.shape[1]).transpose(0, 1)  # [2, num_panels, 32, columns]
        return halves.reshape(2, -1, rows.shape[1])[:, : self.out_features // 2].reshape(self.out_features, -1)


def stacked(pieces: list[Tensor]) -> Tensor:
    """The pieces one below the other; no copy where they lie so already, as an accelerator's loader puts them."""
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


def pack(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """weight [N, K] float32 or bfloat16, bias [N] or None -> PackedLinear (a copy; the originals can go)."""
    assert weight.dim() == 2, f"weight has shape {tuple(weight.shape)}; [out_features, in_features] is needed"
    rows = weight.shape[0]
    if weight.is_cuda:
        return pack_plain(weight, bias, gated=False)
    padded = -(-rows // PANEL) * PANEL
    wide_bias = None if bias is None else _pad(bias.to(torch.float32), padded)
    return PackedLinear(_panels(_pad(_narrowed(weight), padded)), wide_bias, rows, weight.shape[1])


def pack_gated(
    gate: Tensor, up: Tensor, gate_bias: Tensor | None = None, up_bias: Tensor | None = None
) -> PackedLinear:
    """gate and up [I, K], biases [I], both or none -> PackedLinear for `gated_linear`: both products in one pass."""
    assert gate.dim() == 2 and gate.shape == up.shape, f"gate {tuple(gate.shape)} and up {tuple(up.shape)} must match"
    assert (gate_bias is None) == (up_bias is None), "give both biases or none; one that is missing is zeros"
    width, columns = gate.shape
    bias = None
    if gate_bias is not None and up_bias is not None:
        bias = torch.stack([gate_bias, up_bias])
    if gate.is_cuda:
        return pack_plain(stacked([gate, up]), None if bias is None else bias.flatten(), gated=True)
    if bias is not None:
        bias = _interleave(bias.to(torch.float32)[..., None]).flatten()
    rows = _interleave(_narrowed(torch.stack([gate, up])))
    return PackedLinear(_panels(rows), bias, 2 * width, columns, gated=True)


def pack_plain(weight: Tensor, bias: Tensor | None, gated: bool) -> PackedLinear:
    """weight [N, K] (gated: all gate rows, then all up rows) as an accelerator's libraries want it; not a copy."""
    narrow = None if bias is None else bias.to(weight.dtype)  # once here, not in every call
    rows, columns = weight.shape
    if weight.is_cuda:
        arrivals(weight.device)  # allocated here, since a product may first run while a graph is captured
    return PackedLinear(weight.contiguous(), narrow, rows, columns, gated=gated, plain=True, invariant=_invariant)


def linear(x: Tensor, packed: PackedLinear, out: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """x [..., K] float32 or bfloat16 -> x W^T + bias (+ residual) [..., N] of x's dtype.

    x is contiguous, or two-dimensional with contiguous rows. The result goes to `out` when given: contiguous, of the
    result's shape; `residual` has that shape too and may be `out` itself, which makes it `out += x W^T + bias`.
    """
    if packed.plain:
        return plain_linear(x, packed, out, residual)
    if not x.is_cpu or (x.dtype is not torch.float32 and x.dtype is not torch.bfloat16):
        y = linear_reference(x, packed, None, residual)
        return y if out is None else out.copy_(y)
    assert not packed.gated, "these weights are packed for gated_linear"
    return _launch(x, packed, packed.out_features, out, residual)


def gated_linear(x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
    """x [..., K] -> silu(x gate^T + b) * (x up^T + c) [..., I] of x's dtype; the same rules as `linear`."""
    if packed.plain:
        return plain_gated(x, packed, out)
    if not x.is_cpu or (x.dtype is not torch.float32 and x.dtype is not torch.bfloat16):
        y = gated_linear_reference(x, packed)
        return y if out is None else out.copy_(y)
    assert packed.gated, "these weights are not packed by pack_gated"
    return _launch(x, packed, packed.out_features // 2, out, None)


def plain_linear(x: Tensor, packed: PackedLinear, out: Tensor | None, residual: Tensor | None) -> Tensor:
    """`linear` on an accelerator: one launch, but for the vendor's library with a residual beside a bias."""
    weight, bias, width = packed.panels, packed.bias, packed.out_features
    rows = _plain_rows(x, packed)
    _note(packed, residual is not None)
    y = rows.new_empty(len(rows), width) if out is None else out.view(-1, width)
    added = None
    if residual is not None:  # one and the same tensor as y spares the vendor's library a copy before the product
        added = y if residual is out else residual.view(-1, width)
    cut = _cut(rows, packed, False)
    if packed.invariant:
        invariant_linear(rows, weight, bias, added, y)
    elif cut is not None:
        split_linear(rows, weight, bias, added, y, None, cut)
    elif bias is None and multiplied(rows, weight, packed.gated, added, y):
        pass  # launched
    elif added is not None:
        torch.addmm(added, rows, weight.t(), out=y)
        if bias is not None:
            y += bias
    elif bias is not None:
        torch.addmm(bias, rows, weight.t(), out=y)
    else:
        torch.mm(rows, weight.t(), out=y)
    return y.view(*x.shape[:-1], width) if out is None else out


def plain_gated(x: Tensor, packed: PackedLinear, out: Tensor | None) -> Tensor:
    """`gated_linear` on an accelerator: one launch where kernels/tune has one for these rows, else two."""
    rows, width = _plain_rows(x, packed), packed.out_features // 2
    _note(packed, False)
    product = _gated_of(rows, packed)
    if product is None:
        y = glu(plain_linear(x, packed, None, None), Activation.SILU)
        return y if out is None else out.copy_(y)
    y = rows.new_empty(len(rows), width) if out is None else out.view(-1, width)
    product(rows, packed.panels, packed.bias, y, Activation.SILU)
    return y.view(*x.shape[:-1], width) if out is None else out


def add_linear(residual: Tensor, x: Tensor, packed: PackedLinear, gain: Tensor, eps: float) -> Unscaled | None:
    """residual [M, N] += x W^T + bias, in place, x [M, K], where the next product reads rms_norm(residual, gain, eps).

    Few rows on an accelerator: returns them Unscaled, for `normed_linear`, which then spends no kernel on the norm.
    """
    cut = _cut(x, packed, False, normed=True)
    after = None if cut is None else empty_unscaled(residual, cut.block_n, gain, eps)
    if cut is None or after is None:
        linear(x, packed, residual, residual)
        return None
    split_linear(_plain_rows(x, packed), packed.panels, packed.bias, residual, residual, None, cut, after=after)
    return after


def normed_linear(residual: Tensor, gain: Tensor, eps: float, ahead: Unscaled | None, packed: PackedLinear) -> Tensor:
    """`linear`, of weights from `pack_gated` `gated_linear`, of rms_norm(residual, gain, eps), residual [M, K].

    `ahead` is what `add_linear` returned with the same residual, gain and eps, if it came before.
    """
    cut = None if ahead is None else _cut(residual, packed, packed.gated, normed=True)
    if cut is None or ahead is None:
        rows = rms_norm(residual, gain, eps)
        return gated_linear(rows, packed) if packed.gated else linear(rows, packed)
    if packed.gated:  # a product reads that next
        y = empty_rows(residual, packed.out_features // 2)
    else:
        y = residual.new_empty(len(residual), packed.out_features)
    activation = Activation.SILU if packed.gated else None
    split_linear(ahead.rows, packed.panels, packed.bias, None, y, activation, cut, before=ahead)
    return y


def _cut(rows: Tensor, packed: PackedLinear, gated: bool, normed: bool = False) -> Split | None:
    """How gemm/split_k multiplies these rows [M, K], where it is the way to; `normed`: with a norm before or after."""
    if not _takes_ours(rows, packed) or (normed and rows.dtype is torch.float16):  # a norm's gain leaves its range
        return None
    cut = few_rows(len(rows), packed.out_features // (1 + gated), packed.in_features, gated)
    return cut if cut is not None and _can_load(cut, rows, packed) else None


def _can_load(cut: Split, rows: Tensor, packed: PackedLinear) -> bool:
    return not cut.block_m or (is_aligned(rows) and is_aligned(packed.panels))


def _gated_of(rows: Tensor, packed: PackedLinear) -> GatedProduct | None:
    """What launches one kernel for the gated product of these rows [M, K], where there is a `gated_way`."""
    if not _takes_ours(rows, packed):
        return None
    way = gated_way(len(rows), packed.out_features // 2, packed.in_features)
    if not isinstance(way, Split):
        return way
    if not _can_load(way, rows, packed):
        return None
    return lambda x, weight, bias, out, activation: split_linear(x, weight, bias, None, out, activation, way)


def gated_way(rows: int, width: int, depth: int) -> Split | GatedProduct | None:
    """How `gated_linear` takes so many rows, weights [width, depth] and no norm; the same where it is the same kernel.

    A cut for gemm/split_k, or a launcher; None: the vendor's library.
    """
    cut = few_rows(rows, width, depth, True)
    if cut is not None:
        return cut
    if one_wave_gated(rows, width, depth):
        return one_wave_product
    return gated_product if many_gated(rows, width, depth) else None


def is_vendors(kind: Kind, rows: int) -> bool:
    """Whether the vendor's library multiplies so many rows, with no norm beside them."""
    if kind.gated:
        return not gated_way(rows, kind.width // 2, kind.depth)
    return few_rows(rows, kind.width, kind.depth, False) is None


def _note(packed: PackedLinear, added: bool) -> None:
    if packed.bias is None and not packed.invariant:  # with a bias torch asks the library for a product that adds it
        note(packed.panels, added, packed.gated)


def _takes_ours(rows: Tensor, packed: PackedLinear) -> bool:
    """Whether a kernel of ours may stand for the vendor's: matrix units take bfloat16 and float16 as they are."""
    return packed.plain and not packed.invariant and rows.dtype in (torch.bfloat16, torch.float16)


def _plain_rows(x: Tensor, packed: PackedLinear) -> Tensor:
    assert x.dtype is packed.panels.dtype, f"x is {x.dtype}, the weights {packed.panels.dtype}: load them as {x.dtype}"
    return x if x.dim() == 2 else x.reshape(-1, packed.in_features)


def linear_reference(
    x: Tensor, packed: PackedLinear, out: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    bias = packed.plain_bias()
    y = torch.nn.functional.linear(x.to(wide), packed.weight().to(wide), None if bias is None else bias.to(wide))
    if residual is not None:
        y = y + residual
    return y.to(x.dtype) if out is None else out.copy_(y)


def gated_linear_reference(x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
    return gated_reference(x, packed.weight(), packed.plain_bias(), out, Activation.SILU)


def _launch(x: Tensor, packed: PackedLinear, width: int, out: Tensor | None, residual: Tensor | None) -> Tensor:
    depth, shape = packed.in_features, x.shape
    assert shape[-1] == depth, f"x has {shape[-1]} features; this layer takes {depth}"
    if x.is_contiguous():
        rows, stride = x.numel() // depth, depth
    else:
        assert len(shape) == 2 and x.stride(1) == 1, "x must be contiguous, or two-dimensional with contiguous rows"
        rows, stride = shape[0], x.stride(0)
    if out is None:
        out = x.new_empty(rows, width) if len(shape) == 2 else x.new_empty((*shape[:-1], width))
    else:
        assert out.shape[-1] == width and out.numel() == rows * width and out.dtype is x.dtype and out.is_contiguous()
    address = 0
    if residual is not None:
        assert residual.shape == out.shape and residual.dtype is x.dtype and residual.is_contiguous()
        address = residual.data_ptr()
    panels, bias = packed.panels, packed.bias
    cpu.linear(
        out.data_ptr(), x.data_ptr(), panels.data_ptr(), 0 if bias is None else bias.data_ptr(), address,
        rows, depth, packed.out_features, stride, width, width,
        x.dtype is torch.bfloat16, panels.dtype is torch.bfloat16, packed.gated, Activation.SILU,
    )  # fmt: skip
    return out


def _narrowed(weight: Tensor) -> Tensor:
    """float32 weights that came from a bfloat16 checkpoint lose nothing in bfloat16, and stream in half the time."""
    assert weight.dtype in (torch.float32, torch.bfloat16), (
        f"weights are {weight.dtype}; float32 or bfloat16 can be packed"
    )
    if weight.dtype == torch.bfloat16:
        return weight
    few = weight.flatten()[:4096]  # enough to tell most float32 checkpoints without a pass over the whole
    if not torch.equal(few.to(torch.bfloat16).to(torch.float32), few):
        return weight
    narrow = weight.to(torch.bfloat16)
    return narrow if torch.equal(narrow.to(torch.float32), weight) else weight


def _pad(rows: Tensor, count: int) -> Tensor:
    if rows.shape[0] == count:
        return rows
    padded = rows.new_zeros(count, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    return padded


def _interleave(both: Tensor) -> Tensor:
    """[2, I, columns] -> 32 rows of the first, the same 32 of the second, and so on; padded with zeros at the end."""
    half = PANEL // 2
    _, width, columns = both.shape
    padded = both.new_zeros(2, -(-width // half) * half, columns)
    padded[:, :width] = both
    return padded.view(2, -1, half, columns).transpose(0, 1).reshape(-1, columns)


def _panels(rows: Tensor) -> Tensor:
    """[N, K] -> [N / 64, K, 64], in huge pages where that many bytes make them worthwhile."""
    panels = rows.view(-1, PANEL, rows.shape[1]).transpose(1, 2)
    size = rows.element_size()
    if not rows.is_cpu or rows.numel() * size < HUGE_PAGE:
        return panels.contiguous()
    room = torch.empty(rows.numel() + HUGE_PAGE // size, dtype=rows.dtype)
    first = -room.data_ptr() % HUGE_PAGE // size  # the slack is never written, so it costs no memory
    cpu.advise_huge(room.data_ptr() + first * size, rows.numel() * size)
    return room[first : first + rows.numel()].view(panels.shape).copy_(panels)
