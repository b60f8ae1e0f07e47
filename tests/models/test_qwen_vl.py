"""Qwen2-VL, 2.5-VL and 3-VL against transformers: pictures and films from pixels through our processor."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from engine.base.errors import ConfigError, RequestError
from engine.models.registry import build_model, load_model_config
from tests import tiny
from tests.models import seeing
from tests.models.harness import Harness
from tests.models.seeing import load, oracle, prepare, spliced

TOLERANCE = 1e-4
NAMES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "ernie4_5_vl_moe")
PROMPTS = [prompt for prompt in seeing.PROMPTS if prompt != "two pictures"]  # "picture, film, picture" has two pictures


def oracle_inputs(name, prompt):
    """transformers' arguments for the same prompt; transformers counts the positions itself."""
    made, processed = spliced(name, prompt)
    ids = torch.tensor(made.prompt_token_ids, dtype=torch.long)[None]
    picture = 2 if name.startswith("glm") and "film" in prompt else 1  # GLM's films have picture tokens
    kinds = torch.where(ids == tiny.IDS["<|IMAGE|>"], picture, torch.where(ids == tiny.IDS["<|VIDEO|>"], 2, 0)).int()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds}
    if name == "ernie4_5_vl_moe":  # the tokens around media use the experts of media, too
        ends = [tiny.IDS["<|vision_bos|>"], tiny.IDS["<|vision_eos|>"]]
        inputs["moe_mm_token_type_ids"] = torch.where(torch.isin(ids, torch.tensor(ends)), 1, kinds)
    for kind, pixels, grid in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        parts = [part.features for item in processed for part in item.parts if part.modality == kind]
        if parts:
            inputs[pixels] = torch.tensor(np.concatenate([part["pixel_values"] for part in parts]))
            inputs[grid] = torch.tensor(np.concatenate([part["grid_thw"] for part in parts]))
        if parts and kind == "video" and name == "qwen2_5_vl":
            inputs["second_per_grid_ts"] = torch.tensor(np.concatenate([part["second_per_grid"] for part in parts]))
    return inputs


@pytest.mark.parametrize("chunk", [0, 7])
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_logits_equal_transformers(name, prompt, chunk):
    harness = Harness(load(tiny.checkpoint(name)))
    oracle(name).model.rope_deltas = None
    want = oracle(name)(**oracle_inputs(name, prompt)).logits[0]
    assert (harness.prefill(prepare(name, prompt, harness), chunk) - want).abs().max() <= TOLERANCE


@pytest.mark.parametrize("chunk", [0, 7])
@pytest.mark.parametrize("prompt", ["text", "picture", "large picture", "two pictures", "film", "slow film"])
@pytest.mark.parametrize("name", ["glm4v", "glm46v", "glm4v_moe"])
@torch.inference_mode()
def test_media_of_glm_equal_transformers(name, prompt, chunk):
    harness = Harness(load(tiny.checkpoint(name)))
    oracle(name).model.rope_deltas = None
    want = oracle(name)(**oracle_inputs(name, prompt)).logits[0]
    assert (harness.prefill(prepare(name, prompt, harness), chunk) - want).abs().max() <= 3 * TOLERANCE


@pytest.mark.parametrize("prompt", ["two pictures", "film"])
@pytest.mark.parametrize("name", ["glm4v", "glm46v", "glm4v_moe"])
def test_greedy_tokens_of_glm_equal_transformers(name, prompt):
    test_greedy_tokens_equal_transformers(name, prompt)


@pytest.mark.parametrize("prompt", ["picture", "picture, film, picture"])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_transformers(name, prompt):
    harness = Harness(load(tiny.checkpoint(name)))
    inputs = oracle_inputs(name, prompt)
    oracle(name).generation_config.eos_token_id = None
    oracle(name).model.rope_deltas = None
    out = oracle(name).generate(**inputs, max_new_tokens=24, do_sample=False)
    assert (
        harness.generate(prepare(name, prompt, harness), 24, chunk=13)
        == out[0, inputs["input_ids"].shape[1] :].tolist()
    )


def test_the_time_axis_counts_seconds():
    """If the time axis counted frames instead of seconds, the film tests above would pass too."""
    (fast, _), (slow, _) = spliced("qwen2_5_vl", "film"), spliced("qwen2_5_vl", "slow film")
    assert np.diff(np.unique(fast.positions[0, 4:])).max() != np.diff(np.unique(slow.positions[0, 4:])).max()


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_released_files_are_flat(tmp_path, name):
    """The released config.json has the decoder's keys at the top level, mrope as rope_scaling, and in_chans."""
    folder = tiny.checkpoint(name)
    nested = json.loads((folder / "config.json").read_text())
    text = nested.pop("text_config")
    rope = text.pop("rope_parameters")
    vision = nested["vision_config"]
    vision["in_chans"] = vision.pop("in_channels")
    vision.pop("rope_parameters")
    flat = {**text, **nested, "rope_theta": rope["rope_theta"], "model_type": name}
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    (tmp_path / "generation_config.json").write_text((folder / "generation_config.json").read_text())
    old, new = load_model_config(tmp_path), load_model_config(folder)
    assert dataclasses.replace(old, folder=new.folder, raw=new.raw) == new


@pytest.mark.parametrize("tied", [False, True])
def test_ties_are_read_where_older_files_have_them(tmp_path, tied):
    config = json.loads((tiny.checkpoint("qwen2_5_vl") / "config.json").read_text())
    del config["tie_word_embeddings"]
    config["text_config"]["tie_word_embeddings"] = tied
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model_config(tmp_path).text.tie_embeddings is tied


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"deepstack_visual_indexes": [0, 1, 2]}, "feeds 3 layers of the decoder; its 3 must be more"),
        ({"deepstack_visual_indexes": [0, 9]}, r"\[0, 9\] must be different layers of the tower's 4"),
        ({"num_position_embeddings": 35}, "num_position_embeddings=35 must be a square"),
        ({"hidden_act": "tanh"}, "hidden_act='tanh'; this tower is supported with"),
    ],
)
def test_towers_that_cannot_be_are_refused(tmp_path, change, complaint):
    config = json.loads((tiny.checkpoint("qwen3_vl") / "config.json").read_text())
    config["vision_config"].update(change)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=complaint):
        build_model(load_model_config(tmp_path), torch.float32)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'; this tower is supported with 'silu'"),
        ({"num_heads": 5}, "hidden_size=72 over num_heads=5 must give heads of a multiple of 4"),
        ({"image_size": 7}, "image_size=7 at least patch_size=14"),
    ],
)
def test_towers_of_glm_that_cannot_be_are_refused(tmp_path, change, complaint):
    config = json.loads((tiny.checkpoint("glm4v") / "config.json").read_text())
    config["vision_config"].update(change)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=complaint):
        load_model_config(tmp_path)


def test_features_that_are_no_grid_of_glm_are_refused():
    tower = load(tiny.checkpoint("glm4v")).vision
    for count, grid in ((4, (2, 2, 2)), (6, (1, 3, 2)), (4, (1, 2, 4))):
        with pytest.raises(RequestError, match=f"do not fit the grid {grid[0]} x {grid[1]} x {grid[2]}"):
            tower.encode({"pixel_values": torch.zeros(count, 1176), "grid_thw": torch.tensor([grid])})


def test_without_pictures_no_tower_is_built():
    config = load_model_config(tiny.checkpoint("qwen3_vl"), without=("image", "video"))
    assert config.row_parts == 1
    assert not build_model(config, torch.float32).towers


def test_experts_of_glm_46_are_those_of_glm_45(tmp_path):
    source = tiny.checkpoint("glm4v_moe")
    for file in source.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    config |= {"architectures": ["Glm46VForConditionalGeneration"], "model_type": "glm46v"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours, same = Harness(load(tmp_path)), Harness(load(source))
    rows = [harness.prefill(prepare("glm4v_moe", "film", harness)) for harness in (ours, same)]
    assert torch.equal(*rows)
