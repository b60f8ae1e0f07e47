"""gptq: 4-bit or 8-bit integers, column-major.

    qweight [K b / 32, N] int32: field i of word r is column 8 r + i (b = 4)     scales [K / g, N]
    qzeros [K / g, N b / 32], g_idx [K]: w[n, k] = (q - z) * s[g_idx[k], n]

Version 1 stores z - 1, separately in each field; version 2 stores z. With `sym` z is the middle of the range, and
qzeros is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.base.errors import ConfigError
from engine.checkpoint.section import Section
from engine.kernels.gemm.codes import Codes
from engine.quant.base import Headers
from engine.quant.checks import Checks
from engine.quant.dynamic import Dynamic, Own
from engine.quant.names import left_out
from engine.quant.rotations import refuse_rotations
from engine.quant.stored import (
    SCALES,
    check_order,
    checked_group,
    column_order,
    extras,
    fields,
    form_of,
    group_of,
    integers,
    offsets,
    packing_of,
    scale_of,
)
from engine.weights.table import Wanted


@dataclass(frozen=True, slots=True)
class PackedGptq:
    """The storage of one module."""

    bits: int
    group: int
    symmetric: bool
    older: bool  # version 1
    extra: tuple[tuple[str, Wanted], ...] = ()  # g_idx and a bias, if the file has them

    @property
    def form(self) -> str:
        return form_of(self.bits, self.group, not self.symmetric)

    def wants(self, rows: int, columns: int) -> dict[str, Wanted]:
        group, words = checked_group(columns, self.group), (torch.int32,)
        check_order(dict(self.extra), "g_idx", columns)
        return {
            "qweight": Wanted((columns * self.bits // 32, rows), words),
            "qzeros": Wanted((columns // group, rows * self.bits // 32), words),
            "scales": Wanted((columns // group, rows), SCALES),
            **dict(self.extra),
        }

    def read(self, tensors: Mapping[str, Tensor], checks: Checks) -> Codes:
        kind, values = integers(fields(tensors["qweight"].t(), self.bits), self.bits)
        columns = values.shape[1]
        group, zero = checked_group(columns, self.group), None
        if not self.symmetric:
            found = fields(tensors["qzeros"], self.bits).t()
            zero = offsets(found + 1 & (1 << self.bits) - 1 if self.older else found, self.bits).contiguous()
        order = None if "g_idx" not in tensors else column_order(tensors["g_idx"], values.shape[1], group)
        if order is not None:
            values = values[:, order]
        scale = scale_of("scales", tensors["scales"], checks).t().contiguous()
        return Codes(kind, values.contiguous(), scale, group, zero=zero, order=order)


class Gptq:
    """The dialect."""

    def __init__(self, settings: Section) -> None:
        refuse_rotations(settings)
        self.bits = settings.size("bits")
        if self.bits not in (4, 8):
            raise ConfigError(
                f"{settings.path}: bits={self.bits}; 4 and 8 are read: quantise the checkpoint again with one of them"
            )
        self.group = settings.integer("group_size", 128, least=-1)
        self.symmetric = settings.boolean("sym", True)
        self._ordered = settings.boolean("desc_act", False)
        key, form = packing_of(settings, "checkpoint_format", "format") or ("checkpoint_format", "gptq")
        if settings.values.get("is_marlin_format"):  # AutoGPTQ's older key for the Marlin format
            key, form = "is_marlin_format", True
        if form not in ("gptq", "gptq_v2"):
            raise ConfigError(
                f"{settings.path}: {key}={form!r}; gptq and gptq_v2 are read: export the checkpoint again in one of "
                "them"
            )
        self.older = form == "gptq"
        self._left_out = left_out(settings.items("modules_to_not_convert", ()), settings.path, inside=True)
        self.own: Own = Dynamic(settings)

    def stored(self, module: str, columns: int, headers: Headers | None) -> PackedGptq | None:
        own = self.own.of(module)
        if headers is None and (own is None or module in self._left_out):
            return None
        said = own or Section({}, "")
        bits, group = said.integer("bits", self.bits), said.integer("group_size", self.group, least=-1)
        symmetric, ordered = said.boolean("sym", self.symmetric), said.boolean("desc_act", self._ordered)
        if headers is None:
            return PackedGptq(bits, group, symmetric, self.older)
        if "qweight" not in headers:
            return None
        if (words := headers["qweight"].shape) and words[0] * 32 in (columns * 4, columns * 8):
            bits = words[0] * 32 // columns  # `dynamic` may change the bits of a module
        group = group_of(headers, columns, group)
        if ordered and "g_idx" not in headers and 0 < group < columns:
            raise ConfigError("desc_act without g_idx; the checkpoint is not whole: fetch the files again")
        return PackedGptq(bits, group, symmetric, self.older, tuple(extras(headers, ("g_idx", "bias")).items()))
