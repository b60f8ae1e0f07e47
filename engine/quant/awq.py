"""awq (gemm): 4-bit integers, column-major, eight outputs in a word: w = (q - z) * s.

qweight [K, N / 8] int32: field i of word c is output 8 c + [0, 2, 4, 6, 1, 3, 5, 7][i]; qzeros [K / g, N / 8] likewise
scales [K / g, N]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.base.errors import ConfigError
from engine.checkpoint.section import Section
from engine.kernels.gemm.codes import Codes, Kind
from engine.quant.base import Headers
from engine.quant.checks import Checks
from engine.quant.names import left_out
from engine.quant.rotations import refuse_rotations
from engine.quant.stored import (
    SCALES,
    checked_group,
    extras,
    fields,
    form_of,
    group_of,
    offsets,
    packing_of,
    scale_of,
)
from engine.weights.table import Wanted

PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # output 8 c + j is field PLACES[j] of word c


@dataclass(frozen=True, slots=True)
class PackedAwq:
    """The storage of one module."""

    group: int
    extra: tuple[tuple[str, Wanted], ...] = ()  # a bias, if the file has one

    @property
    def form(self) -> str:
        return form_of(4, self.group, has_zeros=True)

    def wants(self, rows: int, columns: int) -> dict[str, Wanted]:
        group, words = checked_group(columns, self.group), (torch.int32,)
        if rows % 8:
            raise ConfigError(f"a matrix of {rows} rows; AWQ packs eight rows into a word")
        return {
            "qweight": Wanted((columns, rows // 8), words),
            "qzeros": Wanted((columns // group, rows // 8), words),
            "scales": Wanted((columns // group, rows), SCALES),
            **dict(self.extra),
        }

    def read(self, tensors: Mapping[str, Tensor], checks: Checks) -> Codes:
        values = _outputs(tensors["qweight"])
        group = checked_group(values.shape[1], self.group)
        zero = offsets(_outputs(tensors["qzeros"]), 4)
        scale = scale_of("scales", tensors["scales"], checks).t().contiguous()
        return Codes(Kind.INT4, values, scale, group, zero=zero)


def _outputs(words: Tensor) -> Tensor:
    """[lines, N / 8] -> [N, lines]."""
    return fields(words, 4).unflatten(1, (-1, 8))[:, :, PLACES].flatten(1).t().contiguous()


class Awq:
    """The dialect."""

    def __init__(self, settings: Section) -> None:
        refuse_rotations(settings)
        key, version = packing_of(settings, "version", "checkpoint_format", "format") or ("version", "gemm")
        if str(version).lower() != "gemm":
            raise ConfigError(
                f"{settings.path}: {key}={str(version).lower()!r}; gemm is read: export the checkpoint again as gemm"
            )
        if settings.size("bits", 4) != 4:
            raise ConfigError(f"{settings.path}: bits={settings.size('bits')}; AWQ has 4")
        self.group = settings.integer("group_size", 128, least=-1)
        self._left_out = left_out(settings.items("modules_to_not_convert", ()), settings.path, inside=True)

    def stored(self, module: str, columns: int, headers: Headers | None) -> PackedAwq | None:
        if headers is None:
            return None if module in self._left_out else PackedAwq(self.group)
        if "qweight" not in headers:
            return None
        return PackedAwq(group_of(headers, columns, self.group), tuple(extras(headers, ("bias",)).items()))
