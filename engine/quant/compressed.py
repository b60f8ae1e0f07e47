"""compressed-tensors: packed 4-bit and 8-bit integers, int8, FP8, NVFP4, MXFP4 and MXFP8, by group of modules.

pack-quantized    weight_packed [N, ceil(K b / 32)] int32: field i of word c is column 8 c + i (b = 4), 2^(b-1) added
                  weight_scale [N, K / g] or [N, 1], weight_zero_point [ceil(N b / 32), K / g] packed along rows
int-quantized     weight [N, K] int8, weight_scale [N, 1]             w = (q - z) * s everywhere
float-quantized   weight [N, K] e4m3, weight_scale [1], [N, 1] or by blocks; mxfp8: powers of two by 32 columns
nvfp4             weight_packed [N, K / 2], weight_scale [N, K / 16] e4m3, w = q * s / weight_global_scale
mxfp4             weight_packed [N, K / 2], weight_scale [N, K / 32], powers of two
"""

from __future__ import annotations

from typing import Any

import torch

from engine.base.errors import ConfigError
from engine.checkpoint.section import Section
from engine.quant.base import Headers, Stored
from engine.quant.compressed_groups import FORMATS, groups_of
from engine.quant.compressed_integers import Integers8, PackedIntegers
from engine.quant.compressed_packed import packed
from engine.quant.floats8 import Floats8, floats8
from engine.quant.names import Names, left_out
from engine.quant.rotations import refuse_transforms
from engine.quant.stored import POWERS, SCALES, Floats4, check_whole, extras

NVFP4 = "nvfp4-pack-quantized"
Settings = dict[str, Any]  # settings of a group's weights or inputs


class Compressed:
    """The dialect."""

    def __init__(self, settings: Section) -> None:
        self._format = str(settings.values.get("format") or "dense")
        sparse = settings.values.get("sparsity_config") or {}
        if not isinstance(sparse, dict):
            raise ConfigError(f"{settings.path}: sparsity_config={sparse!r} must be an object")
        if self._format not in FORMATS or sparse.get("format", "dense") != "dense":
            got = self._format if self._format not in FORMATS else f"sparsity {sparse['format']}"
            raise ConfigError(f"{settings.path}: format {got}; read are {', '.join(FORMATS)}, without sparsity")
        refuse_transforms(settings)
        self._groups = groups_of(settings)
        self._targets = [Names(group.get("targets") or (), settings.path) for group in self._groups]
        self._left_out = left_out(settings.items("ignore", ()), settings.path)

    def stored(self, module: str, columns: int, headers: Headers | None) -> Stored | None:
        group = self._group_of(module)
        weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
        block = weights.get("block_structure") or (128, 128)
        if isinstance(block, str):  # older: "128x128"
            block = block.split("x")
        block = (int(block[0]), int(block[1]))
        if headers is None:
            in_memory = module in self._left_out or not group
            return None if in_memory else self._random(group.get("format") or self._format, weights, block, inputs)
        if "weight_packed" in headers:
            return packed(headers, columns, weights)
        if "weight" not in headers or headers["weight"].dtype not in ("F8_E4M3", "I8"):
            return None
        check_whole(headers, f"codes of {headers['weight'].dtype}", "weight_scale")
        if headers["weight"].dtype == "F8_E4M3":
            return floats8("weight_scale", headers, block, _inputs(inputs))
        if "weight_zero_point" in headers or weights.get("symmetric") is False:
            raise ConfigError(
                "codes of I8 with zero points; codes of I8 are read without, pack-quantized ones with zero points: "
                "quantise the checkpoint again with symmetric weights, or as pack-quantized"
            )
        if (met := inputs.get("type") == "int") and not inputs.get("dynamic"):
            check_whole(headers, "codes of I8 for static inputs", "input_scale")
        return Integers8(met, tuple(extras(headers, ("input_scale",)).items()), headers["weight_scale"].shape)

    def _group_of(self, module: str) -> Settings:
        """The settings of the group that applies to this Linear module."""
        of_all = (group for group in self._groups if "Linear" in (group.get("targets") or ()))
        named = (group for group, names in zip(self._groups, self._targets) if module in names)
        return next(named, next(of_all, {}))

    @staticmethod
    def _random(named: str, weights: Settings, block: tuple[int, int], inputs: Settings) -> Stored | None:
        if named == "dense":
            return None
        if named == "pack-quantized":
            zeros = True if weights.get("symmetric") is False else None
            return PackedIntegers(weights.get("num_bits", 4), weights.get("group_size") or -1, zeros)
        if named == "int-quantized":
            return Integers8(quantised_inputs=inputs.get("type") == "int")
        if named == NVFP4:
            return Floats4("weight_packed", (torch.float8_e4m3fn,), 16, "weight_global_scale", True, (1,))
        if named.startswith("mxfp4"):
            return Floats4("weight_packed", POWERS[1:], 32)
        if named.startswith("mxfp8"):
            return Floats8("weight_scale", POWERS[1:], "group", (1, 32))
        per = {"channel": "row", "block": "block"}.get(weights.get("strategy", "tensor"), "tensor")
        return Floats8("weight_scale", SCALES, per, block, inputs=_inputs(inputs))


def _inputs(settings: Settings) -> str:
    """The value of Floats8.inputs for a group of modules."""
    if settings.get("type") != "float" or settings.get("num_bits", 8) != 8:
        return "floats"
    return "token" if settings.get("dynamic") else "given"
