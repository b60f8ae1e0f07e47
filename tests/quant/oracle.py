"""Dequantises a file from its bytes alone; imports nothing of engine/quant.

`dequantised(folder)` reads every tensor and returns the model's floats, float64. It is slow and simple on purpose:
one loop for each field of a word, dtypes decoded from their bits.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def settings_of(folder: Path) -> dict:
    """The checkpoint's settings of quantisation."""
    for name in ("config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json"):
        if (folder / name).exists():
            found = json.loads((folder / name).read_text())
            found = found.get("quantization_config") if name == "config.json" else found.get("quantization", found)
            if found:
                return found
    return {}


def dequantised(folder: Path) -> dict[str, np.ndarray]:
    """Tensor name -> float64 array; a quantised module has a single tensor, its `weight`."""
    settings = settings_of(folder)
    modules: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module, _, kind = name.rpartition(".") if ".weight." not in name else name.partition(".weight.")
        modules.setdefault(module, {})[kind] = tensor
    return {
        f"{module}.weight": value
        for module, tensors in modules.items()
        if (value := matrix(settings, tensors)) is not None
    }


def numbers(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's values in float64, decoded from their bits where numpy lacks the dtype."""
    if tensor.dtype == torch.bfloat16:
        return (
            (tensor.view(torch.int16).numpy().astype(np.int64) << 16 & 0xFFFFFFFF)
            .astype(np.uint32)
            .view(np.float32)
            .astype(np.float64)
        )
    if tensor.dtype == torch.float8_e8m0fnu:
        return 2.0 ** (tensor.view(torch.uint8).numpy().astype(np.float64) - 127)
    if tensor.dtype == torch.float8_e4m3fn:
        bits = tensor.view(torch.uint8).numpy().astype(np.int64)
        exponent, mantissa = bits >> 3 & 15, bits & 7
        value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
        return np.where(bits >> 7 == 1, -value, value)
    return tensor.numpy().astype(np.float64)


def fields(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpacks the fields of int32 words: [lines, C] -> int64 [lines, C * 32 / bits]."""
    wide = words.astype(np.int64) & 0xFFFFFFFF
    per = 32 // bits
    out = np.zeros((words.shape[0], words.shape[1] * per), np.int64)
    for field in range(per):
        out[:, field::per] = wide // 2 ** (bits * field) % 2**bits
    return out


def matrix(settings: dict, tensors: dict[str, torch.Tensor]) -> np.ndarray | None:
    """The dequantised weight of one module."""
    if "qweight" in tensors:
        named = settings.get("quant_method", "gptq" if "bits" in settings else "awq")
        if named == "awq" or str(settings.get("packing_format", "")).endswith("awq"):
            return awq(tensors)
        return gptq(settings, tensors)
    if "absmax" in tensors:
        return table_floats(tensors)
    if "weight_packed" in tensors and tensors["weight_packed"].dtype == torch.int32:
        return packed(tensors)
    if not {"weight", "weight_packed"} & tensors.keys():
        return None
    if "weight_packed" in tensors or tensors["weight"].dtype == torch.uint8:
        return floats4(tensors)
    if tensors["weight"].dtype == torch.float8_e4m3fn:
        return floats8(tensors)
    if "SCB" in tensors:
        return numbers(tensors["weight"]) * numbers(tensors["SCB"])[:, None] / 127
    if tensors["weight"].dtype == torch.int8:
        return numbers(tensors["weight"]) * numbers(tensors["weight_scale"])
    return numbers(tensors["weight"])


def floats8(tensors: dict[str, torch.Tensor]) -> np.ndarray:
    codes = numbers(tensors["weight"])
    rows, columns = codes.shape
    (kind,) = set(tensors) & {"weight_scale_inv", "weight_scale", "qscale_weight"}
    found = tensors[kind]
    scale = numbers(found) if found.dtype != torch.uint8 else 2.0 ** (found.numpy().astype(np.float64) - 127)
    if scale.size == 1:
        return codes * scale.reshape(())
    if scale.size == rows:
        return codes * scale.reshape(rows, 1)
    if scale.shape[0] == rows:
        return codes * np.repeat(scale, 32, 1)
    scale = scale.reshape(-(-rows // 128), -(-columns // 128))
    out = np.zeros_like(codes)
    for row in range(rows):
        for block in range(scale.shape[1]):
            at = slice(block * 128, (block + 1) * 128)
            out[row, at] = codes[row, at] * scale[row // 128, block]
    return out


def floats4(tensors: dict[str, torch.Tensor]) -> np.ndarray:
    both = (tensors["weight_packed"] if "weight_packed" in tensors else tensors["weight"]).numpy().astype(np.int64)
    codes = np.zeros((both.shape[0], both.shape[1] * 2))
    for column, nibble in ((0, both % 16), (1, both // 16)):
        codes[:, column::2] = np.where(nibble > 7, -1.0, 1.0) * np.asarray(E2M1)[nibble % 8]
    found = tensors["weight_scale"]
    if found.dtype == torch.uint8:
        return codes * np.repeat(2.0 ** (found.numpy().astype(np.float64) - 127), 32, 1)
    value = codes * np.repeat(numbers(found), codes.shape[1] // found.shape[1], 1)
    if "weight_global_scale" in tensors:
        return value / numbers(tensors["weight_global_scale"])
    return value * numbers(tensors["weight_scale_2"])


def table_floats(tensors: dict[str, torch.Tensor]) -> np.ndarray:
    """bitsandbytes' NF4 and FP4: the file has the table of values, and a byte's upper half comes first."""
    (kind,) = (kind for kind in tensors if kind.startswith("quant_state."))
    state = json.loads(bytes(tensors[kind].tolist()))
    table, scales = tensors["quant_map"].numpy().astype(np.float64), tensors["absmax"].numpy()
    if scales.dtype == np.uint8:
        blocks = np.arange(len(scales)) // state["nested_blocksize"]
        wide = tensors["nested_quant_map"].numpy()[scales] * tensors["nested_absmax"].numpy()[blocks]
        scales = (wide + np.float32(state["nested_offset"])).astype(np.float32)
    both = tensors["weight"].numpy().flatten().astype(np.int64)
    codes = np.stack([both // 16, both % 16], 1).flatten()
    each = np.repeat(scales.astype(np.float64), state["blocksize"])[: len(codes)]
    return (table[codes] * each).reshape(state["shape"])


def packed(tensors: dict[str, torch.Tensor]) -> np.ndarray:
    rows, columns = tensors["weight_shape"].tolist()
    bits = tensors["weight_packed"].shape[1] * 32 // columns
    middle = 2 ** (bits - 1)
    values = fields(tensors["weight_packed"].numpy(), bits)[:, :columns] - middle
    scale = numbers(tensors["weight_scale"])
    group = np.arange(columns) // (columns // scale.shape[1])
    if "weight_g_idx" in tensors:
        group = tensors["weight_g_idx"].numpy()
    zero = np.zeros_like(scale)
    if "weight_zero_point" in tensors:
        found = tensors["weight_zero_point"]
        zero = found.numpy() if found.dtype == torch.int8 else fields(found.numpy().T, bits)[:, :rows].T - middle
    return (values - zero[:, group]) * scale[:, group]


def gptq(settings: dict, tensors: dict[str, torch.Tensor]) -> np.ndarray:
    bits = 32 * len(tensors["qweight"]) // len(tensors["g_idx"])  # `dynamic` may give a module other bits
    codes = fields(tensors["qweight"].numpy().T, bits)
    scale = numbers(tensors["scales"]).T
    group = tensors["g_idx"].numpy()
    if settings.get("sym", True):
        zero = np.full(scale.shape, 2 ** (bits - 1))
    else:
        zero = fields(tensors["qzeros"].numpy(), bits).T
        said = [settings.get(key) for key in ("packing_format", "checkpoint_format", "format")]
        if next(filter(None, said), None) not in ("gptq_v2", "auto_round:gptqmodel"):
            zero = (zero + 1) % 2**bits
    return (codes - zero[:, group]) * scale[:, group]


def awq(tensors: dict[str, torch.Tensor]) -> np.ndarray:
    def outputs(words: torch.Tensor) -> np.ndarray:
        found = fields(words.numpy(), 4)
        out = np.zeros_like(found)
        for field, place in enumerate(AWQ_ORDER):
            out[:, place::8] = found[:, field::8]
        return out.T

    codes, zero, scale = outputs(tensors["qweight"]), outputs(tensors["qzeros"]), numbers(tensors["scales"]).T
    group = np.arange(codes.shape[1]) // (codes.shape[1] // scale.shape[1])
    return (codes - zero[:, group]) * scale[:, group]
