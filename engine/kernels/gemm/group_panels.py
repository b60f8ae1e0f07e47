"""Quantised weights of a CPU: panels of codes for 64 output rows, widened inside the product in C.

    4 bits     [num_panels, K, 8] 32-bit words: field v (4 bits) of word l is output 8 v + l
    8 bits     [num_panels, K, 64]
    scales     [num_panels, groups, 64], zeros likewise

A weight is (value - zero) * scale in float32, and each output is one chain of sums over k, so a row's bits do not
depend on other rows. If the checkpoint quantises inputs to int8, sums are exact integers.
Users: quantised layers on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from _fast import cpu
from engine.kernels.activation import Activation
from engine.kernels.gemm.codes import FOUR_BITS, Codes, Inputs, Kind, quantised_int8
from engine.kernels.gemm.panels import (
    PANEL,
    as_linear,
    interleave,
    is_packed_for,
    operands,
    pad_rows,
    to_panels,
    unpaired,
    unpaired_columns,
)
from engine.kernels.gemm.weight import Weight, gated_linear_reference, linear_reference

FORMS = {kind: getattr(cpu, kind.name) for kind in Kind}


@dataclass(frozen=True, slots=True, eq=False)
class GroupPanels(Weight):
    """The weight of one layer, packed."""

    kind: Kind
    panels: Tensor  # [num_panels, in_features, 32 or 64] uint8 or int8
    scales: Tensor  # [num_panels, groups, 64] float32 or bfloat16
    row_scales: Tensor | None  # [num_panels * 64] float32
    zeros: Tensor | None  # [num_panels, groups, 64] int8 or float32
    group: int
    order: Tensor | None  # [in_features]: the column of x for column k of the panels
    inputs: Inputs | None
    bias: Tensor | None  # [num_panels * 64] float32
    out_features: int
    in_features: int
    paired: bool = False  # each panel holds 32 gate rows, then the 32 up rows that go with them: for `gated`

    @property
    def num_bytes(self) -> int:
        held = (self.panels, self.scales, self.row_scales, self.zeros, self.order, self.bias)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def dense(self) -> Tensor:
        """A copy, float32."""
        rows = self._unpack(self._codes().dense().float())
        return rows if self.order is None else rows[:, torch.argsort(self.order)]

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

    def _codes(self) -> Codes:
        """All rows of the panels, including padding, in the order of the panels."""
        panels = self.panels
        if self.kind in FOUR_BITS:
            panels = from_words(panels)
        values, scale = _from_panels(panels), _from_panels(self.scales)
        zero = None if self.zeros is None else _from_panels(self.zeros)
        return Codes(self.kind, values, scale, self.group, self.row_scales, zero)

    def _launch(
        self, x: Tensor, width: int, activation: Activation | None, out: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        """The product's `width` columns, with an activation those of the gated product."""
        depth, gated, given, x_scales = self.in_features, activation is not None, x, None
        if self.order is not None:
            x = x[..., self.order]
        rows, stride, out, address = operands(x, depth, width, out, residual)
        if self.inputs is not None:
            x, x_scales = quantised_int8(x.reshape(rows, depth), self.inputs.scale)
            stride = depth
        cpu.coded_linear(
            out.data_ptr(), x.data_ptr(), self.panels.data_ptr(), _address(self.bias), address,
            self.scales.data_ptr(), _address(self.row_scales), _address(self.zeros),
            _address(x_scales), rows, depth, 2 * width if gated else width, self.group, stride, width, width,
            FORMS[self.kind], self.scales.dtype is torch.bfloat16,
            self.zeros is not None and self.zeros.dtype is torch.float32,
            x.dtype is torch.bfloat16, given.dtype is torch.bfloat16, gated, activation or Activation.SILU,
        )  # fmt: skip
        return out


def pack_group_panels(codes: Codes, bias: Tensor | None, gated: bool) -> GroupPanels:
    """Copies codes into panels; `gated`: the first half of the rows is gate, the second up, and each panel gets
    both."""
    rows, depth = codes.values.shape
    if codes.inputs is not None:  # one scale per row and no zeros: engine/quant reads no others with quantised inputs
        assert (codes.kind, codes.zero, codes.scale.shape[1]) == (Kind.INT8, None, 1)
        if codes.row_scale is not None:
            codes = replace(codes, scale=codes.scale.float() * codes.row_scale[:, None], row_scale=None)
    values = _padded(codes.values, gated)
    panels = to_panels(values)
    if codes.kind in FOUR_BITS:
        panels = to_words(panels)
    return GroupPanels(
        kind=codes.kind,
        panels=panels,
        scales=to_panels(_padded(codes.scale, gated)),
        row_scales=None if codes.row_scale is None else _padded(codes.row_scale[:, None], gated).flatten(),
        zeros=None if codes.zero is None else to_panels(_padded(codes.zero, gated)),
        group=codes.group,
        order=codes.order,
        inputs=codes.inputs,
        bias=None if bias is None else _padded(bias.float()[:, None], gated).flatten(),
        out_features=rows,
        in_features=depth,
        paired=gated,
    )


def to_words(panels: Tensor) -> Tensor:
    """Codes [num_panels, K, 64] below 16 -> bytes [num_panels, K, 32], the words' lowest byte first."""
    pairs = panels.unflatten(2, (4, 2, 8))  # byte of a word, half of a byte, word
    return (pairs[:, :, :, 0] | pairs[:, :, :, 1] << 4).transpose(2, 3).flatten(2).contiguous()


def from_words(packed: Tensor) -> Tensor:
    """The inverse of `to_words`."""
    both = packed.unflatten(2, (8, 4)).transpose(2, 3)
    return torch.stack([both & 15, both >> 4], dim=3).flatten(2)


def _padded(rows: Tensor, gated: bool) -> Tensor:
    """[N, columns] -> padded to a multiple of 64 rows; with `gated`, gate and up are interleaved."""
    if gated:
        return interleave(rows.unflatten(0, (2, -1)))
    return pad_rows(rows, -(-len(rows) // PANEL) * PANEL)


def _from_panels(panels: Tensor) -> Tensor:
    """[num_panels, columns, 64] -> [num_panels * 64, columns]."""
    return panels.transpose(1, 2).reshape(-1, panels.shape[1])


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
