"""Checkpoints of AutoRound, GPTQModel, ModelOpt, FBGEMM and SGLang: weights equal to the oracle's; random weights."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from engine.base.errors import ConfigError
from engine.checkpoint.section import Section
from engine.models.registry import build_model, load_model_config
from engine.quant.dialects import DIALECTS
from engine.quant.settings import with_quantisation
from tests.models.harness import load
from tests.quant.compared import check_weights
from tests.quant.test_dialects import forms
from tests.quant.written import (
    AWQ,
    BF16,
    INT8,
    U8,
    VARIANTS,
    Variant,
    floats8,
    gptq_settings,
    nibbles,
    packed_settings,
    scales,
    write,
)

AUTO = {
    "quant_method": "auto-round", "bits": 4, "sym": True, "group_size": 32, "autoround_version": "0.9.1",
    "block_name_to_quantize": "model.layers", "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}},
}  # fmt: skip
COMPRESSED = {**AUTO, "packing_format": "auto_round:llm_compressor", "act_dynamic": True}
AS_GPTQ = {**gptq_settings(4, 64, False), **AUTO, "group_size": 64, "sym": False}
TINY = {"hidden": 192, "inner": 192}  # one and a half blocks of 128
FP4, BY_BLOCKS = VARIANTS["ct mxfp4"].write, VARIANTS["fp8 blocks"].write


def modelopt(algorithm):
    return {"quant_method": "modelopt", "quant_algo": algorithm}


def mxfp4(draw, rows, columns):
    """MXFP4 with ModelOpt's names."""
    found = FP4(draw, rows, columns)
    return {"weight": found["weight_packed"], "weight_scale": found["weight_scale"]}


def w4a8(draw, rows, columns):
    """NVFP4 with a scale for each 32 columns."""
    group = scales(draw, rows, columns // 32, about=8.0).to(torch.float8_e4m3fn)
    return {"weight": nibbles(draw, rows, columns), "weight_scale": group, "weight_scale_2": torch.tensor(0.003)}


def bf16_whole(draw, rows, columns):
    found = VARIANTS["ct nvfp4"].write(draw, rows, columns)
    return {**found, "weight_global_scale": found["weight_global_scale"].to(BF16)}


NEWER = {
    "auto-round mxfp4": replace(
        VARIANTS["ct mxfp4"], settings={**COMPRESSED, "data_type": "mx_fp", "act_data_type": "mx_fp_rceil"}
    ),
    "auto-round mxfp4 mixed": replace(
        VARIANTS["ct mxfp4"], skipped=("v_proj",),
        settings={**COMPRESSED, "data_type": "mx_fp4e2m1", "extra_config": {".*v_proj$": {"bits": 16}}},
    ),
    "auto-round mxfp8": replace(VARIANTS["ct mxfp8"], settings={**COMPRESSED, "data_type": "mx_fp", "bits": 8}),
    "auto-round nvfp4": replace(
        VARIANTS["ct nvfp4"], settings={**COMPRESSED, "data_type": "nv_fp", "group_size": 16}
    ),
    "auto-round fp8": replace(
        VARIANTS["fp8 blocks"], settings={**AUTO, "packing_format": "auto_round:fp8", "data_type": "fp", "bits": 8,
                                          "group_size": [128, 128], "weight_block_size": [128, 128]},
    ),
    "auto-round fp8 static": replace(
        VARIANTS["ct float static"], settings={**AUTO, "packing_format": "auto_round:fp8_static", "data_type": "fp",
                                               "bits": 8, "group_size": -1, "act_dynamic": False},
    ),
    "auto-round gptqmodel": replace(
        VARIANTS["gptq v2"], settings={**AS_GPTQ, "packing_format": "auto_round:gptqmodel"}
    ),
    "auto-round rotated": replace(VARIANTS["gptq 32"], settings={
        **AUTO, "rotation_config": {"algorithm": "spinquant", "r1": True, "r2": True, "r3": False, "r4": False},
    }),
    "auto-round alone": replace(VARIANTS["gptq 32"], settings={**AUTO, "packing_format": "auto_round"}),
    "fbgemm": replace(
        VARIANTS["ct float channel"], settings={"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0,
                                                "modules_to_not_convert": ["lm_head.weight"]},
    ),
    "mxfp8": Variant(
        {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32], "scale_fmt": "ue8m0",
         "ignored_layers": ["lm_head", "vision_tower"]},
        floats8(per="group", dtype=U8),
    ),
    "mxfp8 without sizes": Variant({"quant_method": "mxfp8"}, floats8("weight_scale", "group", dtype=U8)),
    "w8a8 int8": replace(
        VARIANTS["ct int8"], settings={"quant_method": "w8a8_int8", "is_dynamic": True, "ignore": ["lm_head"]}
    ),
    "w8a8 fp8": replace(VARIANTS["ct float channel"], settings={"quant_method": "w8a8_fp8"}),
    "gptqmodel": replace(VARIANTS["gptq 32"], settings={
        "method": "gptq", "format": "gptq", "bits": 4, "group_size": 32, "sym": True, "pack_dtype": "int32",
        "lm_head": False, "meta": {"quantizer": ["gptqmodel:5.7.0"]}, "dynamic": {"-:.*lm_head": {}},
    }),
    "gptqmodel v2": replace(VARIANTS["gptq v2"], settings={
        "quant_method": "gptq", "format": "gptq_v2", "bits": 4, "group_size": 64, "sym": False,
    }),
    "gptqmodel awq": replace(VARIANTS["awq 64"], settings={
        "quant_method": "awq", "checkpoint_format": "gemm", "bits": 4, "group_size": 64, "zero_point": True,
    }),
    "gptqmodel head": replace(VARIANTS["gptq 32"], settings={**gptq_settings(4, 32), "lm_head": True}, head=True),
    "modelopt mxfp4": replace(VARIANTS["modelopt nvfp4"], write=mxfp4, settings=modelopt("W4A8_MXFP4_FP8")),
    "modelopt mxfp4 alone": replace(VARIANTS["modelopt nvfp4"], write=mxfp4, settings=modelopt("MXFP4")),
    "modelopt w4a8": replace(VARIANTS["modelopt nvfp4"], write=w4a8, settings=modelopt("W4A8_NVFP4_FP8")),
    "modelopt w4a16": replace(VARIANTS["modelopt nvfp4"], settings=modelopt("NVFP4_W4A16")),
    "modelopt fp8 of the original": replace(
        VARIANTS["modelopt mixed"], others=dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), BY_BLOCKS),
        settings={**modelopt("MIXED_PRECISION"), "quantized_layers": {
            f"model.layers.{layer}.{name}": {"quant_algo": algorithm}
            for layer in range(2) for name, algorithm in (("mlp", "NVFP4"), ("self_attn", "FP8_PB"))
        }},
    ),
    "modelopt awq": replace(VARIANTS["modelopt nvfp4"], settings=modelopt("NVFP4_AWQ")),
    "ct w4 inputs with zero points": replace(VARIANTS["ct w4 32"], settings={
        **packed_settings(4, 32), "config_groups": {"group_0": {
            **packed_settings(4, 32)["config_groups"]["group_0"], "input_activations": {**INT8, "symmetric": False},
        }},
    }),
    "ct nvfp4 in bf16": replace(VARIANTS["ct nvfp4"], write=bf16_whole),
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    """Several threads are slower for matrices of this size."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", NEWER)
def test_weights_are_those_of_the_oracle_and_random_ones_of_the_same_forms(tmp_path, name, caplog):
    variant = replace(NEWER[name], sizes=TINY)
    folder = write(tmp_path, variant)
    model = load(folder, "float32")
    assert check_weights(model, folder) == (9 if variant.head else 8)
    assert not [line for line in caplog.records if line.levelname == "WARNING"]
    if not variant.head:  # random weights leave the head in floats
        assert forms(build_model(load_model_config(folder), torch.float32, "cpu", None)) == forms(model)


def test_extra_config_says_which_modules_have_zero_points(tmp_path):
    """extra_config matches by name, then by expression; other modules follow the common settings."""
    variant = replace(VARIANTS["gptq asymmetric"], settings={**AS_GPTQ, "packing_format": "auto_round:auto_gptq"})
    folder = write(tmp_path, variant)
    config = json.loads((folder / "config.json").read_text())
    want = load(folder, "float32").layers
    extra = {"model.layers.1.mlp.down_proj": {"sym": False}, r".*layers\.0\.self_attn\.o_proj": {"sym": False}}
    config["quantization_config"] |= {"sym": True, "extra_config": extra}
    (folder / "config.json").write_text(json.dumps(config))
    got = load(folder, "float32").layers
    for mine, other, alike in (
        (got[1].mlp.down, want[1].mlp.down, True),
        (got[0].o, want[0].o, True),
        (got[0].mlp.down, want[0].mlp.down, False),
    ):
        assert torch.equal(mine.weight.dense(), other.weight.dense()) == alike


def test_extra_config_says_what_random_modules_are():
    extra = {"model.layers.0.mlp.down_proj": {"bits": 8, "group_size": 64}, r"layers\.0\.mlp\.up": {"bits": 16}}
    dialect = DIALECTS["auto-round"](Section({**AUTO, "extra_config": extra}, "config.json"))
    assert dialect.stored("layers.0.mlp.down_proj", 256, None).form == "INT8 by 64"
    assert dialect.stored("layers.1.mlp.down_proj", 256, None).form == "INT4 by 32"
    assert dialect.stored("layers.0.mlp.up_proj", 256, None) is None


def test_quantised_layers_of_modelopt_name_what_is_around_random_modules():
    layers = {"model.layers.0.mlp.experts": {"quant_algo": "NVFP4"}, "model.layers.0.mlp": {"quant_algo": "FP8"}}
    settings = {**modelopt("MIXED_PRECISION"), "quantized_layers": layers}
    dialect = DIALECTS["modelopt"](Section(settings, "config.json"))
    assert dialect.stored("layers.0.mlp.experts.3.up_proj", 256, None).form == "NVFP4"
    assert dialect.stored("layers.0.mlp.shared_expert.up_proj", 256, None).form == "FP8 by matrices"
    assert dialect.stored("layers.0.self_attn.q_proj", 256, None) is None


def test_settings_in_a_file_of_their_own_go_before_those_of_the_decoder(tmp_path):
    """The text_config of NVIDIA's Kimi-K2.5 still has the settings of the INT4 release."""
    root = Section({"text_config": {"quantization_config": packed_settings(4, 32)}}, "config.json")
    assert with_quantisation(root, tmp_path).values["quantization_config"]["quant_method"] == "compressed-tensors"
    written = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]},
    }
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(written))
    assert with_quantisation(root, tmp_path).values["quantization_config"]["quant_algo"] == "NVFP4"
    own = Section({"quantization_config": VARIANTS["awq 64"].settings, **root.values}, "config.json")
    assert with_quantisation(own, tmp_path).values["quantization_config"]["quant_method"] == "awq"


def test_floats_that_were_made_sparse_are_floats(tmp_path):
    """The first sparse releases of Neural Magic have these settings."""
    plain = Variant({}, lambda draw, rows, columns: {"weight": torch.randn(rows, columns, generator=draw)}, TINY)
    folder = write(tmp_path, plain)
    config = json.loads((folder / "config.json").read_text())
    sparse = {"format": "dense", "global_sparsity": 0.5, "sparsity_structure": "2:4", "targets": ["Linear"]}
    (folder / "config.json").write_text(json.dumps({**config, "compression_config": {"sparsity_config": sparse}}))
    assert check_weights(load(folder, "float32"), folder) == 0


@pytest.mark.parametrize(
    ("method", "key"), [("fp8", "modules_to_not_convert"), ("awq", "modules_to_not_convert"),
                        ("gptq", "modules_to_not_convert"), ("bitsandbytes", "llm_int8_skip_modules")],
)  # fmt: skip
def test_parts_of_names_leave_random_modules_out(method, key):
    """MiniMax-M2 in FP8, QuantTrio's AWQ and unsloth's NF4 have such lists."""
    listed = ["gate", "self_attn", "model.layers.0.", "mlp.shared_expert", "merger"]
    dialect = DIALECTS[method](Section({"quant_method": method, "bits": 4, key: listed}, "config.json"))
    quantised = ("layers.1.mlp.gate_proj", "layers.10.mlp.up_proj", "layers.1.mlp.experts.0.up_proj")
    kept = ("layers.1.mlp.gate", "layers.1.self_attn.q_proj", "layers.0.mlp.up_proj", "visual.merger.linear_fc1",
            "layers.1.mlp.shared_expert.up_proj")  # fmt: skip
    assert [module for module in quantised if dialect.stored(module, 256, None) is None] == []
    assert [module for module in kept if dialect.stored(module, 256, None) is not None] == []


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.", "thinker.model.", "model.language_model."])
def test_names_begin_as_the_quantisers_do(prefix):
    extra = {f"{prefix}layers.0.mlp.up_proj": {"bits": 16}}
    dialect = DIALECTS["auto-round"](Section({**AUTO, "extra_config": extra}, "config.json"))
    assert dialect.stored("layers.0.mlp.up_proj", 256, None) is None


def test_awq_gemv_of_gptqmodel_is_not_read_as_gemm(tmp_path):
    """A square matrix of the gemv format has the shapes of the gemm format."""
    settings = {**AWQ, "version": None, "group_size": 64, "checkpoint_format": "gemv"}
    folder = write(tmp_path, replace(VARIANTS["awq 64"], settings=settings))
    with pytest.raises(ConfigError, match="checkpoint_format='gemv'; gemm is read: export the checkpoint again"):
        load(folder)
