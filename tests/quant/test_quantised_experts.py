"""Quantised experts give a float model's logits: in dialects with a module for each matrix, and in MXFP4."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import engine.run.start
from engine.base.errors import ConfigError
from engine.kernels.gemm.pack import Placement
from engine.layers.moe import SparseMLP
from engine.models.registry import build_model, load_model_config
from engine.quant.forms import form_line
from engine.quant.online import requested
from engine.weights.files import open_checkpoint
from engine.weights.load import load_weights
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import answer, running, text_request
from tests.models.harness import Harness, load
from tests.quant import oracle
from tests.quant.experts import gpt_oss_folders, in_codes, in_one, rewritten, sparse_folder
from tests.quant.written import VARIANTS

TOKENS = [5, 9, 200, 17, 33, 250, 61, 4, 90, 91, 92]
DIALECTS = (
    "fp8 blocks",
    "fp8 tensor",
    "ct w4 32",
    "ct int8 weights",
    "ct nvfp4",
    "gptq 32",
    "awq 64",
    "bnb nf4 nested",
)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    return sparse_folder(tmp_path_factory.mktemp("sparse"))


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    return gpt_oss_folders(tmp_path_factory.mktemp("gpt-oss"))


def logits(folder, chunk=0):
    harness = Harness(load(folder, "float32"))
    return harness.prefill(harness.add(TOKENS), chunk)


def check_logits(coded, floats):
    got, want = logits(coded), logits(floats)
    assert float((got - want).norm() / want.norm()) < 2e-4
    assert torch.equal(logits(coded, chunk=3), got)


@pytest.mark.parametrize("name", DIALECTS)
def test_experts_of_a_dialect_have_the_logits_of_a_float_model(sparse, name, tmp_path):
    coded = in_codes(sparse, tmp_path / "codes", name)
    wide = {key: torch.from_numpy(value).float() for key, value in oracle.dequantised(coded).items()}
    check_logits(coded, rewritten(sparse, tmp_path / "floats", wide))


@pytest.mark.parametrize("name", ["ct int8", "gptq act"])
def test_an_accelerator_reads_experts_for_integers_and_refuses_columns_in_another_order(sparse, name, tmp_path):
    """The accelerator keeps inputs in floats where a CPU converts them to integers."""
    draw, tensors = torch.Generator().manual_seed(2), {}
    for key, tensor in load_file(sparse / "model.safetensors").items():
        module, _, kind = key.rpartition(".")
        coded = ".experts." in key
        made = VARIANTS[name].write(draw, *tensor.shape) if coded else {kind: tensor}
        tensors |= {f"{module}.{kind}": each for kind, each in made.items()}
    folder = rewritten(sparse, tmp_path / "codes", tensors, quantization_config=VARIANTS[name].settings)
    model = build_model(load_model_config(folder), torch.float32, shards=open_checkpoint(folder))
    placement = Placement(torch.float32, "cpu:0")
    if name == "gptq act":
        refused = r"columns in another order \(desc_act\); .*: quantise the checkpoint again"
        with pytest.raises(ConfigError, match=refused):
            load_weights(model, str(folder), "auto", placement)
        return
    load_weights(model, str(folder), "auto", placement)
    got, want = (each.layers[1].experts.down.weight.dense(3) for each in (model, load(folder, "float32")))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("ct w4 32", None, r"0,2-4.up_proj \(4\) as weight_packed \[320, 24\], .*1.up_proj as weight \[320, 192\]; "),
        ("ct w4 32", "ct int8 weights", r"1.up_proj as weight \[320, 192\], weight_scale \[320, 1\]; one form for all"),
        ("gptq 32", "gptq channel", r"0-4.gate_proj \(5\), .* scales \[6, 320\]; .*1.up_proj .* scales \[1, 320\]; "),
        ("fp8 tensor static", "fp8 tensor weight_scale", r"1.up_proj as input_scale \[\], weight \[320, 192\]"),
    ],
)
def test_experts_in_unlike_forms_are_refused(sparse, name, change, said, tmp_path):
    """One matrix of one expert has another dialect's format, or is not quantised."""
    draw, tensors = torch.Generator().manual_seed(2), {}
    for key, tensor in load_file(sparse / "model.safetensors").items():
        module, _, kind = key.rpartition(".")
        variant = VARIANTS.get(change) if module.endswith("experts.1.up_proj") else VARIANTS[name]
        coded = variant is not None and module.endswith("_proj") and kind == "weight"
        made = variant.write(draw, *tensor.shape) if coded else {kind: tensor}
        tensors |= {f"{module}.{kind}": each for kind, each in made.items()}
    folder = rewritten(sparse, tmp_path / "unlike", tensors, quantization_config=VARIANTS[name].settings)
    with pytest.raises(ConfigError, match=f"experts of one layer are stored in unlike forms: .*{said}") as error:
        load(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "gone", "said"),
    [
        ("fp8 blocks", "weight_scale_inv", r"experts.2-4.gate_proj \(3\), .*2-4.down_proj \(3\): FP8 codes without a"),
        ("ct w4 32", "weight_scale", r"experts.2-4.gate_proj \(3\), .*: weight_packed without weight_scale; "),
        ("fp8 blocks", "", r"; 9 missing: layers.1.mlp.experts.2-4.gate_proj.weight \(3\), "),
        ("gptq 32", "", r"; 9 missing: layers.1.mlp.experts.2-4.gate_proj.weight \(3\), "),
    ],
)
def test_experts_that_files_lack_in_whole_or_in_part_are_reported_compactly(sparse, name, gone, said, tmp_path):
    draw, tensors = torch.Generator().manual_seed(2), {}
    for key, tensor in load_file(sparse / "model.safetensors").items():
        module, _, kind = key.rpartition(".")
        coded = module.endswith("_proj") and kind == "weight"
        made = VARIANTS[name].write(draw, *tensor.shape) if coded else {kind: tensor}
        lacks = any(f".experts.{expert}." in key for expert in (2, 3, 4))
        tensors |= {f"{module}.{kind}": each for kind, each in made.items() if not lacks or (gone and kind != gone)}
    folder = rewritten(sparse, tmp_path / "part", tensors, quantization_config=VARIANTS[name].settings)
    with pytest.raises(ConfigError, match=said) as error:
        load(folder)
    assert "\n" not in str(error.value)


def test_experts_become_fp8_while_they_are_read(sparse):
    config = load_model_config(sparse)
    models = [build_model(each, torch.float32) for each in (config, requested(config, "fp8"))]
    for model in models:
        load_weights(model, str(sparse))
    floats, coded = (model.layers[1].experts for model in models)
    for whole, codes in ((floats.gate_up, coded.gate_up), (floats.down, coded.down)):
        assert codes.weight.num_bytes < 0.3 * whole.weight.num_bytes
        want = whole.weight.dense(3)
        assert (codes.weight.dense(3) - want).abs().max() <= want.abs().max() / 28
    assert torch.equal(floats.router.weight.dense(), coded.router.weight.dense())


# Name of a tensor with all experts of a layer in a release -> names under which quantisers store each expert.
IN_ONE = {"block_sparse_moe.input_linear.weight": ("block_sparse_moe.experts", ("gate_proj", "up_proj")),
          "block_sparse_moe.output_linear.weight": ("block_sparse_moe.experts", ("down_proj",)),
          "experts.gate_up_proj": ("experts", ("gate_proj", "up_proj")),
          "experts.down_proj": ("experts", ("down_proj",))}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "below"),
    [("llama4", ""), ("qwen3_vl_moe", ""), ("gemma4-moe", ""), ("gemma4-moe", "moe."), ("granite_moe", "")],
)
def test_quantisers_take_a_layers_experts_apart(name, below, tmp_path):
    """Releases of these families store the experts in one tensor, which is transposed in some families."""
    source, draw, tensors = tiny.checkpoint(name), torch.Generator().manual_seed(2), {}
    stacked = {}  # name of a tensor of all experts -> the module, its pieces, and the number of experts
    for key, tensor in load_file(source / "model.safetensors").items():
        ending = next((ending for ending in IN_ONE if key.endswith(ending)), None)
        if ending is None:
            tensors[key] = tensor
            continue
        upright = tensor if name in ("gemma4-moe", "granite_moe") else tensor.transpose(1, 2)
        module = key.removesuffix(ending) + below + IN_ONE[ending][0]
        pieces = IN_ONE[ending][1]
        stacked[key] = module, pieces, len(tensor)
        for expert in range(len(tensor)):
            for piece in pieces:
                made = VARIANTS["fp8 tensor"].write(draw, upright.shape[1] // len(pieces), upright.shape[2])
                tensors |= {f"{module}.{expert}.{piece}.{kind}": each for kind, each in made.items()}
    coded = rewritten(source, tmp_path / "codes", tensors, quantization_config=VARIANTS["fp8 tensor"].settings)
    wide = oracle.dequantised(coded)
    floats = load_file(source / "model.safetensors")
    for key, (module, pieces, count) in stacked.items():
        each = [
            np.concatenate([wide[f"{module}.{expert}.{piece}.weight"] for piece in pieces]) for expert in range(count)
        ]
        whole = torch.from_numpy(np.stack(each)).float()
        floats[key] = whole if whole.shape == floats[key].shape else whole.transpose(1, 2)
    got, want = load(coded, "float32"), load(rewritten(source, tmp_path / "floats", floats), "float32")
    sparse = [(layer.experts, other.experts) for layer, other in zip(got.layers, want.layers) if layer.experts]
    assert len(sparse) == len(stacked) // 2 > 0
    for layer, other in sparse:
        torch.testing.assert_close(layer.gate_up.weight.dense(3), other.gate_up.weight.dense(3), rtol=1e-6, atol=0)
        torch.testing.assert_close(layer.down.weight.dense(3), other.down.weight.dense(3), rtol=1e-6, atol=0)
    random = load(coded, "float32", load_format="dummy")
    assert random.config.text.layers[-1].experts == got.config.text.layers[-1].experts


def test_mxfp4_experts_have_the_logits_of_a_float_model(gpt_oss):
    check_logits(*gpt_oss)
    with torch.inference_mode():
        want = tiny.reference(gpt_oss[1])(input_ids=torch.tensor([TOKENS])).logits[0]
    assert float((logits(gpt_oss[0]) - want).norm() / want.norm()) < 2e-4


def test_attention_alone_may_be_quantised_with_experts_in_floats(gpt_oss, tmp_path):
    """Only mxfp4 implies that the experts are quantised."""
    draw, tensors = torch.Generator().manual_seed(2), {}
    for key, tensor in load_file(gpt_oss[1] / "model.safetensors").items():
        module, _, kind = key.rpartition(".")
        coded = ".self_attn." in key and key.endswith("_proj.weight")
        made = VARIANTS["ct float channel"].write(draw, *tensor.shape) if coded else {kind: tensor}
        tensors |= {f"{module}.{kind}": each for kind, each in made.items()}
    settings = VARIANTS["ct float channel"].settings
    model = load(rewritten(gpt_oss[1], tmp_path / "codes", tensors, quantization_config=settings), "float32")
    want = load(gpt_oss[1], "float32").layers[1].experts.down.weight.dense(3)
    assert torch.equal(model.layers[1].experts.down.weight.dense(3), want)


async def test_mxfp4_experts_run_in_an_accelerators_steps(gpt_oss, monkeypatch):
    monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    found = []
    for folder in gpt_oss:
        async with running(folder, dtype="float32") as served:
            found.append(await answer(served, text_request(np.array(TOKENS), 8, ignore_eos=True)))
    assert found[0] == found[1]


def test_columns_in_no_whole_blocks_are_refused(gpt_oss, tmp_path):
    config = json.loads((gpt_oss[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 40}))
    text = load_model_config(tmp_path).text
    with pytest.raises(ConfigError, match="group_size=32 does not divide the 40 columns"):
        SparseMLP(text, text.layers[0].experts).down.expects()


def test_a_broken_scale_is_refused(gpt_oss):
    layer = load(gpt_oss[0], "float32").layers[0].experts.down
    drawn = {
        kind: [torch.zeros(piece.shape, dtype=piece.dtypes[0]) for piece in pieces]
        for kind, pieces in layer.expects().items()
    }
    drawn["down_proj_scales"][0][1, 2, 0] = 255
    with pytest.raises(ConfigError, match="1 of 192 values of scales are negative, NaN or infinite"):
        layer.fill(drawn, Placement(torch.float32, "cpu"))


@pytest.mark.parametrize("name", ["fp8 blocks", "ct int8 weights", "gptq 32", "bnb nf4 nested"])
def test_a_router_of_codes_is_read_as_the_floats_that_they_stand_for(sparse, name, tmp_path):
    """bitsandbytes and others quantise the router as any linear layer; with random weights it stays in floats."""
    draw, tensors = torch.Generator().manual_seed(2), dict(load_file(sparse / "model.safetensors"))
    rows, columns = tensors.pop("model.layers.1.mlp.gate.weight").shape
    made = VARIANTS[name].write(draw, 8, columns)
    tensors |= {f"model.layers.1.mlp.gate.{kind}": each for kind, each in made.items()}
    more = {"num_experts": 8, "quantization_config": VARIANTS[name].settings}
    for expert in range(rows, 8):
        for piece in ("gate_proj", "up_proj", "down_proj"):
            module = "model.layers.1.mlp.experts."
            tensors[f"{module}{expert}.{piece}.weight"] = tensors[f"{module}0.{piece}.weight"].clone()
    folder = rewritten(sparse, tmp_path / "codes", tensors, **more)
    model = load(folder, "float32")
    router = model.layers[1].experts.router
    want = torch.from_numpy(oracle.dequantised(folder)["model.layers.1.mlp.gate.weight"])
    torch.testing.assert_close(router.weight.dense().double(), want, rtol=1e-6, atol=0)
    assert form_line(model, None).startswith("quantised weights")
    drawn = build_model(load_model_config(folder), torch.float32)
    assert list(drawn.layers[1].experts.router.expects()) == ["weight"]


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("llama4", "modelopt nvfp4"),
        ("llama4", "modelopt fp8"),
        ("gpt_oss", "modelopt nvfp4"),
        ("gpt_oss", "modelopt fp8"),
        ("gemma4", "ct w4 32"),
        ("llama4", "fp8 blocks"),
        ("qwen3_vl_moe", "fp8 tensor"),
    ],
)
def test_codes_of_all_experts_may_lie_as_the_floats_do(name, form, tmp_path, request):
    """One tensor has all experts in ModelOpt's Llama 4 and gpt-oss (shared scales), in Gemma 4 and Qwen."""
    source = request.getfixturevalue("gpt_oss")[1] if name == "gpt_oss" else None
    coded, floats = in_one(name, form, tmp_path, source)
    got, want = load(coded, "float32"), load(floats, "float32")
    pairs = [(layer.experts, other.experts) for layer, other in zip(got.layers, want.layers) if layer.experts]
    assert len(pairs) == 2
    for layer, other in pairs:
        for ours, theirs in ((layer.gate_up, other.gate_up), (layer.down, other.down)):
            assert ours.weight.num_bytes < theirs.weight.num_bytes
            torch.testing.assert_close(ours.weight.dense(1), theirs.weight.dense(1), rtol=1e-6, atol=0)
    check_logits(coded, floats)
    named = {"modelopt nvfp4": "NVFP4", "ct w4 32": "INT4 by 32", "fp8 blocks": "FP8 by 128 x 128"}
    said = f"{sum(3 * layer.gate_up.num_experts for layer, _ in pairs)} {named.get(form, 'FP8 by matrices')}"
    assert said in form_line(got, None)
