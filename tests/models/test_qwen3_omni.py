"""Qwen3-Omni's thinker against transformers: positions and logits of pictures, films, sound, and films with sound."""

from __future__ import annotations

import functools
import hashlib

import numpy as np
import pytest
import torch

from engine.models.registry import load_model_config
from mm.item import MediaItem, MediaOptions
from mm.processors.registry import processor_for
from mm.splice import splice
from tests import tiny
from tests.mm.made import noise
from tests.models.harness import Harness, load
from tests.tiny_sounds import SOUNDS

(FAMILY,) = (family for family in SOUNDS if family.name == "qwen3-omni")
MARKS = {
    "image": ("<|vision_bos|>", "<|vision_eos|>"),
    "video": ("<|vision_bos|>", "<|vision_eos|>"),
    "audio": ("<|audio_bos|>", "<|audio_eos|>"),
}
TOLERANCE = 2e-4


@functools.cache
def processor():
    config = load_model_config(FAMILY.folder)
    return processor_for(config.processor, config.folder, config.raw)


@functools.cache
def model():
    return load(FAMILY.folder)


def sound(count: int) -> MediaItem:
    return MediaItem("audio", np.random.default_rng(count).normal(0, 0.1, count).astype(np.float32))


def picture(height: int, width: int) -> MediaItem:
    return MediaItem("image", noise(height, width, height))


def film(frames: int, num_samples: int = 0) -> MediaItem:
    """A film of 64 x 96 pixels with two frames a second and a sound of `num_samples` samples."""
    shown = np.stack([noise(64, 96, number) for number in range(frames)])
    return MediaItem("video", shown, seconds_per_frame=0.5, sound=sound(num_samples).data if num_samples else None)


PROMPTS = {
    "picture": (picture(64, 128),),
    "picture and sound": (picture(96, 64), sound(20000)),
    "film": (film(5),),
    "film with more sound": (film(4, 50000),),
    "film with less sound": (film(8, 20000),),
    "picture, sound, heard film, sound": (picture(64, 64), sound(9000), film(6, 40000), sound(33000)),
}


@functools.cache
def prepared(name: str):
    """The spliced prompt, and its processed items."""
    tokens, slots, processed = [5, 9], [], []
    for number, item in enumerate(PROMPTS[name]):
        opening, closing = (tiny.IDS[mark] for mark in MARKS[item.modality])
        tokens.append(opening)
        slots.append(len(tokens))
        tokens += [processor().placeholder(item.modality), closing, 20 + number]
        digest = hashlib.blake2b(repr((name, number)).encode(), digest_size=16).digest()
        processed.append(processor().process(item, digest, MediaOptions()))
    return splice([*tokens, 7, 8], slots, processed, processor()), processed


def oracle_inputs(name: str) -> dict[str, torch.Tensor]:
    """transformers' arguments for the same prompt."""
    made, processed = prepared(name)
    parts = [part for item in processed for part in item.parts]
    inputs = {"input_ids": torch.tensor(made.prompt_token_ids[None].astype(np.int64))}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    for kind, ending in (("image", ""), ("video", "_videos")):
        found = [part.features for part in parts if part.modality == kind]
        if found:
            inputs[f"pixel_values{ending}"] = torch.cat([torch.tensor(item["pixel_values"]) for item in found])
            inputs[f"{kind}_grid_thw"] = torch.cat([torch.tensor(item["grid_thw"]) for item in found])
            if kind == "video":
                seconds = [torch.tensor(item["second_per_grid"]) for item in found]
                inputs["video_second_per_grid"] = torch.cat(seconds)
    sounds = [torch.tensor(part.features["input_features"]) for part in parts if part.modality == "audio"]
    if sounds:
        longest = max(item.shape[1] for item in sounds)
        pad = torch.nn.functional.pad
        inputs["input_features"] = torch.stack([pad(item, (0, longest - item.shape[1])) for item in sounds])
        masks = [pad(torch.ones(item.shape[1], dtype=torch.long), (0, longest - item.shape[1])) for item in sounds]
        inputs["feature_attention_mask"] = torch.stack(masks)
    return inputs


def has_sound(name: str) -> bool:
    return any(item.sound is not None for item in PROMPTS[name])


@pytest.mark.parametrize("name", PROMPTS)
def test_positions_equal_transformers(name):
    inputs, (made, _) = oracle_inputs(name), prepared(name)
    mask = inputs.get("feature_attention_mask")
    axes, delta = FAMILY.oracle.get_rope_index(
        inputs["input_ids"],
        inputs.get("image_grid_thw"),
        inputs.get("video_grid_thw"),
        inputs["attention_mask"],
        has_sound(name),
        None if mask is None else mask.sum(-1),
        inputs.get("video_second_per_grid"),
    )
    assert np.array_equal(made.positions, axes[:, 0].numpy())
    assert made.position_delta == int(delta)


@pytest.mark.parametrize("chunk", [0, 13])
@pytest.mark.parametrize("name", PROMPTS)
@torch.inference_mode()
def test_logits_equal_transformers(name, chunk):
    made, processed = prepared(name)
    harness = Harness(model())
    media = []
    for item, part in zip(made.media, [part for whole in processed for part in whole.parts]):
        features = {key: torch.tensor(value) for key, value in part.features.items()}
        rows = harness.model.towers[part.modality].encode(features)
        assert rows.shape == (item.num_tokens, 96 * model().config.row_parts)
        done = 0
        for start, length in item.spans:
            media.append((start, rows[done : done + length]))
            done += length
    positions = torch.tensor(made.positions, dtype=torch.int64)
    row = harness.add(made.prompt_token_ids.tolist(), positions=positions, delta=made.position_delta, media=media)
    wanted = FAMILY.oracle(**oracle_inputs(name), use_audio_in_video=has_sound(name)).logits[0]
    assert (harness.prefill(row, chunk) - wanted).abs().max() <= TOLERANCE
