"""weight_packed of compressed-tensors: words of integers, or bytes of two E2M1 codes, decided by the headers.

Owner: the thread that builds the model. In: a module's headers and the settings of its weights in config_groups. Out:
the module's storage.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.base.errors import ConfigError
from engine.quant.base import Headers, Stored
from engine.quant.compressed_integers import PackedIntegers
from engine.quant.stored import POWERS, Floats4, check_whole, extras


def packed(headers: Headers, columns: int, weights: dict[str, Any]) -> Stored:
    found = headers["weight_packed"]
    if found.dtype == "U8":
        return _floats4(headers)
    needed = {
        "weight_scale": True,
        "weight_shape": True,
        "weight_zero_point": weights.get("symmetric") is False,
        "weight_g_idx": weights.get("actorder") in ("group", "dynamic", True),
    }
    check_whole(headers, "weight_packed", *(kind for kind, always in needed.items() if always))
    words = found.shape[-1] if found.shape else 0
    bits = next((bits for bits in (4, 8) if words == -(-columns * bits // 32)), 0)
    if not bits:
        raise ConfigError(
            f"weight_packed has {words} words for {columns} columns; fields of 4 and 8 bits are read: quantise the "
            "checkpoint again with one of them"
        )
    scales = headers["weight_scale"].shape
    groups = scales[-1] if scales else 1
    size = weights.get("group_size")
    group = -1 if groups == 1 else size if size and size > 0 else columns // max(1, groups)
    zero = headers.get("weight_zero_point")
    extra = tuple(extras(headers, ("weight_shape", "weight_g_idx")).items())
    return PackedIntegers(bits, group, None if zero is None else zero.dtype == "I32", extra)


def _floats4(headers: Headers) -> Floats4:
    """The storage of 4-bit floats: E4M3 scales mean NVFP4, powers of two mean MXFP4."""
    check_whole(headers, "weight_packed", "weight_scale")
    extra = tuple(extras(headers, ("input_global_scale",)).items())
    if headers["weight_scale"].dtype != "F8_E4M3":
        return Floats4("weight_packed", POWERS, 32, extra=extra)
    check_whole(headers, "weight_packed of NVFP4", "weight_global_scale")
    shape = headers["weight_global_scale"].shape
    return Floats4("weight_packed", (torch.float8_e4m3fn,), 16, "weight_global_scale", True, shape, extra)
