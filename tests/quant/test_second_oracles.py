"""compressed-tensors and transformers dequantise the same files on the CPU: equal to the oracle to 1e-6.

No library here dequantises these formats on a CPU: GPTQ and AutoRound (transformers needs gptqmodel), columns in the
order of `g_idx` (compressed-tensors 0.20 refuses it), FP8 with a flat or four-dimensional scale. For these the oracle
is the only reference, as it is for bitsandbytes, a package too large to install for one test (0.50.2 agrees to 1e-8).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.quant import oracle
from tests.quant.written import VARIANTS, write

MODULE = "model.layers.0.mlp.down_proj"  # 192 rows, 320 columns: partial blocks
PACKED = ["ct w4 32", "ct w4 64", "ct w4 channel", "ct w4 asymmetric", "ct w8 channel", "ct w8 32", "ct w8 asymmetric",
          "ct float tensor", "ct float channel", "ct float static", "ct float block", "ct naive", "ct int8",
          "ct int8 weights", "ct mxfp4", "ct mxfp8"]  # fmt: skip
FP8 = ["fp8 tensor", "fp8 tensor static", "fp8 blocks", "fp8 blocks bf16", "fp8 blocks ue8m0"]


def module_of(folder: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """The file's settings, and the tensors of one module by kind."""
    tensors = load_file(folder / "model.safetensors")
    kinds = {name.removeprefix(f"{MODULE}."): each for name, each in tensors.items() if name.startswith(f"{MODULE}.")}
    return json.loads((folder / "config.json").read_text())["quantization_config"], kinds


def check(folder: Path, found: torch.Tensor) -> None:
    np.testing.assert_allclose(found.double().numpy(), oracle.dequantised(folder)[f"{MODULE}.weight"], rtol=1e-6)


def decompressed(settings: dict, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The weight as compressed-tensors decompresses it, with float32 scales where the format's scales are floats."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    (scheme,) = QuantizationConfig.model_validate(settings).config_groups.values()
    scale = tensors["weight_scale"]
    given = {**tensors, "weight_scale": scale if scale.dtype == torch.uint8 else scale.float()}
    return BaseCompressor.get_value_from_registry(settings["format"]).decompress(given, scheme)["weight"]


@pytest.mark.parametrize("name", PACKED)
def test_compressed_tensors_agrees(tmp_path, name):
    folder = write(tmp_path, VARIANTS[name])
    check(folder, decompressed(*module_of(folder)))


@pytest.mark.parametrize("name", ["ct nvfp4", "modelopt nvfp4"])
def test_compressed_tensors_agrees_about_a_scale_of_the_matrix(tmp_path, name):
    """The decompressor rounds to bfloat16, so its parts are called; the converter maps ModelOpt's names."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4 import ModelOptNvfp4Converter
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    folder = write(tmp_path, VARIANTS[name])
    given = {f"{MODULE}.{kind}": each for kind, each in module_of(folder)[1].items()}
    converter = ModelOptNvfp4Converter(targets=[f"re:.*{MODULE}$"])
    given = given if name.startswith("ct") else converter.process(given)
    packed, scale, whole = (given[f"{MODULE}.weight_{kind}"] for kind in ("packed", "scale", "global_scale"))
    values = unpack_fp4_from_uint8(packed, len(packed), 2 * packed.shape[1], dtype=torch.float32)
    (scheme,) = converter._build_quant_config().config_groups.values()
    check(folder, dequantize(values, scale.float(), args=scheme.weights, global_scale=whole, dtype=torch.float32))


def test_its_converter_of_awq_agrees(tmp_path):
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    folder = write(tmp_path, VARIANTS["awq 32"])
    settings, tensors = module_of(folder)
    converter = AutoAWQConverter.from_autoawq_config(settings)
    given = converter.process({f"{MODULE}.{kind}": each for kind, each in tensors.items()})
    said = {**converter._build_quant_config().model_dump(), "format": "pack-quantized"}
    check(folder, decompressed(said, {name.rpartition(".")[2]: each for name, each in given.items()}))


@pytest.mark.parametrize("name", FP8)
def test_transformers_agrees_about_fp8(tmp_path, name):
    """transformers' loader refuses partial blocks; the function of its backward pass does not."""
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    folder = write(tmp_path, VARIANTS[name])
    settings, tensors = module_of(folder)
    scale = tensors["weight_scale_inv"].float()
    check(folder, _dequantize_fp8_weight(tensors["weight"], scale, settings.get("weight_block_size"), torch.float32))


def test_transformers_agrees_about_mxfp4():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    draw = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (1, 24, 5, 16), generator=draw, dtype=torch.uint8)
    scales = torch.randint(110, 130, (1, 24, 5), generator=draw, dtype=torch.uint8)
    found = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].T
    tensors = {"weight_packed": blocks[0].flatten(1), "weight_scale": scales[0]}
    assert np.array_equal(found.double().numpy(), oracle.matrix({}, tensors))
