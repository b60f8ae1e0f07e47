"""FP8 (e4m3) matrices with a scale per matrix, row, block or group of a row; and the quantisation of their inputs.

Owner: the thread that builds the model. In: the file's tensors. Out: codes in the canonical form
(kernels/gemm/codes.py). Devices without FP8 units do not quantise inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.base.errors import ConfigError
from engine.kernels.gemm.codes import Codes, Inputs, Kind
from engine.quant.base import Headers
from engine.quant.checks import Checks
from engine.quant.stored import POWERS, SCALES, dtype_of, extras, scale_of
from engine.weights.table import Shape, Wanted

INPUT_SCALES = ("input_scale", "activation_scale", "qscale_act")  # names of the static scale of a matrix's inputs

NO_NUMBERS = "weight holds codes that are not numbers (0x7f or 0xff): fetch the files again"


@dataclass(frozen=True, slots=True)
class Floats8:
    """E4M3 codes, with a scale per matrix, row, block of rows and columns, or group of a row."""

    scale: str  # tensor kind of the scale
    scales: tuple[torch.dtype, ...]
    per: str  # "tensor", "row", "block" or "group"
    block: tuple[int, int] = (1, 1)
    shape: Shape | None = None  # the scale's shape in the file, if it differs from the usual shape
    extra: tuple[tuple[str, Wanted], ...] = ()
    inputs: str = "floats"  # "token": quantised per token; "given": by a static scale of the files; "floats": not
    powers: bool = False  # the inputs' scales are powers of two

    @property
    def form(self) -> str:
        sizes = {"tensor": "matrices", "row": "rows", "group": f"{self.block[1]} (MX)"}
        return f"FP8 by {sizes.get(self.per) or f'{self.block[0]} x {self.block[1]}'}"

    @property
    def quantises_inputs(self) -> bool:
        """Whether inputs are quantised to FP8 on devices with FP8 units."""
        return self.inputs != "floats" and self.per != "group"

    def wants(self, rows: int, columns: int) -> dict[str, Wanted]:
        shape = {
            "tensor": (),
            "row": (rows, 1),
            "block": (-(-rows // self.block[0]), -(-columns // self.block[1])),
            "group": (rows, -(-columns // self.block[1])),
        }[self.per]
        if self.shape is not None and torch.Size(self.shape).numel() == torch.Size(shape).numel():
            shape = self.shape
        return {
            "weight": Wanted((rows, columns), (torch.float8_e4m3fn,)),
            self.scale: Wanted(shape, self.scales),
            **dict(self.extra),
        }

    def read(self, tensors: Mapping[str, Tensor], checks: Checks) -> Codes:
        values = tensors["weight"].view(torch.uint8)
        rows, columns = values.shape
        checks.none((values & 0x7F) == 0x7F, NO_NUMBERS)
        scale = scale_of(self.scale, tensors[self.scale], checks)
        group = columns if self.per in ("tensor", "row") else self.block[1]
        if self.per == "tensor":
            scale = scale.reshape(1, 1).expand(rows, 1)
        elif self.per == "block":
            lines = -(-rows // self.block[0])
            scale = scale.reshape(lines, -1).repeat_interleave(self.block[0], 0)[:rows]
        scale = scale.reshape(rows, -1).contiguous()
        return Codes(Kind.E4M3, values, scale, group, inputs=self._inputs(tensors, checks))

    def _inputs(self, tensors: Mapping[str, Tensor], checks: Checks) -> Inputs | None:
        if not self.quantises_inputs:
            return None
        if self.per == "block":
            return Inputs(kind=Kind.E4M3, group=self.block[1], powers=self.powers)
        given = next((scale_of(kind, tensors[kind], checks) for kind in INPUT_SCALES if kind in tensors), None)
        if given is None:
            return Inputs(kind=Kind.E4M3)
        most = given.float().amax()
        return Inputs(torch.where(most > 0, most, 1.0), Kind.E4M3)  # 0: all calibration inputs were zero


def floats8(
    scale: str, headers: Headers, block: tuple[int, int], inputs: str = "floats", powers: bool = False
) -> Floats8:
    """The storage, derived from the shape and dtype of the scale in the file."""
    info, sizes = headers[scale], headers["weight"].shape
    if len(sizes) != 2:
        raise ConfigError(f"weight has shape {list(sizes)}; a matrix is needed: fetch the files again")
    dtype, rows = dtype_of(scale, info), sizes[0]
    shape = tuple(size for size in info.shape if size != 1)
    blocks = (-(-rows // block[0]), -(-sizes[1] // block[1]))
    if torch.Size(info.shape).numel() == 1:
        per = "tensor"
    elif dtype in POWERS and info.shape[0] == rows:
        per, block = "group", (1, 32)
    elif shape == (rows,) and blocks != shape:
        per = "row"
    else:
        per = "block"
    if inputs == "given":
        _check_given(headers, per)
    allowed = (*SCALES, *POWERS) if per in ("block", "group") else SCALES
    return Floats8(scale, allowed, per, block, info.shape, tuple(extras(headers).items()), inputs, powers)


def _check_given(headers: Headers, per: str) -> None:
    """Raises ConfigError if static input scales are not supported with these weights or are missing."""
    if per == "block":
        raise ConfigError(
            "static inputs of a weight with a scale per block; dynamic ones are read: quantise the checkpoint again "
            "with dynamic inputs, or with a scale per matrix"
        )
    if per != "group" and not any(kind in headers for kind in INPUT_SCALES):
        raise ConfigError(
            f"static inputs without their scale; one of {', '.join(INPUT_SCALES)} is needed: fetch the files again, or "
            "quantise the checkpoint again with dynamic inputs"
        )
