"""Helpers that dialects share: fields of packed words, scales of any dtype, FP4 matrices.

Owner: the thread that builds the model. In: the file's tensors. Out: codes and scales in the canonical form
(kernels/gemm/codes.py). Scales are converted without loss: bfloat16 stays, float16 becomes float32, FP8 and powers of
two become bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.base.errors import ConfigError
from engine.checkpoint.section import Section
from engine.kernels.gemm.codes import Codes, Kind
from engine.quant.base import Headers
from engine.quant.checks import Checks
from engine.weights.files import DTYPES, TensorInfo
from engine.weights.table import Shape, Wanted

SCALES = (torch.float32, torch.bfloat16, torch.float16)
INDICES = (torch.int64, torch.int32)
POWERS = (torch.float8_e8m0fnu, torch.uint8)  # exponents of two, 127 added
UNREAD = ("input_scale", "activation_scale", "input_global_scale", "qscale_act", "weight_shape")


def extras(headers: Headers | None, names: tuple[str, ...] = UNREAD) -> dict[str, Wanted]:
    """The optional tensors of a quantised module that the file has."""
    return {name: _wanted(name, headers[name]) for name in names if headers is not None and name in headers}


def _wanted(name: str, info: TensorInfo) -> Wanted:
    """A Wanted that accepts the file's shape and dtype if they are possible for this name."""
    dtype = dtype_of(name, info)
    if name == "weight_shape":
        return Wanted((2,), INDICES, in_memory=dtype)
    if name in UNREAD:  # a scale for all inputs of a matrix
        return Wanted(number_shape(info.shape), SCALES, in_memory=dtype)
    return Wanted(info.shape, INDICES if name.endswith("g_idx") else (dtype,), in_memory=dtype)


def number_shape(shape: Shape) -> Shape:
    """The file's shape of a single number; () if the shape has several numbers."""
    return shape if torch.Size(shape).numel() == 1 else ()


def check_whole(headers: Headers, codes: str, *needed: str) -> None:
    """ConfigError if a tensor that these codes need is missing."""
    if absent := [kind for kind in needed if kind not in headers]:
        raise ConfigError(f"{codes} without {absent[0]}; the checkpoint is not whole: fetch the files again")


def dtype_of(name: str, info: TensorInfo) -> torch.dtype:
    if info.dtype not in DTYPES:
        raise ConfigError(f"{name} has dtype {info.dtype}; read are {', '.join(DTYPES)}")
    return DTYPES[info.dtype]


def fields(words: Tensor, bits: int) -> Tensor:
    """int32 words [..., C] -> their fields, lowest first, uint8 [..., C * 32 / bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts & (1 << bits) - 1).to(torch.uint8).flatten(-2)


def integers(found: Tensor, bits: int) -> tuple[Kind, Tensor]:
    """Unsigned fields whose middle value means zero -> the canonical kind and its codes."""
    if bits == 4:
        return Kind.INT4, found
    return Kind.INT8, (found.to(torch.int16) - 128).to(torch.int8)


def offsets(found: Tensor, bits: int) -> Tensor:
    """Unsigned zero points -> signed zero points, int8."""
    return (found.to(torch.int16) - (1 << bits - 1)).to(torch.int8)


def scale_of(kind: str, tensor: Tensor, checks: Checks) -> Tensor:
    """Scales as float32 or bfloat16, checked."""
    if not tensor.numel():
        raise ConfigError(f"{kind} holds no value; the checkpoint is not whole: fetch the files again")
    if tensor.dtype in POWERS:
        powers = tensor.view(torch.uint8).to(torch.int32)
        broken = powers == 255
        bits = torch.where(powers > 0, powers << 7, 1 << 6)  # bits of a bfloat16; the least power is a subnormal
        scale = bits.to(torch.int16).view(torch.bfloat16)
    else:
        scale = tensor.float() if tensor.dtype == torch.float16 else tensor
        scale = tensor.to(torch.bfloat16) if tensor.dtype == torch.float8_e4m3fn else scale
        broken = ~((scale >= 0) & (scale < float("inf")))
    checks.none(
        broken,
        f"{{count}} of {{size}} values of {kind} are negative, NaN or infinite; scales must be finite and at least 0: "
        "fetch the files again, or quantise the checkpoint again",
    )
    return scale


def checked_group(columns: int, group: int) -> int:
    """Columns that share a scale; -1 and 0: all of them."""
    group = columns if group in (-1, 0) else group
    if group < 0 or columns % group:
        raise ConfigError(
            f"group_size={group} does not divide the {columns} columns of a matrix; quantise the checkpoint again with "
            "one that does, or -1"
        )
    return group


def group_of(headers: Headers, columns: int, said: int) -> int:
    """Columns per scale: from the number of rows of `scales` if it divides the columns, else `said`, the settings'
    value. -1: all columns."""
    lines = headers["scales"].shape[0] if "scales" in headers and headers["scales"].shape else 0
    if lines < 1 or columns % lines:
        return said
    return columns // lines if lines > 1 else -1


def packing_of(settings: Section, *keys: str) -> tuple[str, Any] | None:
    """(key, value) of the first key that names the packing; AutoAWQ, AutoGPTQ and GPTQModel use different keys."""
    return next(((key, form) for key in keys if (form := settings.values.get(key))), None)


def form_of(bits: int, group: int, has_zeros: bool) -> str:
    """The form of integers as text."""
    return f"INT{bits} by {'rows' if group < 1 else group}{' with zero points' if has_zeros else ''}"


def check_order(wanted: Mapping[str, Wanted], kind: str, columns: int) -> None:
    """ConfigError if the tensor with the columns' groups has not one entry per column."""
    if kind in wanted and wanted[kind].shape != (columns,):
        raise ConfigError(f"{kind} has shape {list(wanted[kind].shape)}; [{columns}] is needed: fetch the files again")


def column_order(groups: Tensor, columns: int, group: int) -> Tensor | None:
    """The group of each column -> the columns sorted by group; None: already sorted."""
    expected = torch.arange(columns, device=groups.device) // group
    if torch.equal(groups.long(), expected):
        return None
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order].long(), expected):
        raise ConfigError(f"g_idx must name each of {columns // group} groups {group} times")
    return order


@dataclass(frozen=True, slots=True)
class Floats4:
    """E2M1 codes, two in a byte, a scale per group of a row, and optionally a scale for the matrix."""

    weight: str  # tensor kind of the codes
    scales: tuple[torch.dtype, ...]
    group: int
    whole: str | None = None
    divides: bool = False  # the matrix's scale is a divisor
    shape: Shape = ()  # shape of the matrix's scale
    extra: tuple[tuple[str, Wanted], ...] = ()

    @property
    def form(self) -> str:
        return "MXFP4" if self.whole is None else "NVFP4"

    def wants(self, rows: int, columns: int) -> dict[str, Wanted]:
        checked_group(columns, self.group)
        wanted = {
            self.weight: Wanted((rows, columns // 2), (torch.uint8,)),
            "weight_scale": Wanted((rows, columns // self.group), self.scales),
            **dict(self.extra),
        }
        if self.whole is not None:
            wanted[self.whole] = Wanted(number_shape(self.shape), SCALES)
        return wanted

    def read(self, tensors: Mapping[str, Tensor], checks: Checks) -> Codes:
        both = tensors[self.weight]
        values = torch.stack([both & 15, both >> 4], dim=2).flatten(1)
        scale, row_scale = scale_of("weight_scale", tensors["weight_scale"], checks), None
        if self.whole is not None:
            whole = scale_of(self.whole, tensors[self.whole], checks).float().reshape(1)
            row_scale = (1 / whole if self.divides else whole).expand(len(values)).contiguous()
        return Codes(Kind.E2M1, values, scale, self.group, row_scale)
