"""Integers of compressed-tensors: packed into words, or one byte each.

Owner: the thread that builds the model. In: the file's tensors. Out: codes in the canonical form
(kernels/gemm/codes.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.base.errors import ConfigError
from engine.kernels.gemm.codes import Codes, Inputs, Kind
from engine.quant.checks import Checks
from engine.quant.stored import (
    SCALES,
    check_order,
    checked_group,
    column_order,
    fields,
    form_of,
    integers,
    offsets,
    scale_of,
)
from engine.weights.table import Shape, Wanted


@dataclass(frozen=True, slots=True)
class PackedIntegers:
    """pack-quantized."""

    bits: int
    group: int
    packed_zeros: bool | None = None  # zero points: True: packed along rows; False: a byte each; None: symmetric
    extra: tuple[tuple[str, Wanted], ...] = ()

    @property
    def form(self) -> str:
        return form_of(self.bits, self.group, self.packed_zeros is not None)

    def wants(self, rows: int, columns: int) -> dict[str, Wanted]:
        groups = columns // checked_group(columns, self.group)
        check_order(dict(self.extra), "weight_g_idx", columns)
        wanted = {
            "weight_packed": Wanted((rows, -(-columns * self.bits // 32)), (torch.int32,)),
            "weight_scale": Wanted((rows, groups), SCALES),
            **dict(self.extra),
        }
        if self.packed_zeros is None:
            return wanted
        if self.packed_zeros:
            return {**wanted, "weight_zero_point": Wanted((-(-rows * self.bits // 32), groups), (torch.int32,))}
        return {**wanted, "weight_zero_point": Wanted((rows, groups), (torch.int8,))}

    def read(self, tensors: Mapping[str, Tensor], checks: Checks) -> Codes:
        scale = scale_of("weight_scale", tensors["weight_scale"], checks)
        rows, zero = len(scale), None
        found = fields(tensors["weight_packed"], self.bits)
        columns = found.shape[1]
        if "weight_shape" in tensors:
            said = tensors["weight_shape"].tolist()
            if len(said) != 2 or said[0] != rows or not columns - 32 // self.bits < said[1] <= columns:
                raise ConfigError(f"weight_shape is {said}; weight_packed holds {rows} rows of {columns} columns")
            columns = said[1]
        elif self.group > 0:
            columns = min(columns, scale.shape[1] * self.group)
        kind, values = integers(found[:, :columns], self.bits)
        if self.packed_zeros:
            zero = offsets(fields(tensors["weight_zero_point"].t(), self.bits)[:, :rows].t(), self.bits).contiguous()
        elif self.packed_zeros is False:
            zero = tensors["weight_zero_point"]
            least, most = -(1 << self.bits - 1), (1 << self.bits - 1) - 1
            checks.none(
                (zero < least) | (zero > most),
                f"{{count}} of {{size}} values of weight_zero_point lie outside of {least} .. {most}, the range of "
                f"{self.bits} bits: quantise the checkpoint again",
            )
        group = checked_group(columns, self.group)
        order = None if "weight_g_idx" not in tensors else column_order(tensors["weight_g_idx"], values.shape[1], group)
        if order is not None:
            values = values[:, order]
        return Codes(kind, values.contiguous(), scale, group, zero=zero, order=order)


@dataclass(frozen=True, slots=True)
class Integers8:
    """int-quantized: a scale per row, or one for the matrix."""

    quantised_inputs: bool
    extra: tuple[tuple[str, Wanted], ...] = ()
    shape: Shape | None = None  # the scale's shape in the file

    @property
    def form(self) -> str:
        return "INT8 by matrices" if self.shape is not None and torch.Size(self.shape).numel() == 1 else "INT8 by rows"

    def wants(self, rows: int, columns: int) -> dict[str, Wanted]:
        shape: Shape = (rows, 1)
        if self.shape is not None and torch.Size(self.shape).numel() in (1, rows):
            shape = self.shape
        return {
            "weight": Wanted((rows, columns), (torch.int8,)),
            "weight_scale": Wanted(shape, SCALES),
            **dict(self.extra),
        }

    def read(self, tensors: Mapping[str, Tensor], checks: Checks) -> Codes:
        values = tensors["weight"]
        inputs = None
        if self.quantised_inputs:
            static = tensors.get("input_scale")
            inputs = Inputs(None if static is None else scale_of("input_scale", static, checks).float().amax())
        scale = scale_of("weight_scale", tensors["weight_scale"], checks).reshape(-1, 1).expand(len(values), 1)
        return Codes(Kind.INT8, values, scale.contiguous(), values.shape[1], inputs=inputs)
