"""Hybrid families without states: logits and tokens equal transformers, spellings of files, refusals."""

import asyncio
import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.base.config import EngineConfig
from engine.base.errors import ConfigError
from engine.models.registry import load_model_config
from engine.run.estimate import estimate
from engine.weights.files import open_checkpoint
from tests import tiny, tiny_states
from tests.invariance.devices import Answer, Device
from tests.models.harness import Harness
from tests.models.seeing import load, oracle, prepare
from tests.models.test_decoders import prompt
from tests.models.test_families import check_busy
from tests.models.test_qwen_vl import oracle_inputs

TOLERANCE = 1e-4


@torch.inference_mode()
def greedy(name, tokens, count):
    model, ids = oracle(name), torch.tensor([tokens])
    model.generation_config.eos_token_id = None
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return made[0, len(tokens) :].tolist()


@pytest.mark.parametrize("name", tiny_states.ATTENTION)
def test_logits_of_mixed_rows_in_chunks_equal_transformers(name):
    harness = Harness(load(tiny.checkpoint(name)))
    first, second = (harness.add(prompt(length, seed=2)) for length in (40, 23))
    with torch.inference_mode():
        want = [oracle(name)(input_ids=torch.tensor([row.tokens])).logits[0] for row in (first, second)]
    got = [harness.step((first, 33)), harness.step((first, 7), (second, 10)), harness.step((second, 13))]
    wanted = [want[0][:33], torch.cat([want[0][33:], want[1][:10]]), want[1][10:]]
    for ours, theirs in zip(got, wanted, strict=True):
        assert (ours - theirs).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", ["qwen3_5_moe_text", "nemotron_h-latent"])
async def test_tokens_of_a_busy_engine_equal_transformers(name):
    prompts = [prompt(length, seed=9) for length in (60, 23, 40)]
    want = [Answer(await asyncio.to_thread(greedy, name, tokens, 16)) for tokens in prompts]
    await check_busy(tiny.checkpoint(name), Device("cpu"), want)


@pytest.mark.parametrize("media", ["large picture", "picture, film, picture"])
@pytest.mark.parametrize("name", tiny_states.SEEING)
@torch.inference_mode()
def test_pictures_and_films_equal_transformers(name, media):
    harness = Harness(load(tiny.checkpoint(name)))
    oracle(name).model.rope_deltas = None
    want = oracle(name)(**oracle_inputs(name, media)).logits[0]
    assert (harness.prefill(prepare(name, media, harness), 7) - want).abs().max() <= 2 * TOLERANCE  # many tokens


def changed(folder, tmp_path, config=None, tensors=None):
    """Copies a checkpoint; `config` and `tensors` change its configuration and its tensors."""
    made = tmp_path / "changed"
    shutil.copytree(folder, made)
    if config is not None:
        said = json.loads((made / "config.json").read_text())
        config(said)
        (made / "config.json").write_text(json.dumps(said))
    if tensors is not None:
        save_file(tensors(load_file(made / "model.safetensors")), made / "model.safetensors")
    return made


def in_one(tensors):
    """Joins a layer's experts in one tensor, gate rows before up rows, as in bfloat16 releases."""
    apart = {}
    for name in [name for name in tensors if ".experts." in name and ".shared" not in name]:
        stem, _, rest = name.partition(".experts.")
        number, matrix, _ = rest.split(".")
        apart.setdefault(stem, {})[int(number), matrix] = tensors.pop(name)
    for stem, found in apart.items():
        count = 1 + max(number for number, _ in found)
        first = [kind for kind in ("gate_proj", "up_proj") if (0, kind) in found]
        joined = [torch.cat([found[number, kind] for kind in first]) for number in range(count)]
        tensors[f"{stem}.experts.{'gate_' if len(first) > 1 else ''}up_proj"] = torch.stack(joined)
        tensors[f"{stem}.experts.down_proj"] = torch.stack([found[number, "down_proj"] for number in range(count)])
    return tensors


@pytest.mark.parametrize("name", ["qwen3_5_moe_text", "qwen3_5_moe", "nemotron_h-latent", "jamba"])
def test_experts_in_one_tensor_are_those_of_a_file_that_has_them_one_by_one(tmp_path, name):
    folder, tokens = tiny.checkpoint(name), prompt(20)
    joined = changed(folder, tmp_path, tensors=in_one)
    ours, theirs = (Harness(load(each)) for each in (joined, folder))
    assert torch.equal(ours.prefill(ours.add(tokens)), theirs.prefill(theirs.add(tokens)))


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_5_moe", "nemotron_h"])
def test_layers_that_predict_further_tokens_are_counted_and_not_read(tmp_path, name):
    key = "num_nextn_predict_layers" if name == "nemotron_h" else "mtp_num_hidden_layers"

    def more(tensors):
        return {**tensors, "mtp.fc.weight": torch.zeros(2, 4), "mtp.layers.0.mlp.up_proj.weight": torch.zeros(3)}

    folder = changed(tiny.checkpoint(name), tmp_path, lambda said: said.get("text_config", said).update({key: 2}), more)
    model = load(folder)
    assert model.config.text.num_nextn_predict_layers == 2
    assert len(model.layers) == len(load(tiny.checkpoint(name)).layers)
    assert estimate(EngineConfig(str(folder)), open_checkpoint(folder)).tensors.mtp == 2


def test_tensors_of_a_state_that_no_layer_has_are_left_over(tmp_path):
    def more(tensors):
        return {**tensors, "model.layers.1.linear_attn.A_log": torch.zeros(4)}

    folder = changed(tiny.checkpoint("qwen3_5_text"), tmp_path, tensors=more)
    with pytest.raises(ConfigError, match=r"left over: model\.layers\.1\.linear_attn\.A_log"):
        load(folder)


LACKING = (
    ("qwen3_5_text-states", "linear_attn.A_log"),
    ("qwen3_5_text-states", "linear_attn.in_proj_a.weight"),
    ("nemotron_h-states", "mixer.conv1d.bias"),
    ("jamba-states", "mamba.dt_proj.bias"),
    ("falcon_h1-normed", "mamba.norm.weight"),
    ("mamba", "mixer.D"),
)


@pytest.mark.parametrize(("name", "lacking"), LACKING)
def test_tensors_of_a_state_that_files_lack_are_named(tmp_path, name, lacking):
    def fewer(tensors):
        key = next(key for key in tensors if key.endswith(lacking))
        return {name: tensor for name, tensor in tensors.items() if name != key}

    with pytest.raises(ConfigError, match=rf"missing: \S*{re.escape(lacking)}"):
        load(changed(tiny.checkpoint(name), tmp_path, tensors=fewer))


def test_a_product_in_two_spellings_is_left_over(tmp_path):
    """The file has Qwen3-Next's spelling besides Qwen3.5's."""

    def more(tensors):
        return {**tensors, "model.layers.0.linear_attn.in_proj_ba.weight": torch.zeros(12, 120)}

    folder = changed(tiny.checkpoint("qwen3_5_text-states"), tmp_path, tensors=more)
    with pytest.raises(ConfigError, match=r"left over: model\.layers\.0\.linear_attn\.in_proj_ba\.weight"):
        load(folder)


def test_a_pattern_and_a_list_name_the_same_layers(tmp_path):
    def letters(said):
        said.pop("layers_block_type", None)
        said.pop("layer_types", None)
        said["hybrid_override_pattern"] = "*-E*E"

    folder = tiny.checkpoint("nemotron_h")
    assert load_model_config(changed(folder, tmp_path, letters)).text == load_model_config(folder).text


REFUSED = (
    ("qwen3_5_text", {"layer_types": ["full_attention"] * 2}, "layer_types has 2 entries for num_hidden_layers=3"),
    (
        "qwen3_5_text",
        {"layer_types": ["lightning"] * 3},
        "layer kind 'lightning'; supported are full_attention, linear",
    ),
    ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate=False"),
    (
        "qwen3_5_text",
        {"layer_types": ["linear_attention"] * 3, "output_gate_type": "tanh"},
        "output_gate_type='tanh'; supported are silu, swish and sigmoid",
    ),
    (
        "qwen3_next",
        {"layer_types": ["linear_attention"] * 3, "linear_num_value_heads": 6, "linear_num_key_heads": 4},
        "linear_num_value_heads=6 is no multiple of linear_num_key_heads=4",
    ),
    ("nemotron_h", {"layers_block_type": ["mlp", "conv"]}, "layer kind 'conv'"),
    (
        "nemotron_h",
        {"layers_block_type": ["mamba"], "mamba_num_heads": 6, "n_groups": 4},
        "mamba_num_heads=6 is no multiple of groups of B and C=4",
    ),
    (
        "nemotron_h",
        {"layers_block_type": ["mamba"], "mamba_ssm_cache_dtype": "float16"},
        "mamba_ssm_cache_dtype='float16': states are float32 or bfloat16",
    ),
    ("qwen3_5_text-states", {"hidden_act": "gelu"}, "hidden_act='gelu' of layers with a state; supported are silu"),
    ("qwen3_5_text-states", {"mamba_ssm_dtype": "float16"}, "mamba_ssm_dtype='float16': states are float32 or"),
    ("nemotron_h-states", {"mamba_hidden_act": "relu2"}, "mamba_hidden_act='relu2' of layers with a state"),
    ("jamba-states", {"layer_types": ["mamba", "conv", "mamba"]}, "layer kind 'conv'; supported are full_attention"),
    ("granite_hybrid-states", {"mamba_n_groups": 4}, "mamba_n_heads=6 is no multiple of groups of B and C=4"),
    ("mamba2", {"n_groups": 4}, "num_heads=6 is no multiple of groups of B and C=4"),
    ("mamba", {"hidden_act": "relu"}, "hidden_act='relu' of layers with a state"),
    ("falcon_h1", {"mamba_n_groups": 4}, "mamba_n_heads=6 is no multiple of groups of B and C=4"),
    ("falcon_h1", {"ssm_multipliers": [1.0, 2.0]}, "ssm_multipliers=[1.0, 2.0]; 5 numbers are needed"),
    ("falcon_h1", {"mlp_multipliers": [1.0, "x"]}, "mlp_multipliers=[1.0, 'x']; 2 numbers are needed"),
    ("bamba", {"attn_layer_indices": [1], "mamba_n_heads": 5, "mamba_d_head": "auto"}, "144 columns are no multiple"),
    ("bamba", {"attn_layer_indices": [1], "time_step_limit": [0.0, 0.1]}, "time_step_limit=[0.0, 0.1] bounds dt"),
    ("granite_hybrid", {"position_embedding_type": "alibi"}, "position_embedding_type='alibi'"),
)


@pytest.mark.parametrize(("name", "says", "why"), REFUSED)
def test_what_is_not_served_is_refused_by_name(tmp_path, name, says, why):
    folder = tiny.checkpoint(name)
    said = json.loads((folder / "config.json").read_text())
    if "layers_block_type" in says:
        said.pop("num_hidden_layers", None)
        said.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps({**said, **says}))
    with pytest.raises(ConfigError) as caught:
        load_model_config(tmp_path)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)
