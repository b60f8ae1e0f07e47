"""Experts with FP8 inputs, as on a device with FP8 units: products of codes with codes, equal in any batch."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import engine.run.start
import engine.run.weights
from engine.kernels.activation import Activation
from engine.kernels.gemm.pack import Placement
from engine.kernels.moe.coded_weight import CodedExperts
from engine.kernels.moe.float8_weight import Float8Experts
from engine.kernels.target import Target
from engine.models.registry import load_model_config
from engine.quant.forms import form_line
from engine.quant.online import requested
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import answer, running, text_request
from tests.models.harness import Harness
from tests.quant import oracle
from tests.quant.test_float8_inputs import TOKENS, loaded, met
from tests.quant.test_quantised_experts import rewritten
from tests.quant.written import VARIANTS

# Variant -> how inputs are quantised, as in test_float8_inputs.
MEETING = {
    "fp8 tensor": "token", "fp8 tensor static": 0.5, "fp8 blocks": 128, "fp8 blocks u8": "powers",
    "ct float channel": "token", "ct float block": 128, "modelopt fp8": 0.5,
}  # fmt: skip
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True}


@pytest.fixture(scope="module", params=[256, 320])
def sparse(request, tmp_path_factory):
    """A float checkpoint of Qwen3-MoE; an expert of 256 rows has whole blocks of 128, an expert of 320 rows has not."""
    sizes = {"hidden_size": 192, "num_hidden_layers": 2, "intermediate_size": 320}
    sizes |= {"mlp_only_layers": [0], "moe_intermediate_size": request.param}
    made = tiny.causal("Qwen3MoeForCausalLM", "Qwen3MoeConfig", head_dim=32, **sizes, **EXPERTS)()
    return tiny.save(made, tmp_path_factory.mktemp("sparse") / "floats")


def coded(source, folder, name):
    """The same checkpoint with its experts quantised as in a variant."""
    draw, tensors = torch.Generator().manual_seed(2), {}
    for key, tensor in load_file(source / "model.safetensors").items():
        module, _, kind = key.rpartition(".")
        made = VARIANTS[name].write(draw, *tensor.shape) if ".experts." in key else {kind: tensor}
        tensors |= {f"{module}.{kind}": each for kind, each in made.items()}
    return rewritten(source, folder, tensors, quantization_config=VARIANTS[name].settings)


def wanted(folder, x, chosen, how):
    """Outputs of the chosen experts for rows x, float64 [T, k, hidden], from numpy and the oracle's weights."""
    whole = oracle.dequantised(folder)
    of = {key.split(".experts.")[1]: value for key, value in whole.items() if ".experts." in key}
    inputs, found = met(x, how), np.zeros((*chosen.shape, x.shape[1]))
    for token, experts in enumerate(chosen.tolist()):
        for place, expert in enumerate(experts):
            gate, up = (of[f"{expert}.{name}_proj.weight"] @ inputs[token] for name in ("gate", "up"))
            inner = met(torch.from_numpy(gate * (0.5 + 0.5 * np.tanh(gate / 2)) * up)[None], how)[0]
            found[token, place] = of[f"{expert}.down_proj.weight"] @ inner
    return torch.from_numpy(found)


@pytest.mark.parametrize("name", MEETING)
def test_codes_meet_inputs_as_the_checkpoint_quantises_them(sparse, name, tmp_path):
    folder = coded(sparse, tmp_path / "codes", name)
    layer = loaded(folder).layers[1].experts
    gate_up, down = layer.gate_up.weight, layer.down.weight
    assert isinstance(gate_up, Float8Experts)
    draw = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(7, 192, generator=draw)
    x[2], x[3, 128:], x[4] = 0, 0, 300 * x[4]
    chosen = torch.rand(7, 5, generator=draw).argsort(1)[:, :2].to(torch.int32)
    pairs = gate_up.pairs(chosen)
    got = gate_up.of_mlp(down, x, None, pairs, Activation.SILU, None)
    want = wanted(folder, x, chosen, MEETING[name])
    assert float((got - want).norm() / want.norm()) < 3e-3  # rounding may move an inner code by one
    apart = down.of_pairs(gate_up.of_tokens(x, pairs, Activation.SILU), pairs)
    torch.testing.assert_close(got, apart)
    alone = gate_up.of_mlp(down, x[5:6], None, gate_up.pairs(chosen[5:6]), Activation.SILU, None)
    torch.testing.assert_close(alone, got[5:6])
    for expert in range(5):
        torch.testing.assert_close(
            down.dense(expert).double(),
            torch.from_numpy(oracle.dequantised(folder)[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"]),
        )


def test_codes_and_their_scales_take_no_more_than_the_files_but_for_a_few(sparse, tmp_path):
    """A whole block has one scale in memory, not one for each row."""
    folder = coded(sparse, tmp_path / "codes", "fp8 blocks")
    width = json.loads((folder / "config.json").read_text())["moe_intermediate_size"]
    weight = loaded(folder).layers[1].experts.gate_up.weight
    floats = 4 * 5 * 2 * (width // 128 if width % 128 == 0 else width) * (4 if width % 128 == 0 else 2)
    assert weight.num_bytes == 5 * 2 * width * 192 + floats


@pytest.mark.parametrize("name", ["fp8 blocks", "ct float channel", "online"])
def test_logits_do_not_depend_on_chunks(sparse, name, tmp_path):
    config = requested(load_model_config(sparse), "fp8") if name == "online" else None
    folder = sparse if name == "online" else coded(sparse, tmp_path / "codes", name)
    model = loaded(folder, config=config)
    assert isinstance(model.layers[1].experts.gate_up.weight, Float8Experts)
    harness = Harness(model)
    whole, chunked = harness.prefill(harness.add(TOKENS)), harness.prefill(harness.add(TOKENS), chunk=3)
    assert float((whole - chunked).norm() / whole.norm()) < 3e-3
    assert "become FP8 too" in form_line(model, Target("cuda", "sm_100", 1, 32, 0))


async def test_codes_meet_inputs_in_an_accelerators_steps(sparse, tmp_path, monkeypatch):
    def placed(dtype, device, *rest):
        return Placement(dtype, "cpu:0", *rest, float8_units=True)

    monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    monkeypatch.setattr(engine.run.weights, "Placement", placed)
    folder = coded(sparse, tmp_path / "codes", "fp8 blocks")
    async with running(folder, dtype="float32") as served:
        found = await answer(served, text_request(np.array(TOKENS), 8, ignore_eos=True))
    harness = Harness(loaded(folder))
    assert found == [harness.generate(harness.add(TOKENS), 8)]


@pytest.mark.parametrize("name", ["ct mxfp8", "fp8 blocks"])
def test_other_inputs_and_devices_without_units_keep_floats(sparse, name, tmp_path):
    folder = coded(sparse, tmp_path / "codes", name)
    model = loaded(folder, float8_units=name == "ct mxfp8")
    assert isinstance(model.layers[1].experts.gate_up.weight, CodedExperts)
