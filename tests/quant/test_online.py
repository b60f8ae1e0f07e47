"""--quantization: floats become FP8 while they are read; other names must be those of the checkpoint's method."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch

from engine.base.config import EngineConfig
from engine.base.errors import ConfigError
from engine.checkpoint.section import Section
from engine.kernels.gemm.codes import Kind
from engine.kernels.gemm.group_panels import GroupPanels
from engine.kernels.gemm.pack import Placement
from engine.models.registry import build_model, load_model_config
from engine.quant import forms, online
from engine.quant.assign import assign
from engine.quant.checks import Checks
from engine.quant.fp8 import Fp8
from engine.quant.online import requested
from engine.run.estimate import estimate
from engine.weights.files import open_checkpoint
from engine.weights.load import load_weights, weight_bytes
from server.flags.config import Config, ModelFlags
from server.start.check import lines
from tests import tiny
from tests.engine_kit import answer, running
from tests.invariance.test_text import PROMPTS, request
from tests.models.harness import load
from tests.quant.written import VARIANTS, Variant, packed_settings, write

EXAMPLE = Path(__file__).parents[2] / "examples/quantized.py"


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_rows_become_codes_with_a_scale_each(load_format):
    folder = tiny.checkpoint("qwen3")
    config = requested(load_model_config(folder), "fp8")
    model = build_model(config, torch.float32, shards=open_checkpoint(folder) if load_format == "auto" else None)
    load_weights(model, str(folder), load_format)
    floats = load(folder, load_format=load_format)
    for layer, plain in zip(model.layers, floats.layers):
        for found, wanted in ((layer.attention.qkv, plain.attention.qkv), (layer.mlp.gate_up, plain.mlp.gate_up)):
            assert isinstance(found.weight, GroupPanels)
            assert found.weight.kind is Kind.E4M3
            got, want = found.weight.dense(), wanted.weight.dense().float()
            most = want.abs().amax(1, keepdim=True)
            # FP8 has three bits of mantissa, and steps of 2^-9 below the smallest exponent.
            assert bool(((got - want).abs() <= torch.maximum(want.abs() / 16, most / 448 * 2.0**-10) * 1.001).all())
            torch.testing.assert_close(got.abs().amax(1, keepdim=True), most)
    assert torch.equal(model.head.weight.dense(), floats.head.weight.dense())
    matrices = sum(layer.attention.qkv.weight.dense().numel() for layer in floats.layers)
    assert weight_bytes(model) < weight_bytes(floats) - 3 * matrices


async def test_a_model_is_served_and_rows_do_not_depend_on_company():
    async with running(tiny.checkpoint("llama"), dtype="float32", quantization="fp8") as served:
        alone = [await answer(served, request(prompt)) for prompt in PROMPTS[:4]]
    async with running(tiny.checkpoint("llama"), dtype="float32", quantization="fp8", max_prefill_chunk=5) as served:
        assert [await answer(served, request(prompt)) for prompt in PROMPTS[:4]] == alone


def test_layers_by_another_name_become_codes_too():
    """DBRX calls its layers blocks."""
    config = load_model_config(tiny.checkpoint("dbrx"))
    model, floats = (build_model(each, torch.float32) for each in (requested(config, "fp8"), config))
    for each in (model, floats):
        load_weights(each, config.folder)
    got, want = (each.layers[1].attention.qkv.weight for each in (model, floats))
    assert got.num_bytes < 0.4 * want.num_bytes
    assert (got.dense() - want.dense()).abs().max() <= want.dense().abs().max() / 28


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])  # cpu:0 packs as for an accelerator
@pytest.mark.parametrize("name", ["dbrx", "gemma4-moe", "gpt_oss", "granite_moe", "llama4", "qwen3_vl_moe"])
def test_experts_that_lie_in_one_tensor_become_codes_too(name, device):
    config = load_model_config(tiny.checkpoint(name))
    model, floats = (build_model(each, torch.float32) for each in (requested(config, "fp8"), config))
    for each in (model, floats):
        load_weights(each, config.folder, "auto", Placement(torch.float32, device))
    sparse = [(layer.experts, other.experts) for layer, other in zip(model.layers, floats.layers) if layer.experts]
    assert sparse
    for layer, other in sparse:
        for got, want in ((layer.gate_up.weight, other.gate_up.weight), (layer.down.weight, other.down.weight)):
            assert got.num_bytes < 0.5 * want.num_bytes
            assert (got.dense(1) - want.dense(1)).abs().max() <= want.dense(1).abs().max() / 28
        assert torch.equal(layer.router.weight.dense(), other.router.weight.dense())
    line = forms.form_line(model, None)
    coded = sum(3 * layer.gate_up.num_experts for layer, _ in sparse)
    assert int(line.split(": ")[1].split()[0]) >= coded
    assert weight_bytes(model) < 0.75 * weight_bytes(floats)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("gptq 32", "gptq"),
        ("gptq 32", "GPTQ"),
        ("gptq 32", "gptq_marlin"),
        ("gptq 32", "moe_wna16"),
        ("awq 32", "moe_wna16"),
        ("awq 32", "awq_marlin"),
        ("modelopt nvfp4", "modelopt_fp4"),
        ("modelopt nvfp4", "petit_nvfp4"),
        ("ct w4 32", "compressed-tensors"),
        ("ct int8", "w8a8_int8"),
        ("fp8 tensor", "fp8"),
        ("auto-round awq", "auto-round"),
        ("gptq 32", "auto_gptq"),
        ("awq 32", "auto_awq"),
        ("modelopt mxfp8", "modelopt_mxfp8"),
        ("ct float channel", "w8a8_fp8"),
    ],
)
def test_the_method_of_the_checkpoint_may_be_named(tmp_path, name, word):
    config = load_model_config(write(tmp_path, VARIANTS[name]))
    assert requested(config, word) is config


@pytest.mark.parametrize("word", ["fp8", "fp8_per_channel", "ptpc_fp8", "w8a8_fp8"])
def test_a_scale_per_row_has_other_names(word):
    config = requested(load_model_config(tiny.checkpoint("llama")), word)
    assert config.raw["quantization_config"] == {"quant_method": "fp8 online"}


def test_other_words_are_refused(tmp_path):
    config = load_model_config(write(tmp_path, VARIANTS["gptq 32"]))
    with pytest.raises(ConfigError, match="--quantization fp8: the checkpoint is quantised by gptq; leave"):
        requested(config, "fp8")
    with pytest.raises(
        ConfigError, match=r"--quantization awq_marlin: .* is not quantised, and fp8 .* quantised by awq"
    ):
        requested(load_model_config(tiny.checkpoint("llama")), "awq_marlin")
    with pytest.raises(ConfigError, match=r"--quantization odd: .* leave the flag out, or .* is quantised already"):
        requested(load_model_config(tiny.checkpoint("llama")), "odd")
    with pytest.raises(ConfigError, match="GPT2LMHeadModel has no layers that are quantised"):
        estimate(EngineConfig(str(tiny.checkpoint("gpt2")), quantization="fp8", device="cpu"), None)


def test_fewer_bytes_are_planned_on_a_cpu_too(tmp_path):
    """The weights that stay in bfloat16 take no more bytes in memory than in the file."""
    plain = Variant({}, lambda draw, rows, columns: {"weight": torch.zeros(rows, columns, dtype=torch.bfloat16)})
    folder = write(tmp_path, plain, dtype=torch.bfloat16)
    floats, codes = (
        estimate(EngineConfig(str(folder), quantization=word, device="cpu"), open_checkpoint(folder)).weight_bytes
        for word in ("", "fp8")
    )
    matrices = 2 * (192 * 192 * 2 + 2 * 64 * 192 + 3 * 320 * 192)
    assert floats - codes == matrices  # FP8 saves one byte of each weight


def test_check_names_the_method_and_the_matrices(tmp_path):
    folder = write(tmp_path, VARIANTS["ct w4 mixed"])
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    (folder / "config.json").write_text(json.dumps(config))
    said = list(lines(Config(model=ModelFlags(model=str(folder), device="cpu"))))
    assert said[2].startswith(
        "quantised weights (compressed-tensors): 10 matrices are codes in memory, 5 are floats; 10 INT4 by 32; codes "
        "and scales take 0.00 GiB, in bfloat16 these matrices take 0.00 GiB; products widen codes"
    )
    assert any(line.startswith("KV cache: ") and line.endswith("a scale per token and head") for line in said)


@pytest.mark.parametrize("name", ["gptq dynamic", "ct int8", "modelopt mixed", "ct mxfp8"])
def test_the_forms_of_matrices_are_reported_with_their_counts(tmp_path, name):
    """The counts come from the headers of files, or from the configuration alone if weights are random."""
    wanted = {
        "gptq dynamic": "; 10 INT4 by 64, 2 INT8 by 32; ",
        "ct int8": "these matrices take 0.00 GiB; inputs of 14 become INT8",
        "modelopt mixed": "; 8 FP8 by matrices, 6 NVFP4; ",
        "ct mxfp8": "; 14 FP8 by 32 (MX); ",
    }
    folder = write(tmp_path, VARIANTS[name])
    for load_format in ("auto", "dummy"):
        said = list(lines(Config(model=ModelFlags(model=str(folder), device="cpu", load_format=load_format))))
        assert wanted[name] in said[2]


def test_codes_take_what_a_matrix_of_them_takes(monkeypatch):
    """4-bit codes with a 4-byte scale for 16 columns, compared with two bytes per weight."""
    monkeypatch.setattr(forms, "gib", str)
    model = build_model(load_model_config(tiny.checkpoint("llama")), torch.float32)
    model.config.raw["quantization_config"] = packed_settings(4, 16)
    assign(model, model.weight_table(), model.config, None)
    layers = 3 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 112 * 64)
    assert (
        f"codes and scales take {layers // 2 + 4 * layers // 16}, in bfloat16 these matrices take {2 * layers}; "
        in (forms.form_line(model, None) or "")
    )


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
def test_random_fp8_weights_leave_out_what_the_configuration_names(key):
    dialect = Fp8(Section({"quant_method": "fp8", key: ["model.layers.0.mlp.down_proj"]}, "quantization_config"))
    assert dialect.stored("layers.0.mlp.down_proj", 64, None) is None
    assert dialect.stored("layers.1.mlp.down_proj", 64, None) is not None


def test_the_example_prints_what_is_saved(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["quantized.py", str(tiny.checkpoint("qwen3")), "--device", "cpu"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    floats, codes = capsys.readouterr().out.splitlines()
    assert floats.startswith("floats: ")
    assert codes.startswith("fp8: ")
    assert float(codes.split()[1]) < float(floats.split()[1])


def test_the_example_takes_a_quantised_model_as_it_is_and_says_what_is_no_model(tmp_path, monkeypatch, capsys):
    folder = write(tmp_path / "coded", VARIANTS["gptq 32"])
    monkeypatch.setattr("sys.argv", ["quantized.py", str(folder), "--device", "cpu"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("codes: ")
    monkeypatch.setattr("sys.argv", ["quantized.py", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match=r"config\.json is missing"):
        runpy.run_path(str(EXAMPLE), run_name="__main__")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_some_rows_at_a_time_become_the_codes_of_all_at_once(dtype, monkeypatch):
    weight = torch.randn(37, 48, dtype=dtype)
    weight[5], weight[7, 3], weight[8, 3] = 0.0, float("nan"), float("inf")
    before = weight.clone()
    whole = online.Floats().read({"weight": weight}, Checks("cpu"))
    monkeypatch.setattr(online, "AT_ONCE", 48 * 4)
    some = online.Floats().read({"weight": weight}, Checks("cpu"))
    assert torch.equal(some.values, whole.values)
    assert torch.equal(some.scale.nan_to_num(7.0), whole.scale.nan_to_num(7.0))
    assert torch.equal(weight.nan_to_num(7.0), before.nan_to_num(7.0))
