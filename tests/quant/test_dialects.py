"""Every dialect and variant: weights equal to the oracle's for the same file, and logits equal to a float model's."""

from __future__ import annotations

import asyncio
import functools
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.section import Section
from engine.kernels.gemm.parts import PartsWeight
from engine.models.registry import load_model_config
from engine.quant.awq import PackedAwq
from engine.quant.base import Quantised
from engine.quant.dialects import DIALECTS
from engine.quant.forms import form_line
from engine.quant.gptq import PackedGptq
from engine.quant.settings import with_quantisation
from engine.weights.table import parts_of
from tests import tiny
from tests.engine_kit import answer, running
from tests.invariance.test_text import PROMPTS, request
from tests.models.harness import Harness, load
from tests.quant import oracle
from tests.quant.compared import check_weights
from tests.quant.written import VARIANTS, Variant, write

TOKENS = [5, 9, 200, 17, 33, 250, 61, 4, 90, 91, 92]
INTEGER_INPUTS = ("ct int8", "ct int8 static")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A function that returns the folder of a variant and writes it on the first call."""
    root = tmp_path_factory.mktemp("quantised")
    return functools.cache(lambda name: write(root / name.replace(" ", "-"), VARIANTS[name]))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_dialect_has_the_weights_of_the_oracle(folder_of, name):
    folder = folder_of(name)
    assert check_weights(load(folder, "float32"), folder) == (9 if VARIANTS[name].head else 8) - 2 * sum(
        ending in ("o_proj", "down_proj") for ending in VARIANTS[name].skipped
    )


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in INTEGER_INPUTS])
def test_a_dialect_has_the_logits_of_a_float_model(folder_of, name, tmp_path):
    folder = folder_of(name)
    model = load(folder, "float32")
    plain = write(tmp_path, Variant({}, VARIANTS[name].write, VARIANTS[name].sizes))
    tensors = {key: torch.from_numpy(value).float().contiguous() for key, value in oracle.dequantised(folder).items()}
    save_file(tensors, plain / "model.safetensors")
    harness, floats = Harness(model), Harness(load(plain, "float32"))
    got, want = harness.prefill(harness.add(TOKENS)), floats.prefill(floats.add(TOKENS))
    assert float((got - want).norm() / want.norm()) < 2e-4
    again = harness.add(TOKENS)
    assert torch.equal(harness.prefill(again, chunk=3), got)


FORMS = ("fp8 blocks", "ct int8", "ct w4 asymmetric", "gptq act unlike", "ct nvfp4", "bnb nf4", "ct mixed")


@pytest.mark.parametrize("name", FORMS)
async def test_tokens_of_a_form_do_not_depend_on_circumstances(folder_of, name):
    """Tokens are equal alone, in a batch, in chunks, from the prefix cache, and after preemption."""
    settings = {"device": "cpu", "dtype": "float32"}
    async with running(folder_of(name), **settings) as served:
        alone = [(await answer(served, request(prompt)))[0] for prompt in PROMPTS[:8]]
    tight = {"max_prefill_chunk": 7, "num_gpu_blocks_override": 20, "max_model_len": 160, "debug_poison": True}
    async with running(folder_of(name), **settings, **tight) as served:
        for _ in range(2):
            together = await asyncio.gather(*[answer(served, request(prompt)) for prompt in PROMPTS[:8]])
            assert [choices[0] for choices in together] == alone
        assert served.stats.prefix_hits > 0
        assert served.stats.preemptions > 0


@pytest.mark.parametrize("name", INTEGER_INPUTS)
def test_integers_meet_integers(folder_of, name):
    """Every integer sum is exact, as in numpy, so only the scales round."""
    model = load(folder_of(name), "float32")
    weight = model.layers[0].mlp.down.weight
    x = torch.randn(5, 320, generator=torch.Generator().manual_seed(1))
    scale = x.abs().amax(1) / 127 if name == "ct int8" else torch.full((5,), 0.03)
    whole = (x / scale[:, None]).round().clamp(-128, 127)
    file = load_file(folder_of(name) / "model.safetensors")
    codes, row = (file[f"model.layers.0.mlp.down_proj.{kind}"] for kind in ("weight", "weight_scale"))
    sums = whole.double() @ codes.double().T
    torch.testing.assert_close(
        weight.linear(x).double(), sums * scale[:, None].double() * row.T.double(), rtol=3e-7, atol=0
    )


def test_codes_that_the_configuration_leaves_out_are_read_as_codes_and_logged_once(folder_of, tmp_path, caplog):
    folder = write(tmp_path, VARIANTS["ct w4 32"])
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["lm_head", "re:.*layers.1.*(k_proj|gate_proj)", "model.layers.7.mlp"]
    (folder / "config.json").write_text(json.dumps(config))
    load(folder_of("ct w4 32"), "float32")
    assert not [line for line in caplog.records if line.levelname == "WARNING"]
    assert check_weights(load(folder, "float32"), folder) == 8
    (told,) = [line.getMessage() for line in caplog.records if line.levelname == "WARNING"]
    assert told.startswith("2 modules that the configuration leaves out of quantisation are codes in the files")
    assert "layers.1.self_attn.k_proj, layers.1.mlp.gate_proj" in told


def test_hundreds_of_names_cost_a_module_little():
    """Qwen3-235B-A22B in FP8 names 283 modules and has 36,000; comparing each with each took half a minute."""
    names = [f"model.layers.{number}.{name}" for number in range(94) for name in ("input_layernorm", "mlp.gate", "x*")]
    dialect = DIALECTS["fp8"](Section({"modules_to_not_convert": ["lm_head", *names]}, "config.json"))
    modules = [f"layers.{number}.mlp.experts.{expert}.up_proj" for number in range(8) for expert in range(512)]
    begin = time.process_time()
    found = [dialect.stored(module, 4096, None) for module in modules]
    assert None not in found
    assert time.process_time() - begin < 1.5
    assert dialect.stored("layers.93.mlp.gate", 4096, None) is dialect.stored("layers.93.xyz", 4096, None) is None
    assert dialect.stored("layers.93.mlp.gate_proj", 4096, None) is not None


def test_blocks_across_rows_become_floats_and_are_counted_as_floats(folder_of):
    model = load(folder_of("bnb nf4 across rows"), "float32")
    assert not isinstance(model.layers[0].mlp.down.weight, PartsWeight)
    assert "12 matrices are codes in memory, 3 are floats; 12 NF4 by 64; " in form_line(model, None)


def test_a_group_that_names_a_module_goes_before_one_for_all_linear_layers():
    """compressed-tensors matches names first, then expressions, then classes."""
    settings = json.loads(json.dumps(VARIANTS["ct mixed"].settings))
    settings["config_groups"]["group_0"]["targets"] = ["Linear"]
    dialect = DIALECTS["compressed-tensors"](Section(settings, "config.json"))
    forms = [dialect.stored(f"layers.0.{name}", 64, None).form for name in ("self_attn.k_proj", "mlp.up_proj")]
    assert forms == ["FP8 by rows", "INT4 by 32"]


@pytest.mark.parametrize(
    ("name", "method"),
    [("auto-round awq", "intel/auto-round"), ("modelopt nvfp4", "modelopt_fp4"), ("modelopt fp8", "modelopt_fp8")],
)
def test_a_method_may_be_spelled_as_its_makers_and_kernels_are(tmp_path, name, method):
    folder = write(tmp_path, replace(VARIANTS[name], settings={**VARIANTS[name].settings, "quant_method": method}))
    assert load_model_config(folder).raw["quantization_config"] == VARIANTS[name].settings


@pytest.mark.parametrize(
    ("more", "form"),
    [
        ({"backend": "auto_round:exllamav2"}, PackedGptq),
        ({"backend": "auto_round:gptq:exllamav2", "sym": False}, PackedGptq),
        ({"backend": "auto_round:awq"}, PackedAwq),
        ({"backend": "auto", "packing_format": "auto_round:auto_awq"}, PackedAwq),
        ({"backend": "auto"}, PackedGptq),
    ],
)
def test_older_files_of_auto_round_name_a_backend(more, form):
    settings = {"quant_method": "auto-round", "bits": 4, "group_size": 128, **more}
    found = DIALECTS["auto-round"](Section(settings, "config.json")).stored("layers.0.mlp.up_proj", 256, None)
    assert isinstance(found, form)


@pytest.mark.parametrize("path", [("text_config",), ("llm_config",), ("thinker_config", "text_config")])
def test_the_decoder_may_say_how_it_is_quantised(tmp_path, path):
    """The root of InternVL2-8B-AWQ's config.json has no settings of quantisation; the decoder's section has them."""
    below = {"quantization_config": VARIANTS["awq 64"].settings}
    for key in reversed(path):
        below = {key: below}
    found = with_quantisation(Section({"quantization_config": {}, **below}, "config.json"), tmp_path)
    assert found.values["quantization_config"] == VARIANTS["awq 64"].settings


def test_files_of_awq_say_how_many_columns_share_a_scale(folder_of, tmp_path):
    folder = shutil.copytree(folder_of("awq 64"), tmp_path / "said")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["group_size"] = 32
    (folder / "config.json").write_text(json.dumps(config))
    assert check_weights(load(folder, "float32"), folder_of("awq 64")) == 8


def test_dynamic_says_which_modules_have_zero_points(folder_of, tmp_path):
    """GPTQ's `sym` holds only for modules that `dynamic` does not name."""
    folder = write(tmp_path, VARIANTS["gptq asymmetric"])
    want = load(folder_of("gptq asymmetric"), "float32").layers[1].mlp
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= {"sym": True, "dynamic": {r"+:model\.layers\.1\.mlp\.down_proj": {"sym": False}}}
    (folder / "config.json").write_text(json.dumps(config))
    got = load(folder, "float32").layers[1].mlp
    assert torch.equal(got.down.weight.dense(), want.down.weight.dense())
    assert not torch.equal(got.gate_up.weight.dense(), want.gate_up.weight.dense())


RANDOM = ("gptq 32", "awq 32", "ct w4 32", "ct nvfp4", "modelopt fp8", "bnb nf4", "bnb fp4 nested", "bnb int8",
          "ct mxfp8", "ct int8 weights", "ct w4 asymmetric", "ct mixed", "modelopt mixed", "modelopt mxfp8",
          "gptq dynamic")  # fmt: skip


def forms(model):
    """Modules of each linear layer -> the names of its matrices' forms."""
    return {
        tuple(names): [stored and stored.form for stored in part.scheme.pieces]
        for _, names, part in parts_of(model.weight_table(), model)
        if isinstance(getattr(part, "scheme", None), Quantised)
    }


@pytest.mark.parametrize("name", RANDOM)
def test_random_weights_are_of_the_dialect(folder_of, name):
    model = load(folder_of(name), "float32", load_format="dummy")
    assert not model.layers[0].mlp.down.weight.dense().isnan().any()
    assert forms(model) == forms(load(folder_of(name), "float32"))
    harness = Harness(model)
    assert harness.prefill(harness.add(TOKENS)).isfinite().all()


@pytest.mark.parametrize("name", ["gemma4", "gemma4-large"])
def test_projections_that_fewer_matrices_make_take_their_codes(name, tmp_path):
    """Layers with queries only, and layers whose keys and values share a matrix."""
    source, draw, tensors = tiny.checkpoint(name), torch.Generator().manual_seed(3), {}
    for key, tensor in load_file(source / "model.safetensors").items():
        module, _, kind = key.rpartition(".")
        coded = ".self_attn." in key and module.endswith("_proj")
        made = VARIANTS["ct float channel"].write(draw, *tensor.shape) if coded else {kind: tensor}
        tensors |= {f"{module}.{kind}": each.contiguous() for kind, each in made.items()}
    folder = Path(shutil.copytree(source, tmp_path / "whole"))
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = VARIANTS["ct float channel"].settings
    for path in (folder, tmp_path):  # the oracle expects a weight in every module, so it reads attention's modules only
        (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    of_attention = {key: tensor for key, tensor in tensors.items() if ".self_attn." in key and "_proj." in key}
    save_file(of_attention, tmp_path / "model.safetensors")
    wanted = oracle.dequantised(tmp_path)
    for number, layer in enumerate(load(folder, "float32").layers):
        qkv = layer.attention.qkv
        names = [f"model.layers.{number}.self_attn.{'qkv'[place]}_proj.weight" for place in qkv.stored]
        expected = torch.cat([torch.from_numpy(wanted[each]) for each in names])
        torch.testing.assert_close(qkv.weight.dense().double(), expected, rtol=1e-6, atol=0)
