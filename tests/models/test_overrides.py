"""--hf-overrides, and towers that are left out: which configuration and which weights are read."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.base.errors import ConfigError
from engine.models.registry import build_model, load_model_config
from engine.weights.load import load_weights, weight_bytes
from tests import tiny
from tests.models.harness import Harness, load

EVERYTHING = ("image", "audio", "video")


def built(name, without=(), overrides=None):
    config = load_model_config(tiny.checkpoint(name), overrides, without)
    model = build_model(config, torch.float32)
    seen = []
    load_weights(model, config.folder, progress=lambda done, total: seen.append(total))
    return model, seen[-1]


def test_overrides_are_merged_into_the_configuration():
    folder = tiny.checkpoint("omni")
    own = load_model_config(folder)
    changes = {"text_config": {"rms_norm_eps": 0.25}, "eos_token_id": 3}
    changed = load_model_config(folder, changes)
    assert changed.text.norm_eps == 0.25
    assert changed.text.hidden_size == own.text.hidden_size
    assert changed.raw["text_config"]["rms_norm_eps"] == 0.25
    assert load_model_config(folder, {"vision_config": None}).modalities == ("text", "audio")
    with pytest.raises(ConfigError, match="hidden_size is missing"):
        load_model_config(tiny.checkpoint("llama"), {"hidden_size": None})
    with pytest.raises(ConfigError, match="architecture Other is not supported"):
        load_model_config(folder, {"architectures": ["Other"]})


def test_overrides_hold_for_params_json_in_the_words_of_config_json(tmp_path):
    params = {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 96, "vocab_size": 320, "norm_eps": 1e-5}
    (tmp_path / "params.json").write_text(json.dumps(params))
    config = load_model_config(tmp_path, {"num_hidden_layers": 1})
    assert len(config.text.layers) == 1


@pytest.mark.parametrize(
    ("without", "towers", "modalities"),
    [
        (("image",), {"vision", "audio"}, ("text", "image", "video", "audio")),
        (("image", "video"), {"audio"}, ("text", "audio")),
        (("audio",), {"vision"}, ("text", "image", "video")),
        (EVERYTHING, set(), ("text",)),
    ],
)
def test_a_tower_for_nothing_is_not_built(without, towers, modalities):
    model, read = built("omni", without)
    assert set(model.config.towers) == towers
    assert model.config.modalities == modalities
    assert {name for name in ("image", "audio", "video") if name in model.config.media_token_ids} == set(modalities[1:])
    assert read == weight_bytes(model)  # float32 files: tensors of towers that are not built are not read
    assert (read < built("omni")[1]) == (len(towers) < 2)


def test_the_decoder_is_checked_as_ever_when_towers_are_left_out(tmp_path):
    folder = shutil.copytree(tiny.checkpoint("omni"), tmp_path / "omni")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.visual.weight"] = torch.zeros(2)
    save_file(tensors, folder / "model.safetensors")
    config = load_model_config(folder, without=EVERYTHING)
    with pytest.raises(ConfigError, match=r"1 left over: model\.layers\.0\.mlp\.visual\.weight"):
        load_weights(build_model(config, torch.float32), str(folder))


def test_a_tower_that_is_not_supported_is_no_matter_without_media():
    wrong = {"vision_config": {"hidden_act": "unknown", "num_heads": 0}}
    with pytest.raises(ConfigError, match="vision_config"):
        load_model_config(tiny.checkpoint("omni"), wrong)
    assert load_model_config(tiny.checkpoint("omni"), wrong, EVERYTHING).modalities == ("text",)


AROUND = {"ShieldGemma2ForImageClassification": "gemma3", "AriaForConditionalGeneration": "mistral", "Other": "qwen2"}
STYLES = {
    "as first released": lambda name: "language_model." + name,
    "as transformers 5 writes": lambda name: name.replace("model.", "model.language_model."),
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("architecture", AROUND)
def test_the_decoder_of_a_model_with_towers_is_served_alone(tmp_path, architecture, style):
    """A decoder's own checkpoint, nested as in vision models that have no file here."""
    source = tiny.checkpoint(AROUND[architecture])
    inner = json.loads((source / "config.json").read_text())
    tied = {"tie_word_embeddings": inner["tie_word_embeddings"]}
    config = {"architectures": [architecture], "text_config": inner, "vision_config": {"hidden_size": 8}, **tied}
    (tmp_path / "config.json").write_text(json.dumps({**config, "image_token_index": 7, "eos_token_id": 5}))
    tensors = {STYLES[style](name): tensor for name, tensor in load_file(source / "model.safetensors").items()}
    tower = {"vision_tower.blocks.0.weight": torch.zeros(2), "multi_modal_projector.weight": torch.zeros(2)}
    save_file({**tensors, **tower}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"{architecture}.*; with --language-model-only its decoder is"):
        load_model_config(tmp_path)
    config = load_model_config(tmp_path, without=EVERYTHING)
    assert (config.modalities, config.media_token_ids, config.eos_token_ids) == (("text",), {}, (5,))
    model = build_model(config, torch.float32)
    load_weights(model, config.folder)
    alone = Harness(load(source))
    tokens = list(range(40, 70))
    harness = Harness(model)
    assert torch.equal(harness.prefill(harness.add(tokens)), alone.prefill(alone.add(tokens)))
