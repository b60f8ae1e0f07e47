"""modelopt (NVIDIA): FP8 by matrix, row or block, MXFP8, NVFP4 and MXFP4; the matrix's scale is a multiplier.

    FP8     weight [N, K] e4m3   weight_scale [], [N] or [N / 128, 1, K / 128, 1]   input_scale []
    MXFP8   weight [N, K] e4m3   weight_scale [N, K / 32] uint8, powers of two
    NVFP4   weight [N, K / 2]    weight_scale [N, K / 16] e4m3                      weight_scale_2 []
    MXFP4   weight [N, K / 2]    weight_scale [N, K / 32] uint8, powers of two

Inputs of 4-bit weights and of FP8_PB_WO stay floats, whatever the algorithm says; other inputs are quantised per token
or by input_scale. W4A8_NVFP4_FP8 has a scale per 32 columns, NVFP4 a scale per 16 columns.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.base.errors import ConfigError
from engine.checkpoint.section import Section
from engine.quant.base import Headers, Stored
from engine.quant.floats8 import INPUT_SCALES, Floats8, floats8
from engine.quant.names import entry_around, left_out
from engine.quant.stored import POWERS, SCALES, Floats4, check_whole, extras

FP8 = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_PB", "MXFP8")
FP4 = ("NVFP4", "W4A16_NVFP4", "NVFP4_W4A16", "W4A8_NVFP4_FP8", "NVFP4_AWQ", "MXFP4", "W4A16_MXFP4", "W4A8_MXFP4_FP8")
BLOCK = (128, 128)
PER = {"FP8": "tensor", "FP8_PER_CHANNEL_PER_TOKEN": "row", "FP8_PB_WO": "block", "FP8_PB": "block"}
NATIVE = "weight_scale_inv"  # marks layers that a mixed checkpoint copied from an original in block FP8 (FP8_PB)


class ModelOpt:
    """The dialect."""

    def __init__(self, settings: Section) -> None:
        self._algorithm = str(settings.values.get("quant_algo") or "").upper()
        of_cache_alone = not self._algorithm and bool(settings.values.get("kv_cache_quant_algo"))
        if self._algorithm not in (*FP8, *FP4, "MIXED_PRECISION") and not of_cache_alone:
            raise ConfigError(
                f"{settings.path}: quant_algo={self._algorithm!r}; read are {', '.join((*FP8, *FP4))}, MIXED_PRECISION:"
                " quantise the checkpoint again with one of them"
            )
        names = settings.items("ignore", settings.items("exclude_modules", ()))
        self._left_out = left_out(names, settings.path)
        self._layers = settings.section("quantized_layers").values if settings.values.get("quantized_layers") else {}

    def stored(self, module: str, columns: int, headers: Headers | None) -> Stored | None:
        if headers is None:
            return None if module in self._left_out else self._random(module)
        if "weight" not in headers or headers["weight"].dtype not in ("F8_E4M3", "U8"):
            return None
        if NATIVE in headers and headers["weight"].dtype == "F8_E4M3":
            return floats8(NATIVE, headers, BLOCK, "token")
        check_whole(headers, f"codes of {headers['weight'].dtype}", "weight_scale")
        if "pre_quant_scale" in headers:
            raise ConfigError(
                "pre_quant_scale multiplies each column of the inputs (AWQ), which is not computed: quantise the "
                f"checkpoint again with one of {', '.join((*FP8, *FP4))}"
            )
        if headers["weight"].dtype == "F8_E4M3":
            found = floats8("weight_scale", headers, BLOCK, "given" if self._algorithm == "FP8" else "floats")
            quantised = found.per == "row" or any(kind in headers for kind in INPUT_SCALES)
            return replace(found, inputs="token") if quantised and found.per != "block" else found
        if headers["weight_scale"].dtype in ("U8", "F8_E8M0"):
            return Floats4("weight", POWERS, 32, extra=tuple(extras(headers, ("input_scale",)).items()))
        check_whole(headers, "codes of U8", "weight_scale_2")
        scales, shape = headers["weight_scale"].shape, headers["weight_scale_2"].shape
        group = 32 if scales and scales[-1] * 32 == columns else 16
        extra = tuple(extras(headers, ("input_scale",)).items())
        return Floats4("weight", (torch.float8_e4m3fn,), group, "weight_scale_2", shape=shape, extra=extra)

    def _random(self, module: str) -> Stored | None:
        algorithm = self._algorithm
        if algorithm == "MIXED_PRECISION":
            unsaid = {} if self._layers else {"quant_algo": "NVFP4"}
            said = entry_around(module, self._layers) or unsaid
            algorithm = str(said.get("quant_algo") if isinstance(said, dict) else "").upper()
        if algorithm == "MXFP8":
            return Floats8("weight_scale", POWERS[1:], "group", (1, 32))
        if algorithm in FP8:
            per = PER[algorithm]
            name = NATIVE if algorithm == "FP8_PB" else "weight_scale"
            return Floats8(name, SCALES, per, BLOCK, inputs="floats" if algorithm == "FP8_PB_WO" else "token")
        if algorithm not in FP4:
            return None
        if "MXFP4" in algorithm:
            return Floats4("weight", POWERS[1:], 32)
        group = 32 if algorithm == "W4A8_NVFP4_FP8" else 16
        return Floats4("weight", (torch.float8_e4m3fn,), group, "weight_scale_2")
