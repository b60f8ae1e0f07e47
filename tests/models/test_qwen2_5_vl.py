"""Qwen2.5-VL against transformers: pictures and films from pixels through our processor, logits and greedy tokens."""

import dataclasses
import functools
import json

import numpy as np
import pytest
import torch

from engine.models.registry import load_model_config
from mm.item import MediaItem, MediaOptions
from mm.limits import MediaLimits
from mm.processors.registry import processor_for
from mm.splice import splice
from tests import tiny
from tests.mm.made import noise
from tests.models.harness import Harness, load

TOLERANCE = 1e-4
PLAIN = MediaOptions()
MARKS = {"image": "<|IMAGE|>", "video": "<|VIDEO|>"}
load = functools.cache(load)


@functools.cache
def oracle():
    return tiny.reference(tiny.checkpoint("qwen2_5_vl"))


@functools.cache
def processor():
    config = load_model_config(tiny.checkpoint("qwen2_5_vl"))
    return processor_for(config.processor, config.folder, config.raw)


def picture(height, width, seed=0):
    scale = processor().plan_image(height, width, PLAIN)
    return MediaItem("image", scale.array(noise(height, width, seed)))


def film(frames, fps, height, width, seed=0):
    plan = processor().plan_film(frames, fps, height, width, PLAIN, MediaLimits())
    kept = [plan.scale.array(noise(height, width, seed + int(index))) for index in plan.indices]
    return MediaItem("video", np.stack(kept), plan.seconds_per_frame)


PROMPTS = {
    "text": [],
    "picture": [picture(60, 90)],
    "large picture": [picture(200, 170)],
    "film": [film(30, 10.0, 60, 80)],
    "slow film": [film(9, 1.0, 40, 60)],
    "picture, film, picture": [picture(90, 60), film(40, 12.5, 60, 60), picture(50, 50, seed=3)],
}


@functools.cache
def spliced(name):
    tokens, slots, processed = [5, 9, 13], [], []
    for number, item in enumerate(PROMPTS[name]):
        slots.append(len(tokens) + 1)
        tokens += [tiny.IDS["<|vision_bos|>"], tiny.IDS[MARKS[item.modality]], tiny.IDS["<|vision_eos|>"], 20 + number]
        processed.append(processor().process(item, bytes(16), PLAIN))
    return splice([*tokens, 7, 8], slots, processed, processor()), processed


def oracle_inputs(name):
    """The same prompt in transformers' arguments; transformers counts the positions itself."""
    made, processed = spliced(name)
    ids = torch.tensor(made.prompt_token_ids, dtype=torch.long)[None]
    kinds = torch.where(ids == tiny.IDS["<|IMAGE|>"], 1, torch.where(ids == tiny.IDS["<|VIDEO|>"], 2, 0)).int()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds}
    for kind, pixels, grid in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        parts = [part.features for item in processed for part in item.parts if part.modality == kind]
        if parts:
            inputs[pixels] = torch.tensor(np.concatenate([part["pixel_values"] for part in parts]))
            inputs[grid] = torch.tensor(np.concatenate([part["grid_thw"] for part in parts]))
        if parts and kind == "video":
            inputs["second_per_grid_ts"] = torch.tensor(np.concatenate([part["second_per_grid"] for part in parts]))
    return inputs


@torch.inference_mode()
def prepare(name, harness):
    made, processed = spliced(name)
    parts = [part for item in processed for part in item.parts]
    assert [item.num_tokens for item in made.media] == [part.num_tokens for part in parts]
    media = []
    for item, part in zip(made.media, parts):
        features = {key: torch.tensor(value) for key, value in part.features.items()}
        rows = harness.model.towers[part.modality].encode(features)
        ((start, length),) = item.spans
        assert length == len(rows)
        media.append((start, rows))
    positions = None if made.positions is None else torch.tensor(made.positions, dtype=torch.int64)
    return harness.add(made.prompt_token_ids.tolist(), positions=positions, delta=made.position_delta, media=media)


@pytest.mark.parametrize("chunk", [0, 7])
@pytest.mark.parametrize("name", PROMPTS)
@torch.inference_mode()
def test_logits_equal_transformers(name, chunk):
    harness = Harness(load(tiny.checkpoint("qwen2_5_vl")))
    oracle().model.rope_deltas = None
    want = oracle()(**oracle_inputs(name)).logits[0]
    assert (harness.prefill(prepare(name, harness), chunk) - want).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_tokens_equal_transformers(name):
    harness = Harness(load(tiny.checkpoint("qwen2_5_vl")))
    inputs = oracle_inputs(name)
    oracle().generation_config.eos_token_id = None
    oracle().model.rope_deltas = None
    out = oracle().generate(**inputs, max_new_tokens=32, do_sample=False)
    assert harness.generate(prepare(name, harness), 32, chunk=13) == out[0, inputs["input_ids"].shape[1] :].tolist()


def test_the_time_axis_counts_seconds():
    """Otherwise the film tests above would pass with frames counted."""
    (fast, _), (slow, _) = spliced("film"), spliced("slow film")
    assert np.diff(np.unique(fast.positions[0, 4:])).max() != np.diff(np.unique(slow.positions[0, 4:])).max()


def test_released_files_are_flat(tmp_path):
    """The released config.json has the decoder's keys at the top, mrope as rope_scaling, and in_chans."""
    folder = tiny.checkpoint("qwen2_5_vl")
    nested = json.loads((folder / "config.json").read_text())
    text = nested.pop("text_config")
    rope = text.pop("rope_parameters")
    vision = nested["vision_config"]
    vision["in_chans"] = vision.pop("in_channels")
    vision.pop("rope_parameters")
    flat = {**text, **nested, "rope_theta": rope["rope_theta"], "model_type": "qwen2_5_vl"}
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
