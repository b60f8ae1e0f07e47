"""Mistral's own format: params.json with consolidated*.safetensors computes the same as the transformers folder."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.base.errors import ConfigError
from engine.models.registry import build_model, load_model_config
from engine.weights import consolidated
from engine.weights import load as loading
from engine.weights.files import CONSOLIDATED_INDEX, open_checkpoint
from mm.processors.registry import processor_for
from tests import tiny
from tests.models.harness import Harness, load
from tests.models.late import LateUpload
from tests.models.seeing import PLAIN, prepare, processor

TOKENS = list(range(40, 80))
LAYER = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
}
OUTER = {"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output"}


def interleave(rows, head_dim):
    """Interleaves the two halves of each head's rows: row i of the halves becomes rows 2i and 2i + 1."""
    heads = rows.reshape(-1, head_dim, rows.shape[-1])
    out = torch.empty_like(heads)
    out[:, 0::2], out[:, 1::2] = heads[:, : head_dim // 2], heads[:, head_dim // 2 :]
    return out.reshape(rows.shape)


def tensors_of(folder, head_dim):
    """The folder's decoder weights by Mistral's names."""
    out = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight").replace("language_model.model.", "model.").removeprefix("language_model.")
        if module in OUTER:
            out[f"{OUTER[module]}.weight"] = tensor
            continue
        if not module.startswith("model.layers."):
            continue  # a tensor of the tower
        _, _, index, rest = module.split(".", 3)
        rotated = rest in ("self_attn.q_proj", "self_attn.k_proj")
        tensor = interleave(tensor, head_dim) if rotated else tensor
        out[f"layers.{index}.{LAYER.get(rest, rest)}.weight"] = tensor.contiguous()  # experts keep their names
    return out


def params_of(source):
    """The params.json of a folder, or of a decoder's configuration."""
    config = source if isinstance(source, dict) else json.loads((source / "config.json").read_text())
    return {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "head_dim": config["head_dim"] or config["hidden_size"] // config["num_attention_heads"],
        "hidden_dim": config["intermediate_size"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "norm_eps": config["rms_norm_eps"],
        "vocab_size": config["vocab_size"],
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "sliding_window": config["sliding_window"],
        "max_position_embeddings": config["max_position_embeddings"],
    }


BESIDE = {
    "vision_tower.patch_conv": "vision_encoder.patch_conv",
    "vision_tower.ln_pre": "vision_encoder.ln_pre",
    "multi_modal_projector.norm": "pre_mm_projector_norm",
    "multi_modal_projector.patch_merger.merging_layer": "patch_merger.merging_layer",
    "multi_modal_projector.linear_1": "vision_language_adapter.w_in",
    "multi_modal_projector.linear_2": "vision_language_adapter.w_out",
}
INSIDE = {
    "q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo",
    "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3",
}  # fmt: skip


def tower_of(folder, head_dim):
    """The folder's tower and projector by Mistral's names."""
    out = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.startswith(("vision_tower.", "multi_modal_projector.")):
            continue
        module, _, kind = name.rpartition(".")
        path, _, inner = module.rpartition(".")
        if module in BESIDE:
            out[f"{BESIDE[module]}.{kind}"] = tensor
            continue
        turned = interleave(tensor, head_dim) if inner in ("q_proj", "k_proj") else tensor
        path = path.replace("vision_tower.", "vision_encoder.")
        out[f"{path}.{INSIDE.get(inner, inner)}.{kind}"] = turned.contiguous()
    return out


def seeing_folder(name, folder):
    """Writes a vision model in Mistral's format."""
    source = tiny.checkpoint(name)
    config = json.loads((source / "config.json").read_text())
    sees, merges = config["vision_config"], config["model_type"] == "mistral3"
    vision = {
        **{key: sees[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")},
        "num_channels": 3, "patch_size": sees["patch_size"], "image_size": 140, "rope_theta": 10_000.0,
        "image_token_id": tiny.IDS["<|IMAGE|>"], "adapter_bias": not merges,
    }  # fmt: skip
    if merges:
        vision |= {"mm_projector_id": "patch_merge", "spatial_merge_size": 2, "add_pre_mm_projector_layer_norm": True}
    params = params_of({**config["text_config"], "sliding_window": None})
    tensors = tensors_of(source, params["head_dim"])
    tensors |= tower_of(source, sees["hidden_size"] // sees["num_attention_heads"])
    tied = "output.weight" not in tensors
    return write(folder, {**params, "tied_embeddings": tied, "vision_encoder": vision}, tensors)


def write(folder, params, tensors=None):
    (folder / "params.json").write_text(json.dumps(params))
    if tensors is not None:
        save_file(tensors, folder / "consolidated.safetensors")
    return folder


def logits(folder):
    harness = Harness(load(folder))
    return harness.prefill(harness.add(TOKENS))


@pytest.mark.parametrize("name", ["mistral", "mistral-window"])
def test_both_formats_give_equal_logits(name, tmp_path):
    source = tiny.checkpoint(name)
    params = params_of(source)
    folder = write(tmp_path, params, tensors_of(source, params["head_dim"]))
    assert torch.equal(logits(folder), logits(source))


@pytest.mark.parametrize("block", ["feed_forward", "block_sparse_moe"])
def test_experts_are_mixtrals(tmp_path, block):
    """Mixtral 8x22B's files, with both names of their block (https://github.com/ggml-org/llama.cpp/pull/4406)."""
    source = tiny.checkpoint("mixtral")
    config = json.loads((source / "config.json").read_text())
    moe = {"num_experts": config["num_local_experts"], "num_experts_per_tok": config["num_experts_per_tok"]}
    params = {**params_of(config), "moe": moe}
    tensors = {
        name.replace("block_sparse_moe", block): tensor
        for name, tensor in tensors_of(source, params["head_dim"]).items()
    }
    assert f"layers.2.{block}.experts.4.w3.weight" in tensors
    assert f"layers.0.{block}.gate.weight" in tensors
    folder = write(tmp_path, params, tensors)
    assert torch.equal(logits(folder), logits(source))


@pytest.mark.parametrize(("dim", "length"), [(4096, 32_768), (6144, 65_536)])
def test_what_a_mixtrals_file_leaves_out(tmp_path, dim, length):
    """Mixtral 8x7B's file: https://github.com/vllm-project/vllm/issues/1991. 8x22B is wider, with a longer context."""
    params = {
        "dim": dim, "n_layers": 32, "head_dim": 128, "hidden_dim": 14336, "n_heads": dim // 128, "n_kv_heads": 8,
        "norm_eps": 1e-05, "vocab_size": 32000, "moe": {"num_experts_per_tok": 2, "num_experts": 8},
    }  # fmt: skip
    config = load_model_config(write(tmp_path, params))
    layer = config.text.layers[-1]
    assert (config.architecture, config.max_position, layer.rope.theta) == ("MixtralForCausalLM", length, 1e6)
    assert layer.experts is not None
    assert (layer.experts.routing.num_experts, layer.experts.routing.top_k, layer.experts.width) == (8, 2, 14336)


def test_an_accelerator_gets_rotated_rows_in_the_kernels_order(tmp_path, monkeypatch):
    source = tiny.checkpoint("mistral")
    params = params_of(source)
    folder = write(tmp_path, params, tensors_of(source, params["head_dim"]))
    upload = LateUpload()
    monkeypatch.setattr(loading, "upload_for", lambda device: upload)
    assert torch.equal(logits(folder), logits(source))
    assert upload.finished


def test_shards_with_an_index_and_without(tmp_path):
    source = tiny.checkpoint("mistral")
    params = params_of(source)
    tensors = tensors_of(source, params["head_dim"])
    folder = write(tmp_path, params)
    names, owners = sorted(tensors), {}
    for part in range(2):
        file = f"consolidated-0000{part + 1}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names[part::2]}, folder / file)
        owners.update(dict.fromkeys(names[part::2], file))
    want = logits(source)
    assert torch.equal(logits(folder), want)
    (folder / CONSOLIDATED_INDEX).write_text(json.dumps({"weight_map": owners}))
    assert torch.equal(logits(folder), want)


def test_rows_in_pairs_and_rows_in_halves_turn_alike():
    """Rotating pairs (as complex numbers) and rotating halves give the same attention scores."""
    generator = torch.Generator().manual_seed(0)
    head_dim, hidden, length = 8, 16, 5
    wq, wk = (torch.randn(head_dim, hidden, generator=generator) for _ in range(2))
    x = torch.randn(length, hidden, generator=generator)
    angles = torch.arange(length)[:, None] / 10_000 ** (torch.arange(0, head_dim, 2) / head_dim)

    def paired(rows):
        turned = torch.view_as_complex(rows.view(length, -1, 2)) * torch.polar(torch.ones_like(angles), angles)
        return torch.view_as_real(turned).flatten(1)

    def halved(rows):
        a, b = rows.chunk(2, dim=1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=1)

    want = paired(x @ wq.T) @ paired(x @ wk.T).T
    q, k = (consolidated.half_split(weight, head_dim) for weight in (wq, wk))
    torch.testing.assert_close(halved(x @ q.T) @ halved(x @ k.T).T, want)


def test_transformers_files_win_where_a_folder_has_both(tmp_path):
    source = tiny.checkpoint("mistral")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    write(tmp_path, {"dim": 1}, {"tok_embeddings.weight": torch.zeros(1, 1)})
    assert load_model_config(tmp_path).text.hidden_size == 64
    assert [shard.path.name for shard in open_checkpoint(tmp_path)] == ["model.safetensors"]


def test_params_are_read_as_config(tmp_path):
    params = params_of(tiny.checkpoint("mistral"))
    yarn = {"factor": 4.0, "original_max_position_embeddings": 128, "beta": 32, "alpha": 1, "apply_scale": False}
    del params["max_position_embeddings"], params["n_kv_heads"]
    config = load_model_config(write(tmp_path, {**params, "yarn": yarn, "tied_embeddings": True}))
    assert (config.architecture, config.eos_token_ids) == ("MistralForCausalLM", (2,))
    assert (config.text.num_kv_heads, config.text.tie_embeddings, config.max_position) == (4, True, 128_000)
    rope = config.text.layers[0].rope
    assert (rope.kind, rope.factor, rope.attention_factor) == ("yarn", 4.0, 1.0)


def test_queries_scaled_by_position_are_those_of_ministral_3(tmp_path):
    """params.json and config.json express the same settings with different keys."""
    (tmp_path / "params").mkdir()
    yarn = {"factor": 16, "original_max_position_embeddings": 16384, "beta": 32, "alpha": 1, "apply_scale": False}
    scaling = {"beta": 0.1, "original_max_position_embeddings": 16384}
    params = {**params_of(tiny.checkpoint("mistral")), "rope_theta": 1e6, "yarn": yarn, "llama_4_scaling": scaling}
    config = load_model_config(write(tmp_path / "params", {**params, "max_position_embeddings": 262144}))
    assert config.architecture == "Ministral3ForCausalLM"
    rope = {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    }  # fmt: skip
    other = json.loads((tiny.checkpoint("mistral") / "config.json").read_text())
    other |= {"architectures": ["Ministral3ForCausalLM"], "rope_parameters": rope, "max_position_embeddings": 262144}
    (tmp_path / "config.json").write_text(json.dumps(other))
    same = load_model_config(tmp_path)
    assert config.text.layers == same.text.layers
    assert config.text.layers[0].rope.query_scaling == 0.1
    assert config.max_position == same.max_position == 262144


def test_the_decoder_of_a_model_with_a_picture_tower_is_served_alone(tmp_path):
    source = tiny.checkpoint("mistral")
    params = params_of(source)
    tower = {"vision_encoder.transformer.layers.0.attention.wq.weight": torch.zeros(2, 2)}
    tower |= {"vision_language_adapter.w_in.weight": torch.zeros(2), "pre_mm_projector_norm.weight": torch.zeros(2)}
    tensors = tensors_of(source, params["head_dim"]) | tower
    sees = {"hidden_size": 8, "num_attention_heads": 2}
    folder = write(tmp_path, {**params, "vision_encoder": sees}, tensors)
    config = load_model_config(folder, without=("image", "audio", "video"))
    model = build_model(config, torch.float32)
    loading.load_weights(model, str(folder))
    assert torch.equal(model.layers[1].o.weight.dense(), load(source).layers[1].o.weight.dense())


@pytest.mark.parametrize("name", ["mistral3", "llava-pixtral"])
@torch.inference_mode()
def test_pictures_are_seen_as_in_transformers_format(name, tmp_path):
    folder = seeing_folder(name, tmp_path)
    ours, theirs = Harness(load(folder)), Harness(load(tiny.checkpoint(name)))
    rows = [prepare(name, "two pictures", harness) for harness in (ours, theirs)]
    assert torch.equal(ours.prefill(rows[0]), theirs.prefill(rows[1]))
    config = load_model_config(folder)
    reader = processor_for(config.processor, config.folder, config.raw)
    known = processor(name)
    assert reader.settings("image", PLAIN) == known.settings("image", PLAIN)
    assert reader.placeholder("image") == known.placeholder("image")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moe": {"num_experts": 8}}, "params.json: moe: num_experts_per_tok is missing"),
        ({"moe": {"num_experts": 8, "num_shared_experts": 1}}, "num_shared_experts is not supported; .* as Mixtral"),
        ({"multimodal": {"whisper_model_args": {}}}, "other modalities.*; --language-model-only serves the decoder"),
        ({"vision_encoder": {"mm_projector_id": "patch_merge"}}, "layer_norm=false; supported are none of both"),
        ({"vision_encoder": {"image_size": 8}}, "params.json: vision_encoder: hidden_size is missing"),
        ({"llama_4_scaling": {"beta": 0.1, "original_max_position_embeddings": 8}}, "must be that of yarn, None"),
        ({"quantization": {"qformat_weight": "int4"}}, "qformat_weight='int4'; fp8_e4m3 is read"),
        ({"dim": None}, "params.json: dim is missing"),
        ({"sliding_window": [None, 8]}, "differs between layers"),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path, change, message):
    params = {**params_of(tiny.checkpoint("mistral")), **change}
    with pytest.raises(ConfigError, match=message):
        load_model_config(write(tmp_path, params))


def test_what_does_not_fit_is_reported_in_one_error(tmp_path):
    source = tiny.checkpoint("mistral")
    params = params_of(source)
    tensors = tensors_of(source, params["head_dim"])
    tensors["layers.1.attention.wx.weight"] = tensors.pop("layers.1.attention.wo.weight")
    with pytest.raises(
        ConfigError, match=r"1 missing: layers\.1\.self_attn\.o_proj.*left over: layers\.1\.attention\.wx"
    ):
        load(write(tmp_path, params, tensors))
