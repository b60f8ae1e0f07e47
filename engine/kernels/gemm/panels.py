"""Weights of a CPU: panels of 64 output rows, [ceil(N/64), K, 64].

One microkernel streams a panel sequentially for a single token, and reuses the panel in cache for many tokens. Each
output is one fused multiply-add chain over k = 0..K-1, whatever the number of tokens, which makes the engine
batch-invariant. bfloat16 weights stay bfloat16 in memory (float32 weights become bfloat16 if every value is exact in
it) and are widened in registers, which is exact. Users: every layer with float weights, on a CPU.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from _fast import cpu
from engine.kernels.activation import Activation
from engine.kernels.gemm.weight import Weight, gated_linear_reference, linear_reference

PANEL = 64  # output rows in a panel
HUGE_PAGE = 2 << 20  # bytes
CHECKED = 64  # rows that are checked at a time


@dataclass(frozen=True, slots=True, eq=False)
class CpuPanels(Weight):
    """The weight of one layer, packed."""

    panels: Tensor  # [num_panels, in_features, 64] float32 or bfloat16; rows past out_features are zero
    bias: Tensor | None  # [num_panels * 64] float32, zero-padded
    out_features: int
    in_features: int
    paired: bool = False  # each panel holds 32 gate rows, then the 32 up rows that go with them: for `gated`

    @property
    def num_bytes(self) -> int:
        return self.panels.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def dense(self) -> Tensor:
        return self._unpack(self.panels.transpose(1, 2).reshape(-1, self.in_features))

    def dense_bias(self) -> Tensor | None:
        return None if self.bias is None else self._unpack(self.bias[:, None]).flatten()

    def linear(self, x: Tensor, out: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        if not is_packed_for(x):
            return linear_reference(x, self, out, residual)
        if self.paired:
            both = self._launch(x, len(self.panels) * PANEL, None, None, None)
            return as_linear(unpaired_columns(both, self.out_features), out, residual)
        return self._launch(x, self.out_features, None, out, residual)

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        if not is_packed_for(x):
            return gated_linear_reference(x, self, activation)
        if not self.paired:
            return Weight.gated(self, x, activation)
        return self._launch(x, self.out_features // 2, activation, None, None)

    def _unpack(self, rows: Tensor) -> Tensor:
        return unpaired(rows, self.out_features) if self.paired else rows[: self.out_features]

    def _launch(
        self, x: Tensor, width: int, activation: Activation | None, out: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        """The product's `width` columns, with an activation those of the gated product."""
        depth, gated = self.in_features, activation is not None
        rows, stride, out, address = operands(x, depth, width, out, residual)
        panels, bias = self.panels, self.bias
        cpu.linear(
            out.data_ptr(), x.data_ptr(), panels.data_ptr(), 0 if bias is None else bias.data_ptr(), address,
            rows, depth, 2 * width if gated else width, stride, width, width,
            x.dtype is torch.bfloat16, panels.dtype is torch.bfloat16, gated, activation or Activation.SILU,
        )  # fmt: skip
        return out


def operands(
    x: Tensor, depth: int, width: int, out: Tensor | None, residual: Tensor | None
) -> tuple[int, int, Tensor, int]:
    """Operands of a product [..., depth] -> [..., width]: rows of x, their stride, the result, the residual's
    address."""
    shape = x.shape
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
    return rows, stride, out, address


def pack_panels(weight: Tensor, bias: Tensor | None) -> CpuPanels:
    """Copies weight [N, K] float32 or bfloat16 and bias [N] or None into panels; the originals can be freed."""
    rows, columns = weight.shape
    wide_bias = None if bias is None else pad_rows(bias.to(torch.float32), -(-rows // PANEL) * PANEL)
    return CpuPanels(to_panels(weight, dtype=_streamed_dtype(weight)), wide_bias, rows, columns)


def pack_paired(both: Sequence[Tensor] | Tensor, biases: Tensor | None) -> CpuPanels:
    """gate and up, [I, K] each, and their biases [2, I] or None -> panels for `gated`: both products in one pass."""
    gate, up = both
    bias = None if biases is None else interleave(biases.to(torch.float32)[..., None]).flatten()
    panels = to_panels(gate, up, dtype=_streamed_dtype(gate, up))
    return CpuPanels(panels, bias, 2 * len(gate), gate.shape[1], paired=True)


def is_packed_for(x: Tensor) -> bool:
    return x.is_cpu and (x.dtype is torch.float32 or x.dtype is torch.bfloat16)


def _streamed_dtype(*pieces: Tensor) -> torch.dtype:
    """bfloat16 for weights that are exact in bfloat16, which stream in half the time; else float32."""
    for piece in pieces:
        assert piece.dtype in (torch.float32, torch.bfloat16), (
            f"weights are {piece.dtype}; float32 or bfloat16 can be packed"
        )
        for some in piece.split(CHECKED):  # most float32 checkpoints are recognised by the first rows
            if some.dtype == torch.float32 and not torch.equal(some.to(torch.bfloat16).to(torch.float32), some):
                return torch.float32
    return torch.bfloat16


def pad_rows(rows: Tensor, count: int) -> Tensor:
    if rows.shape[0] == count:
        return rows
    padded = rows.new_zeros(count, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    return padded


def interleave(both: Tensor) -> Tensor:
    """[2, I, columns] -> 32 rows of the first, the same 32 of the second, and so on, padded with zeros."""
    half = PANEL // 2
    _, width, columns = both.shape
    padded = both.new_zeros(2, -(-width // half) * half, columns)
    padded[:, :width] = both
    return padded.view(2, -1, half, columns).transpose(0, 1).reshape(-1, columns)


def unpaired(rows: Tensor, count: int) -> Tensor:
    """The inverse of `interleave`: [padded rows, columns] -> [count, columns]."""
    halves = rows.view(-1, 2, PANEL // 2, rows.shape[1]).transpose(0, 1)  # [2, num_panels, 32, columns]
    return halves.reshape(2, -1, rows.shape[1])[:, : count // 2].reshape(count, -1)


def unpaired_columns(both: Tensor, count: int) -> Tensor:
    """A product by interleaved rows, [..., padded columns] -> [..., count]: gate's columns, then up's."""
    halves = both.unflatten(-1, (-1, 2, PANEL // 2)).transpose(-3, -2)  # [..., 2, num_panels, 32]
    return halves.flatten(-2)[..., : count // 2].flatten(-2)


def as_linear(y: Tensor, out: Tensor | None, residual: Tensor | None) -> Tensor:
    """The result of Weight.linear, made from the product y."""
    if residual is not None:
        y = y + residual
    return y if out is None else out.copy_(y)


def to_panels(*pieces: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """[N, K] -> [ceil(N / 64), K, 64]; with two pieces each panel has 32 rows of each. Missing rows are zero.

    Makes no temporary copies: memory freed between permanent tensors would not be reused, and a model with many experts
    would take twice its weights.
    """
    (rows, columns), each = pieces[0].shape, PANEL // len(pieces)
    whole, rest = divmod(rows, each)
    panels = _room((whole + (rest > 0), columns, PANEL), dtype or pieces[0].dtype, pieces[0].device)
    for piece, mine in zip(pieces, panels.split(each, 2)):
        mine[:whole] = piece[: whole * each].unflatten(0, (whole, each)).transpose(1, 2)
        if rest:
            mine[whole, :, :rest] = piece[whole * each :].T
            mine[whole, :, rest:] = 0
    return panels


def _room(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for panels, in huge pages if the size is large enough."""
    count, size = torch.Size(shape).numel(), dtype.itemsize
    if device.type != "cpu" or count * size < HUGE_PAGE:
        return torch.empty(shape, dtype=dtype, device=device)
    room = torch.empty(count + HUGE_PAGE // size, dtype=dtype)
    first = -room.data_ptr() % HUGE_PAGE // size  # the slack is never written, so it costs no memory
    cpu.advise_huge(room.data_ptr() + first * size, count * size)
    return room[first : first + count].view(shape)
