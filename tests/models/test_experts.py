"""Checkpoints with experts: required keys and tensors, and what is refused at the start."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.base.config import EngineConfig
from engine.base.errors import ConfigError
from engine.checkpoint.experts import read_experts
from engine.checkpoint.section import Section
from engine.models.registry import build_model, load_model_config
from engine.step.backend.device import backend
from engine.weights.load import load_weights, weight_bytes
from tests import tiny
from tests.bench.shapes import SHAPES
from tests.models.harness import Harness, load
from tests.models.test_decoders import prompt

LAYERS = {
    "qwen3_moe": [0, 2],
    "qwen2_moe": [1],
    "glm4_moe": [1, 2],
    "ernie4_5_moe": [1, 2],
    "exaone_moe": [1, 2],
    "lfm2_moe": [2, 3, 4],
    "llama4": [1, 3],
}


@pytest.mark.parametrize("name", sorted({*LAYERS, *tiny.SPARSE}))
def test_the_layers_with_experts(name):
    layers = load_model_config(tiny.checkpoint(name)).text.layers
    assert [number for number, layer in enumerate(layers) if layer.experts] == LAYERS.get(name, [0, 1, 2])


@pytest.mark.parametrize("name", tiny.SPARSE)
def test_logits_and_greedy_tokens_equal_transformers(name):
    """Results are equal in chunks and together with another row; their bits equal those of one step alone."""
    model = load(tiny.checkpoint(name))
    tokens, other, count = prompt(60, seed=1), prompt(23, seed=2), 8
    oracle = tiny.reference(tiny.checkpoint(name))
    with torch.inference_mode():
        want = oracle(input_ids=torch.tensor([tokens])).logits[0]
        oracle.generation_config.eos_token_id = None
        ids = torch.tensor([tokens])
        greedy = oracle.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    harness = Harness(model)
    row, beside = harness.add(tokens), harness.add(other)
    harness.step((beside, 9), (row, 17))
    mixed = harness.step((row, 43), (beside, 14))[:43]
    assert (mixed - want[17:]).abs().max() <= 2e-4
    row = harness.add(tokens)
    assert harness.generate(row, count, chunk=11) == greedy[0, len(tokens) :].tolist()
    assert torch.equal(harness.prefill(harness.add(tokens))[17:], mixed)


@pytest.fixture(scope="module")
def with_shared(tmp_path_factory):
    """Qwen3 MoE with a shared expert: (folder, the model of transformers), with Qwen2 MoE's block in Qwen3's class.

    transformers has no class for it; Qwen2 MoE's block has the shared expert and its gate.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    small = {**tiny._ODD, "head_dim": 20, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
    config = Qwen3MoeConfig(**small, norm_topk_prob=True, shared_expert_intermediate_size=44, mlp_only_layers=[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_qwen3_moe, "Qwen3MoeSparseMoeBlock", Qwen2MoeSparseMoeBlock)
        model = tiny.seeded(Qwen3MoeForCausalLM, config)
    return tiny.save(model, tmp_path_factory.mktemp("shared")), model


def test_a_shared_expert_of_qwen3_equals_its_formula(with_shared):
    """Results are equal in chunks; without the gate, or without the shared expert, they would differ."""
    folder, oracle = with_shared
    experts = load_model_config(folder).text.layers[0].experts
    assert (experts.shared_width, experts.shared_gate) == (44, True)
    tokens, count = prompt(40, seed=5), 24
    with torch.inference_mode():
        want = oracle(input_ids=torch.tensor([tokens])).logits[0]
        oracle.generation_config.eos_token_id = None
        ids = torch.tensor([tokens])
        greedy = oracle.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    harness = Harness(load(folder))
    assert (harness.prefill(harness.add(tokens)).log_softmax(-1) - want.log_softmax(-1)).abs().max() <= 2e-4
    assert harness.generate(harness.add(tokens), count, chunk=11) == greedy[0, 40:].tolist()
    for layer in (0, 2):
        harness.model.layers[layer].experts.shared_gate = None
    assert (harness.prefill(harness.add(tokens)) - want).abs().max() > 0.1


def test_a_shared_expert_that_the_configuration_does_not_name_is_left_over(with_shared, tmp_path):
    folder = shutil.copytree(with_shared[0], tmp_path / "unnamed")
    config = json.loads((folder / "config.json").read_text())
    del config["shared_expert_intermediate_size"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"8 left over: .*shared_expert"):
        load(folder)


def test_older_files_count_experts_under_another_key():
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        read = read_experts(Section({key: 9, "num_experts_per_tok": 2, "moe_intermediate_size": 4}, "config.json"))
        assert read.routing.num_experts == 9


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_experts_per_tok": 14}, "num_experts_per_tok=14: a token chooses 1 to 13 of num_experts=13 experts"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok=0 must be an integer from 1"),
        ({"num_experts": 0}, "num_experts=0 must be an integer from 1"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0 must be an integer from 1"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
    ],
)
def test_impossible_routing_is_refused(tmp_path, changes, said):
    config = json.loads((tiny.checkpoint("qwen3_moe") / "config.json").read_text())
    config["num_experts"] = config.pop("num_local_experts", config.get("num_experts"))
    config = {key: value for key, value in {**config, **changes}.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=said):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ({"n_group": 5, "topk_group": 2}, "12 experts in 5 groups of which 2 are kept"),
        ({"n_group": 4, "topk_group": 5}, "12 experts in 4 groups of which 5 are kept"),
        ({"n_group": 4, "topk_group": 1}, "1 of 4 groups hold 3 experts; num_experts_per_tok=4 needs"),
        ({"n_group": 12, "topk_group": 12, "group_rank": "best two"}, "12 experts in 12 groups"),
    ],
)
def test_impossible_groups_are_refused(groups, said):
    body = Section({"num_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 8}, "config.json")
    with pytest.raises(ConfigError, match=said):
        read_experts(body, **groups)


@pytest.fixture
def changed(tmp_path):
    """A function that loads a copy of a tiny checkpoint after `change` has changed its tensors."""

    def load(change, name="qwen3_moe", **keys):
        folder = tmp_path / "changed"
        shutil.copytree(tiny.checkpoint(name), folder, dirs_exist_ok=True)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **keys}))
        (file,) = folder.glob("*.safetensors")
        save_file(change(load_file(file)), file)
        model = build_model(load_model_config(folder), torch.float32)
        load_weights(model, str(folder))
        return model

    return load


def test_missing_and_superfluous_experts_are_reported_compactly(changed):
    def without(tensors):
        gone = [f".experts.{number}." for number in (3, 10, 11, 12)]
        kept = {name: tensor for name, tensor in tensors.items() if not any(part in name for part in gone)}
        more = next(tensor.clone() for name, tensor in tensors.items() if ".experts.0.up_proj" in name)
        return {**kept, "model.layers.0.mlp.experts.13.up_proj.weight": more}

    with pytest.raises(ConfigError) as refused:
        changed(without)
    said = str(refused.value)
    assert "24 missing: layers.0,2.mlp.experts.3,10-12.gate_proj.weight (8)" in said
    assert "1 left over: model.layers.0.mlp.experts.13.up_proj.weight" in said


def test_an_expert_of_another_shape_is_refused_by_name(changed):
    name = "model.layers.2.mlp.experts.4.down_proj.weight"
    with pytest.raises(ConfigError, match=rf"{name} has shape \[40, 72\], the configuration asks for \[72, 40\]"):
        changed(lambda tensors: {**tensors, name: tensors[name].T.contiguous()})


def test_experts_of_a_layer_in_neither_layout_are_refused_by_name(changed):
    name = "model.layers.1.mlp.experts.gate_up_proj"
    said = rf"{name} has shape \[(\d+), (\d+), (\d+)\], the configuration asks for \[\1, \3, \2\]"
    with pytest.raises(ConfigError, match=said):
        changed(lambda tensors: {**tensors, name: tensors[name].transpose(1, 2).contiguous()}, "gpt_oss")


def test_a_layer_that_predicts_further_tokens_is_not_read(changed):
    changed(lambda tensors: {**tensors, "model.layers.3.eh_proj.weight": torch.zeros(72, 144)}, "glm4_moe")
    with pytest.raises(ConfigError, match=r"1 left over: model\.layers\.4\.eh_proj\.weight"):
        changed(lambda tensors: {**tensors, "model.layers.4.eh_proj.weight": torch.zeros(72, 144)}, "glm4_moe")


def test_as_many_of_them_are_passed_over_as_the_configuration_counts(changed):
    def load(count):
        more = {f"model.layers.{3 + number}.eh_proj.weight": torch.zeros(72, 144) for number in range(3)}
        return changed(lambda tensors: {**tensors, **more}, "minimax_m2", num_mtp_modules=count)

    load(3)
    with pytest.raises(ConfigError, match=r"1 left over: model\.layers\.5\.eh_proj\.weight"):
        load(2)


@pytest.mark.parametrize("length", [1, 13])
def test_a_correction_of_the_wrong_length_is_refused(changed, length):
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    with pytest.raises(ConfigError, match=rf"{name} has shape \[{length}\], the configuration asks for \[12\]"):
        changed(lambda tensors: {**tensors, name: torch.zeros(length)}, "glm4_moe")


@pytest.mark.parametrize(("key", "value"), [("scoring_func", "softmax"), ("topk_method", "greedy")])
def test_rules_of_another_kind_are_refused_by_name(tmp_path, key, value):
    config = json.loads((tiny.checkpoint("glm4_moe") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(ConfigError, match=f"{key}='{value}' of Glm4MoeForCausalLM is not supported"):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("moe_normalize_expert_weights", 2, "moe_normalize_expert_weights=2 is not supported"),
        ("moe_top_k", 6, "moe_top_k=6: a token chooses 1 to 5 of moe_num_experts=5 experts"),
        ("ffn_act_fn", {"name": "softer"}, "hidden_act='softer' of DbrxForCausalLM is not supported"),
    ],
)
def test_sections_of_dbrx_say_what_is_wrong(tmp_path, key, value, said):
    config = json.loads((tiny.checkpoint("dbrx") / "config.json").read_text())
    config["ffn_config"][key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=said):
        load_model_config(tmp_path)


def test_the_published_dbrx_is_planned(tmp_path):
    """databricks/dbrx-instruct has 131,596,523,520 parameters."""
    published = {
        "architectures": ["DbrxForCausalLM"], "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000},
        "d_model": 6144, "max_seq_len": 32768, "model_type": "dbrx", "n_heads": 48, "n_layers": 40,
        "ffn_config": {"ffn_hidden_size": 10752, "moe_jitter_eps": 0, "moe_loss_weight": 0.05, "moe_num_experts": 16,
                       "moe_top_k": 4},
        "tie_word_embeddings": False, "vocab_size": 100352,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(published))
    config = load_model_config(tmp_path)
    assert weight_bytes(build_model(config, torch.bfloat16)) == 2 * 131_596_523_520
    assert (config.text.qkv_clip, config.text.layers[0].rope.theta) == (8, 500_000)


@pytest.mark.parametrize(("shape", "total"), [("30b-a3b", 61_064_245_248), ("gpt-oss-20b", 13_761_264_768)])
def test_planned_bytes_are_the_total_size_that_the_published_index_names(tmp_path, shape, total):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[shape]))
    assert weight_bytes(build_model(load_model_config(tmp_path), torch.bfloat16)) == total


def test_steps_are_not_filled_up_for_an_mlp_that_layers_with_experts_lack(monkeypatch):
    monkeypatch.setattr(backend, "fullness", lambda *_: 0.5)
    for name, want in (("llama", 0.5), ("mixtral", 1.0)):
        model = build_model(load_model_config(tiny.checkpoint(name)), torch.float32)
        device = SimpleNamespace(config=EngineConfig("unread"), rank=SimpleNamespace(own=model))
        assert backend.DeviceBackend.fullness(device, 128) == want


def test_random_weights_of_experts_are_drawn_by_name():
    models = [build_model(load_model_config(tiny.checkpoint("mixtral")), torch.float32) for _ in range(2)]
    for model in models:
        load_weights(model, "", "dummy")
    one, other = (model.layers[1].experts.down.weight for model in models)
    assert torch.equal(one.dense(3), other.dense(3))
    assert not torch.equal(one.dense(3), one.dense(2))
