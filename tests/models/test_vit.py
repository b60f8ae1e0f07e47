"""Models with a plain vision transformer against transformers: pictures from pixels through our processor."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.base.errors import ConfigError, RequestError
from engine.models.registry import build_model, load_model_config
from engine.weights.load import load_weights
from tests import tiny
from tests.models.harness import Harness
from tests.models.seeing import items, load, oracle, prepare, spliced

TOLERANCE = 1e-4
WIDER = 6 * TOLERANCE  # for PaliGemma: in transformers its float32 logits differ by so much from its float64 logits
NAMES = (
    "llava",
    "llava-siglip",
    "llava-pixtral",
    "mistral3",
    "internvl",
    "internvl-6b",
    "internvl-moe",
    "internvl-gpt_oss",
    "internvl-phi3",
    "gemma3-vision",
    "gemma4-vision",
    "gemma4-small-vision",
    "llama4-vision",
    "paligemma",
    "paligemma2",
    "idefics3",
    "smolvlm",
    "llava_next",
    "llava_onevision",
    "lfm2_vl",
)
PROMPTS = ("text", "picture", "large picture", "two pictures")
FILMS = ("internvl", "llava_onevision", "gemma4-vision", "gemma4-small-vision")


def pixels_of(features, patch):
    """Puts patches back in their places: [tiles, 3, height, width]."""
    height, width = features["grid"].tolist()
    patches = features["pixel_values"].reshape(-1, height, width, 3, patch, patch)
    return patches.transpose(0, 3, 1, 4, 2, 5).reshape(-1, 3, height * patch, width * patch)


def oracle_inputs(name, prompt):
    """transformers' arguments for the same prompt."""
    made, processed = spliced(name, prompt)
    ids = torch.tensor(made.prompt_token_ids, dtype=torch.long)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if name == "llava_onevision" and "film" in prompt:
        films = [pixels_of(item.parts[0].features, 14) for item in processed]
        return {**inputs, "pixel_values_videos": torch.tensor(np.stack(films))}
    if name == "lfm2_vl":
        return {**inputs, **(lfm2_inputs([part for item in processed for part in item.parts]) if processed else {})}
    if name.startswith("gemma4"):
        return {**inputs, **gemma4_inputs(ids, [item.parts[0] for item in processed])}
    pictures = [pixels_of(item.parts[0].features, 14) for item in processed]
    if pictures:
        height, width = (max(picture.shape[side] for picture in pictures) for side in (2, 3))
        padded = [
            np.pad(each, ((0, 0), (0, 0), (0, height - each.shape[2]), (0, width - each.shape[3]))) for each in pictures
        ]
        inputs["pixel_values"] = torch.tensor(np.concatenate(padded))
    if pictures and name in ("llava_next", "llava_onevision"):
        most = max(map(len, pictures))
        stacked = [np.pad(each, ((0, most - len(each)), (0, 0), (0, 0), (0, 0))) for each in pictures]
        inputs["pixel_values"] = torch.tensor(np.stack(stacked))
        inputs["image_sizes"] = torch.tensor([item.data.shape[:2] for item in items(name, prompt)])
    if pictures and name == "llava_onevision":
        inputs["batch_num_images"] = torch.tensor([len(pictures)])
    if pictures and name in ("idefics3", "smolvlm"):
        inputs["pixel_values"] = inputs["pixel_values"][None]
    if name == "gemma3-vision":
        inputs["token_type_ids"] = (ids == tiny.IDS["<|vision_pad|>"]).long()
    if name.startswith("paligemma"):
        inputs["token_type_ids"] = torch.zeros_like(ids)
    if pictures and name in ("mistral3", "llava-pixtral"):
        inputs["image_sizes"] = torch.tensor([picture.shape[2:] for picture in pictures])
    return inputs


def lfm2_inputs(parts):
    """Tiles and whole pictures of all pictures, each padded to the largest number of patches."""
    grids = [part.features["grid"] for part in parts for _ in range(frames_of(part))]
    shown = [tile for part in parts for tile in np.split(part.features["pixel_values"], frames_of(part))]
    most = max(map(len, shown))
    return {
        "pixel_values": torch.tensor(np.stack([np.pad(each, ((0, most - len(each)), (0, 0))) for each in shown])),
        "pixel_attention_mask": torch.tensor(np.stack([np.arange(most) < len(each) for each in shown])).int(),
        "spatial_shapes": torch.tensor(np.stack(grids)),
    }


def gemma4_inputs(ids, parts):
    """transformers' arguments by frame: patches with colours innermost, their (column, row), and padding at the end."""
    marks = {"image": tiny.IDS["<|IMAGE|>"], "video": tiny.IDS["<|VIDEO|>"]}
    inputs = {"mm_token_type_ids": (ids == marks["image"]).long() + 2 * (ids == marks["video"]).long()}
    for kind in {part.modality for part in parts}:
        shown = [(part, number) for part in parts if part.modality == kind for number in range(frames_of(part))]
        pixels, places = np.zeros((len(shown), 16 * 9, 588), np.float32), np.full((len(shown), 16 * 9, 2), -1)
        for line, (part, number) in enumerate(shown):
            height, width = part.features["grid"]
            count = height * width
            frame = part.features["pixel_values"][number * count : (number + 1) * count]
            patches = frame.reshape(count, 3, 14, 14).transpose(0, 2, 3, 1)
            pixels[line, :count] = patches.reshape(count, -1)
            places[line, :count] = np.stack([np.tile(np.arange(width), height), np.repeat(np.arange(height), width)], 1)
        names = (
            ("pixel_values", "image_position_ids") if kind == "image" else ("pixel_values_videos", "video_position_ids")
        )
        inputs |= dict(zip(names, (torch.tensor(pixels), torch.tensor(places))))
        if kind == "video":
            inputs["num_frames_per_video"] = torch.tensor([frames_of(part) for part in parts if part.modality == kind])
    return inputs


def frames_of(part):
    return len(part.features["pixel_values"]) // int(part.features["grid"].prod())


@pytest.mark.parametrize("chunk", [0, 7])
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_logits_equal_transformers(name, prompt, chunk):
    harness = Harness(load(tiny.checkpoint(name)))
    want = oracle(name)(**oracle_inputs(name, prompt)).logits[0]
    limit = WIDER if name.startswith("paligemma") else TOLERANCE
    assert (harness.prefill(prepare(name, prompt, harness), chunk) - want).abs().max() <= limit


@pytest.mark.parametrize("chunk", [0, 29])
@torch.inference_mode()
def test_crops_of_gemma_equal_transformers(chunk):
    made, _ = spliced("gemma3-vision", "cropped picture")
    assert [[length for _, length in item.spans] for item in made.media] == [[16, 16, 16], [16]]
    test_logits_equal_transformers("gemma3-vision", "cropped picture", chunk)


@pytest.mark.parametrize("name", FILMS)
@torch.inference_mode()
def test_films_equal_transformers(name):
    for prompt in ("film", "slow film"):
        test_logits_equal_transformers(name, prompt, 0)


@pytest.mark.parametrize(
    ("name", "prompt"),
    [*((name, "two pictures") for name in NAMES), ("internvl", "film"), ("gemma3-vision", "cropped picture")],
)
def test_greedy_tokens_equal_transformers(name, prompt):
    harness = Harness(load(tiny.checkpoint(name)))
    inputs = oracle_inputs(name, prompt)
    oracle(name).generation_config.eos_token_id = None
    out = oracle(name).generate(**inputs, max_new_tokens=16, do_sample=False)
    want = out[0, inputs["input_ids"].shape[1] :].tolist()
    assert harness.generate(prepare(name, prompt, harness), 16, chunk=13) == want


@pytest.mark.parametrize("name", ["llava", "mistral3", "internvl", "glm4v", "gemma4-vision"])
@torch.inference_mode()
def test_without_pictures_the_decoder_answers_alone(name):
    config = load_model_config(tiny.checkpoint(name), without=("image", "audio", "video"))
    assert config.modalities == ("text",)
    model = build_model(config, torch.float32)
    load_weights(model, config.folder)
    harness, whole = Harness(model), Harness(load(tiny.checkpoint(name)))
    assert torch.equal(harness.prefill(prepare(name, "text", harness)), whole.prefill(prepare(name, "text", whole)))


def test_names_of_older_files_are_read(tmp_path):
    """transformers 4 wrote vision_tower.vision_model and language_model.model; releases have model.vision_tower."""
    source = tiny.checkpoint("llava")
    tensors = load_file(source / "model.safetensors")
    renamed = {name.replace("vision_tower.", "vision_tower.vision_model."): tensor for name, tensor in tensors.items()}
    renamed["vision_tower.vision_model.embeddings.position_ids"] = torch.arange(17)[None]
    save_file(renamed, tmp_path / "model.safetensors")
    for file in ("config.json", "generation_config.json"):
        (tmp_path / file).write_text((source / file).read_text())
    model = build_model(load_model_config(tmp_path), torch.float32)
    load_weights(model, str(tmp_path))


def test_what_a_decoder_leaves_unsaid_is_that_of_its_class(tmp_path):
    """The text_config of llava-1.5-7b-hf has only the keys that differ from LlamaConfig's defaults."""
    config = json.loads((tiny.checkpoint("llava") / "config.json").read_text())
    said = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064}
    config["text_config"] = said
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = load_model_config(tmp_path).text
    assert (text.hidden_size, text.intermediate_size, text.num_kv_heads, len(text.layers)) == (4096, 11008, 32, 32)


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("llava", {"vision_feature_select_strategy": "full"}, "with clip_vision_model it is supported as 'default'"),
        ("llava", {"vision_feature_layer": -9}, "vision_feature_layer=-9 of a tower of 3 layers"),
        ("llava", {"vision_config": {"model_type": "dinov2"}}, "supported towers are clip_vision_model, siglip"),
        ("llava", {"text_config": {"model_type": "gpt_neox"}}, "model_type='gpt_neox' is not supported here"),
        ("internvl", {"downsample_ratio": 0.3}, "downsample_ratio=0.3 must be one over a whole number"),
        ("internvl", {"downsample_ratio": 1 / 3}, "4 patches along a side do not make blocks of 3"),
        ("internvl", {"vision_config": {"norm_type": "batch"}}, "norm_type='batch'.*'layer_norm' or 'rms_norm'"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, name, change, complaint):
    config = json.loads((tiny.checkpoint(name) / "config.json").read_text())
    for key, value in change.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=complaint):
        load_model_config(tmp_path)


def test_features_that_are_no_patches_of_tiles_are_refused():
    tower = load(tiny.checkpoint("llava")).vision
    for patches, grid in ((15, (4, 4)), (16, (2, 8)), (0, (4, 4))):
        with pytest.raises(RequestError, match=f"588 numbers a patch, tiles of {grid[0]} x {grid[1]} patches"):
            tower.encode({"pixel_values": torch.zeros(patches, 588), "grid": torch.tensor(grid)})


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_examples_are_as_large_as_they_say(name):
    """An example is at most as large as requested: 23 rows become 4 lines of 5 blocks, without the last 3 rows."""
    tower = load(tiny.checkpoint(name)).vision
    for rows in (16, 23, 30, 64):
        for modality in tower.modalities:
            made = len(tower.encode(tower.example(modality, rows)))
            assert rows * 0.5 < made <= rows
