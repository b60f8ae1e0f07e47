"""Bad quantised checkpoints are refused: one line with what was found, what is allowed and how to convert."""

# ruff: noqa: E501 (a case is a line)
from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.base.errors import ConfigError
from engine.kernels.gemm.pack import Placement
from engine.models.registry import build_model, load_model_config
from engine.weights.files import DTYPE_BYTES, DTYPES, open_checkpoint
from engine.weights.load import match
from server.flags.config import Config, ModelFlags
from server.start.check import lines
from tests.models.harness import load
from tests.quant.written import VARIANTS, write

DOWN = "model.layers.1.mlp.down_proj"
SETTINGS = [
    ("gptq 32", {"bits": 2}, "bits=2; 4 and 8 are read: quantise"),
    ("gptq 32", {"bits": 3}, "bits=3; 4 and 8 are read: quantise"),
    ("gptq dynamic", {"dynamic": {"+:.*down_proj": {"bits": 3}}}, "dynamic: \\+:.*down_proj: bits=3; 4 and 8 are read: quantise"),
    ("gptq dynamic", {"dynamic": {"+:(": {}}}, "dynamic: '\\+:\\(' is no regular expression"),
    ("gptq dynamic", {"dynamic": {"+:.*": 4}}, "dynamic: \\+:.\\* must be an object"),
    ("gptq dynamic", {"dynamic": [".*"]}, "dynamic must be an object"),
    ("gptq 32", {"quant_method": "hqq"}, "quantized \\(hqq\\); this version reads .*awq"),
    ("gptq 32", {"quant_method": "quark"}, "quantized \\(quark\\); this version reads .*awq"),
    ("gptq 32", {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'; gptq and gptq_v2 are read: export"),
    ("gptq 32", {"quant_method": "aqlm"}, "quantized \\(aqlm\\); this version reads .*awq"),
    ("bnb nf4", {"bnb_4bit_quant_type": "af4"}, "bnb_4bit_quant_type='af4'; nf4 and fp4 are read: quantise"),
    ("awq 32", {"version": "gemv"}, "version='gemv'; gemm is read: export"),
    ("awq 32", {"bits": 3}, "bits=3; AWQ has 4"),
    ("auto-round gptq", {"packing_format": "auto_round:gguf"}, "packing_format='auto_round:gguf'; read are auto_round:auto_gptq, .*: export"),
    ("auto-round gptq", {"packing_format": "auto_round:llm_compressor"}, "data_type='int' with bits=4 in the format of llm_compressor; read are mx_fp .*: export"),
    ("auto-round gptq", {"extra_config": {".*v_proj": {"bits": 2}}}, "extra_config: \\.\\*v_proj: bits=2; 4, 8 and, for floats, 16 are read: quantise"),
    ("auto-round gptq", {"extra_config": {"(": {"bits": 4}}}, "extra_config: '\\(' is no regular expression"),
    ("auto-round gptq", {"extra_config": {"lm_head": 16}}, "extra_config: lm_head must be an object"),
    ("gptq 32", {"checkpoint_format": None, "format": "marlin"}, "format='marlin'; gptq and gptq_v2 are read: export"),
    ("gptq 32", {"rotation": "hadamard"}, "rotation: inputs of the matrices are rotated .*: quantise the checkpoint again without"),
    ("auto-round gptq", {"rotation_config": {"block_size": 32, "hadamard_type": "hadamard"}}, "rotation_config: inputs of the matrices are rotated"),
    ("auto-round gptq", {"rotation_config": {"algorithm": "spinquant", "r1": True, "r2": True, "r4": True}}, "rotation_config: inputs of the matrices are rotated"),
    ("auto-round awq", {"transform_config": {"transform_type": "hadamard"}}, "transform_config: inputs of the matrices are rotated"),
    ("gptq 32", {"is_marlin_format": True}, "is_marlin_format=True; gptq and gptq_v2 are read: export"),
    ("modelopt nvfp4", {"quant_algo": "INT4_AWQ"}, "quant_algo='INT4_AWQ'; read are FP8, .*: quantise the checkpoint again"),
    ("ct w4 32", {"format": "marlin-24"}, "format marlin-24; read are dense, pack-quantized"),
    ("ct w4 32", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity sparse-24-bitmask; .*without sparsity"),
    ("ct int8", {"config_groups": {"g": {"targets": ["Linear"], "input_activations": {"type": "int", "symmetric": False}}}},
     "config_groups.g: input_activations with zero points; symmetric"),
    ("ct int8", {"config_groups": {"g": {"targets": ["Linear"], "input_activations": {"type": "int", "num_bits": 4}}}},
     "config_groups.g.input_activations.num_bits=4; integer weights need inputs of 8 bits: quantise"),
    ("ct w4 32", {"quant_method": ["awq"]}, "quantized \\(\\['awq'\\]\\)"),
    ("ct w4 32", {"transform_config": {"config_groups": {"R4": {"type": "hadamard", "apply": [{"targets": ["re:.*down_proj$"], "location": "input"}]}}}},
     "transform_config: config_groups.R4 rotates input while the model runs, .*: quantise the checkpoint with"),
    ("ct w4 32", {"transform_config": {"config_groups": {"R1": {"apply": "input"}}}}, "config_groups.R1 must be an object whose apply"),
    ("ct w4 32", {"transform_config": [1]}, "transform_config must be an object"),
    ("ct w4 32", {"sparsity_config": "none"}, "sparsity_config='none' must be an object"),
    ("ct w4 32", {"config_groups": {"g": {"weights": "x"}}}, "config_groups.g.weights='x' must be an object"),
    ("ct w4 32", {"config_groups": {"g": {"input_activations": [1]}}}, "config_groups.g.input_activations=\\[1\\] must be an object"),
    ("ct w4 32", {"config_groups": {"g": {"targets": 1}}}, "config_groups.g.targets=1 must be a list of names"),
    ("ct w4 32", {"config_groups": {"g": {"targets": ["Linear", None]}}}, "targets=.* must be a list of names"),
    ("ct w4 32", {"config_groups": {"g": {"targets": ["re:("]}}}, "'re:\\(' is no regular expression"),
    ("fp8 blocks", {"modules_to_not_convert": ["re:*.mlp"]}, "'re:\\*.mlp' is no regular expression"),
    ("ct w4 32", {"config_groups": {"g": {"weights": {"group_size": "32"}}}}, "weights.group_size='32' must be a number"),
    ("ct float channel", {"config_groups": {"g": {"weights": {"block_structure": [128, 0]}}}}, "block_structure=\\[128, 0\\] must be two sizes"),
    ("ct float channel", {"config_groups": {"g": {"weights": {"block_structure": "128"}}}}, "block_structure='128' must be two sizes"),
    ("ct w4 32", {"config_groups": {"g": {"weights": {"num_bits": 3}}}}, "weights.num_bits=3; 4 and 8 are read: quantise"),
    ("ct w4 32", {"config_groups": {"g": {"weights": {"num_bits": [4]}}}}, "weights.num_bits=\\[4\\]; 4 and 8 are read"),
    ("ct float channel", {"config_groups": {"g": {"weights": {"strategy": ["channel"]}}}}, "weights.strategy=\\['channel'\\] must be a word"),
    ("ct mixed", {"config_groups": {"g": {"format": "marlin-24"}}}, "config_groups.g.format='marlin-24'; read are dense, "),
    ("ct mixed", {"config_groups": {"g": {"format": 4}}}, "config_groups.g.format=4; read are dense, "),
    ("fp8 tensor", {"activation_scheme": "sometimes"}, "activation_scheme='sometimes'; read are dynamic, static"),
    ("fp8 blocks", {"activation_scheme": "static"}, "static inputs of a weight with a scale per block; dynamic ones are read: quantise"),
    ("fp8 blocks", {"weight_block_size": [128]}, "weight_block_size=\\[128\\] must be two sizes"),
]  # fmt: skip


def changed(tensors, kind, value):
    return {**tensors, f"{DOWN}.{kind}": value(tensors.get(f"{DOWN}.{kind}"))}


def without(tensors, kind):
    return {name: tensor for name, tensor in tensors.items() if name != f"{DOWN}.{kind}"}


def set_first(number):
    def change(tensor):
        flat = tensor.clone().float().flatten()
        flat[0] = number
        return flat.view(tensor.shape).to(tensor.dtype)

    return change


def bits(tensor, value):
    tensor = tensor.clone()
    tensor.view(torch.uint8)[0, 0] = value
    return tensor


STATE = "weight.quant_state.bitsandbytes__"
FILES = [
    ("bnb nf4", lambda t: changed(t, "weight.quant_map", lambda m: m.flip(0)), "quant_map is not the table of NF4; quantise"),
    ("bnb nf4", lambda t: changed(t, "weight", lambda w: w.view(-1, 2).view(torch.bfloat16)), "dtype BF16; codes stored as U8"),
    ("bnb nf4", lambda t: without(t, "weight.absmax"), "without weight.absmax; the checkpoint is not whole"),
    ("bnb nf4", lambda t: changed(without(t, f"{STATE}nf4"), f"{STATE}af4", lambda _: t[f"{DOWN}.{STATE}nf4"]), "another kind \\(af4\\) than nf4 and fp4; quantise"),
    ("bnb nf4", lambda t: changed(without(t, f"{STATE}nf4"), f"{STATE}fp4", lambda _: t[f"{DOWN}.{STATE}nf4"]), "quant_map is not the table of FP4; quantise"),
    ("bnb nf4", lambda t: changed(t, f"{STATE}nf4", lambda s: s[1:]), "holds no JSON object of bitsandbytes; fetch"),
    ("bnb nf4", lambda t: changed(t, f"{STATE}nf4", lambda s: torch.tensor(list(b'{"shape": [320, 192]}'), dtype=torch.uint8)), "weight is said to be \\[320, 192\\]; \\[192, 320\\] is needed"),
    ("bnb nf4 nested", lambda t: without(t, "weight.nested_absmax"), "1 missing: .*nested_absmax"),
    ("bnb int8", lambda t: changed(t, "weight_format", lambda w: w + 2), "weight_format is not 0"),
    ("ct w4 32", lambda t: changed(t, "weight_shape", lambda _: torch.tensor([192, 64])), "weight_shape is \\[192, 64\\]"),
    ("ct w4 32", lambda t: changed(t, "weight_scale", set_first(-1.0)), "down_proj: 1 of .* weight_scale are negative"),
    ("ct w4 32", lambda t: changed(t, "weight_scale", set_first(float("nan"))), "negative, NaN or infinite|NaN or infinity"),
    ("ct nvfp4", lambda t: changed(t, "weight_global_scale", lambda s: -s), "1 of 1 values of weight_global_scale are negative"),
    ("ct w4 32", lambda t: changed(t, "weight_scale", set_first(float("inf"))), "negative, NaN or infinite|NaN or infinity"),
    ("ct int8", lambda t: changed(t, "weight_zero_point", lambda _: torch.ones(192, 1, dtype=torch.int8)), "down_proj: codes of I8 with zero points; .*: quantise the checkpoint again"),
    ("ct w4 32", lambda t: without(t, "weight_scale"), "down_proj.*weight_packed without weight_scale"),
    ("ct w4 32", lambda t: without(t, "weight_packed"), "1 missing: .*down_proj.weight"),
    ("ct w4 asymmetric", lambda t: without(t, "weight_zero_point"), "down_proj: weight_packed without weight_zero_point"),
    ("gptq act", lambda t: without(t, "g_idx"), "down_proj: desc_act without g_idx; the checkpoint is not whole"),
    ("ct w4 32", lambda t: changed(t, "weight_packed", lambda w: w[:, :13].contiguous()), "13 words for 320 columns"),
    ("ct mxfp4", lambda t: changed(t, "weight_scale", lambda s: torch.full_like(s, 255)), "weight_scale are negative, NaN"),
    ("ct float channel", lambda t: changed(t, "weight", lambda w: bits(w, 0x7F)), "codes that are not numbers|NaN or infinity"),
    ("ct int8 static", lambda t: changed(t, "input_scale", lambda s: s[:0].clone()), "input_scale has shape \\[0\\], the configuration asks for \\[\\]"),
    ("fp8 blocks", lambda t: without(t, "weight_scale_inv"), "down_proj: FP8 codes without a scale"),
    ("fp8 blocks", lambda t: changed(t, "weight_scale_inv", lambda s: s[:1].contiguous()), "has shape \\[1, 3\\]"),
    ("gptq act", lambda t: changed(t, "g_idx", lambda g: torch.full_like(g, 40)), "g_idx must name each of 10 groups 32 times"),
    ("gptq act", lambda t: changed(t, "g_idx", lambda g: g[:0].clone()), "g_idx has shape \\[0\\]; \\[320\\] is needed"),
    ("gptq act", lambda t: changed(t, "g_idx", lambda g: g[None].clone()), "g_idx has shape \\[1, 320\\]; \\[320\\] is needed"),
    ("ct w4 g_idx", lambda t: changed(t, "weight_g_idx", lambda g: g[:-1].clone()), "weight_g_idx has shape \\[319\\]; \\[320\\] is needed"),
    ("modelopt nvfp4", lambda t: changed(t, "pre_quant_scale", lambda _: torch.ones(320)), "down_proj: pre_quant_scale multiplies .*: quantise the checkpoint again"),
    ("gptq 32", lambda t: changed(t, "bias", lambda b: b + 1), "down_proj.bias is not zero"),
    ("gptq 32", lambda t: without(t, "qzeros"), "1 missing: .*qzeros"),
    ("fp8 tensor static", lambda t: without(t, "activation_scale"), "static inputs without their scale; one of input_scale, .*quantise the checkpoint again with dynamic inputs"),
    ("ct float static", lambda t: without(t, "input_scale"), "down_proj: static inputs without their scale"),
    ("ct int8 static", lambda t: without(t, "input_scale"), "down_proj: codes of I8 for static inputs without input_scale"),
    ("modelopt fp8", lambda t: without(t, "input_scale"), "down_proj: static inputs without their scale"),
    ("ct w4 32", lambda t: without(t, "weight_shape"), "down_proj: weight_packed without weight_shape; the checkpoint is not whole"),
    ("bnb nf4", lambda t: without(t, f"{STATE}nf4"), "without weight.quant_state.bitsandbytes__nf4; the checkpoint is not whole"),
    ("bnb int8", lambda t: without(t, "weight_format"), "SCB without weight_format; the checkpoint is not whole"),
    ("modelopt fp8", lambda t: {**t, "model.embed_tokens.weight_scale": torch.tensor(1.0)}, "embed_tokens: .*in linear layers, experts and routers alone"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "words"), SETTINGS)
def test_a_configuration_is_refused_in_one_line(tmp_path, name, change, words):
    folder = write(tmp_path, VARIANTS[name])
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=words) as error:
        load(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "change", "words"), FILES)
def test_a_damaged_file_is_refused_in_one_line(tmp_path, name, change, words):
    folder = write(tmp_path, VARIANTS[name])
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    with pytest.raises(ConfigError, match=words) as error:
        load(folder)
    assert "\n" not in str(error.value)


def test_columns_that_groups_do_not_divide_are_refused(tmp_path):
    folder = write(tmp_path, VARIANTS["gptq 32"])
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["group_size"] = 128
    (folder / "config.json").write_text(json.dumps(config))
    load(folder)  # the shapes of the file's tensors override group_size
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{DOWN}.scales"] = tensors[f"{DOWN}.scales"][:3].contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="group_size=128 does not divide the 320 columns"):
        load(folder)


# Tensors that serving ignores: identity orders, zero biases, and scales of inputs that stay floats or get token scales.
SPARE = {
    "g_idx": ("gptq 32", "gptq asymmetric"),
    "bias": ("gptq 32",),
    "input_global_scale": ("ct nvfp4",),
    "input_scale": ("modelopt nvfp4",),
    "qscale_act": ("fp8 qscale_weight",),
}
KINDS_OF = ("fp8 tensor static", "fp8 blocks", "fp8 qscale_weight", "ct float static", "ct mxfp8", "ct int8 static",
            "ct w4 asymmetric", "ct w4 g_idx", "ct nvfp4", "ct mxfp4", "modelopt fp8", "modelopt nvfp4", "gptq 32",
            "gptq act", "gptq asymmetric", "auto-round awq", "awq 32", "bnb nf4 nested", "bnb int8")  # fmt: skip


@pytest.mark.parametrize("name", KINDS_OF)
def test_half_a_modules_tensors_are_refused(tmp_path, name):
    """Leaves out each tensor of a module in turn."""
    folder = write(tmp_path, VARIANTS[name])
    tensors = load_file(folder / "model.safetensors")
    kinds = [key.removeprefix(f"{DOWN}.") for key in tensors if key.startswith(f"{DOWN}.")]
    assert len(kinds) > 1
    for kind in kinds:
        if name in SPARE.get(kind, ()):
            continue
        save_file(without(tensors, kind), folder / "model.safetensors")
        with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.down_proj") as error:
            load(folder)
        assert "\n" not in str(error.value), kind


def test_rotations_that_are_part_of_the_codes_are_served(tmp_path):
    folder = write(tmp_path, VARIANTS["ct w4 32"])
    config = json.loads((folder / "config.json").read_text())
    places = [{"targets": ["Linear"], "location": place} for place in ("weight_output", "weight_input")]
    config["quantization_config"]["transform_config"] = {"config_groups": {"R1": {"type": "hadamard", "apply": places}}}
    (folder / "config.json").write_text(json.dumps(config))
    load(folder)


SHAPES = [
    ("gptq act", lambda t: changed(t, "g_idx", lambda g: g[:0].clone()), "g_idx has shape \\[0\\]; \\[320\\] is needed"),
    ("modelopt nvfp4", lambda t: changed(t, "pre_quant_scale", lambda _: torch.ones(320)), "pre_quant_scale multiplies"),
    ("ct w4 32", lambda t: without(t, "weight_scale"), "weight_packed without weight_scale"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "words"), SHAPES)
def test_check_refuses_from_headers_alone(tmp_path, name, change, words):
    folder = write(tmp_path, VARIANTS[name])
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    with pytest.raises(ConfigError, match=words):
        list(lines(Config(model=ModelFlags(model=str(folder), device="cpu"))))


def test_check_says_of_mlx_what_the_start_says(tmp_path):
    """MLX files have unsigned words; the configuration is refused before the header is read."""
    folder = write(tmp_path, VARIANTS["ct w4 32"])
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization": {"bits": 4, "group_size": 64}, "quantization_config": {"bits": 4, "group_size": 64}}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"model.embed_tokens.weight": torch.ones(8, 2).to(torch.uint32)}, folder / "model.safetensors")
    for refused in (
        lambda: list(lines(Config(model=ModelFlags(model=str(folder), device="cpu")))),
        lambda: load(folder),
    ):
        with pytest.raises(ConfigError, match="quantized by MLX"):
            refused()


ODD_SHAPES = ((), (0,), (1,), (3,), (1, 1), (5, 7), (1, 2, 3), (192, 320), (320, 192))


@pytest.mark.parametrize("name", KINDS_OF)
def test_any_header_of_a_module_is_read_or_refused(tmp_path, name):
    """Planning and reading raise no other error; here all values are zero."""
    folder = write(tmp_path, VARIANTS[name])
    config, (shard,) = load_model_config(folder), open_checkpoint(folder)
    kinds = {key.removeprefix(f"{DOWN}."): info for key, info in shard.tensors.items() if key.startswith(f"{DOWN}.")}
    refused, read = [], 0
    for kind, info in kinds.items():
        odd = [replace(info, shape=shape) for shape in ODD_SHAPES] + [
            replace(info, dtype=dtype) for dtype in DTYPE_BYTES
        ]
        for each in odd:
            shards = [replace(shard, tensors={**shard.tensors, f"{DOWN}.{kind}": each})]
            try:
                model = build_model(config, torch.float32, "cpu", shards)
                match(model, shards, str(folder))
                model.layers[1].mlp.down.scheme.matrices(zeros({**kinds, kind: each}), Placement(torch.float32, "cpu"))
                read += 1
            except ConfigError as error:
                refused.append(str(error))
    assert len(refused) > 2 * read
    assert not [line for line in refused if "\n" in line]


def zeros(found):
    """Tensors of zeros with the headers' dtypes and shapes."""
    made = {}
    for kind, info in found.items():
        tensor = torch.empty(info.shape, dtype=DTYPES[info.dtype])
        tensor.view(torch.uint8).zero_() if tensor.dim() else tensor.view(1).view(torch.uint8).zero_()
        made[kind] = [tensor]
    return made
