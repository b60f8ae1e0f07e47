"""MiniCPM-V 4.5 against its makers' formulas (tests/models/minicpmv.py): views, rows, tokens, over the wire."""

from __future__ import annotations

import dataclasses
import functools
import json

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer

from engine.base.errors import ConfigError, RequestError
from engine.models.registry import build_model, load_model_config
from engine.weights.load import weight_bytes
from mm.item import MediaItem, MediaOptions, Processed
from mm.limits import MediaLimits
from mm.processors.minicpmv import frames_of, moments
from mm.splice import numbered
from tests import tiny
from tests.mm.made import data_url, noise, picture
from tests.mm.made import film as encoded
from tests.models import minicpmv as makers
from tests.models import seeing
from tests.models.seeing import PROMPTS, answered, assert_logits_agree, encode, load, processor, spliced
from tests.models.with_rows import embedded, greedy, logits
from tests.server.conftest import config_of, maker, ready

NAME = "minicpmv"
TOLERANCE = 3e-4
MIXES = ("picture", "large picture", "two pictures", "picture, film, picture")
SIZES = ((60, 90), (200, 170), (40, 50), (30, 400), (90, 60), (57, 56), (500, 90), (14, 14))


def pixels(image):
    return torch.tensor(np.asarray(image, np.float32) / 255 * 2 - 1).permute(2, 0, 1)


@functools.cache
def rows_of(height, width, seed):
    """The rows of the formulas for a picture of this size."""
    views, _ = makers.views_of(Image.fromarray(noise(height, width, seed)))
    return torch.cat([makers.rows(tiny.checkpoint(NAME), pixels(view)) for view in views])


def film_of(frames, fps, height, width, wanted=3.0, options=None):
    """The rows of the formulas for a film whose frames are tests.models.seeing's."""
    chosen, moments = makers.sampled(frames, fps, wanted)
    size = makers.fitted(width, height, True)
    views = [Image.fromarray(noise(height, width, index)).resize(size, Image.Resampling.BICUBIC) for index in chosen]
    return makers.film_rows(tiny.checkpoint(NAME), torch.stack([pixels(view) for view in views]), moments)


@functools.cache
def expected(prompt):
    """The prompt's embeddings with the rows of the formulas, [1, T, hidden]."""
    made = [rows_of(*(*size, 0)[:3]) if read is seeing.picture else film_of(*size) for read, *size in PROMPTS[prompt]]
    rows = torch.cat(made)
    return embedded(makers.decoder(), spliced(NAME, prompt)[0].prompt_token_ids.tolist(), tiny.IDS["<|IMAGE|>"], rows)


def encode_back(ids):
    core = Tokenizer.from_file(str(tiny.checkpoint(NAME) / "tokenizer.json"))
    return core.decode([int(token) for token in ids])


def processed(height, width, seed=0):
    scale = processor(NAME).plan_image(height, width, MediaOptions())
    item = MediaItem("image", noise(height, width, seed), scale=scale)
    return processor(NAME).process(item, bytes(16), MediaOptions())


@pytest.mark.parametrize("size", SIZES)
def test_views_equal_the_makers_sizes_and_slices(size):
    part = processed(*size).parts[0]
    views, (columns, rows) = makers.views_of(Image.fromarray(noise(*size, 0)))
    wanted = [torch.nn.functional.unfold(pixels(view)[None], 14, stride=14)[0].T for view in views]
    assert part.features["slices"][:2].tolist() == [rows, columns]
    assert part.features["grid"].tolist() == [views[0].height // 14, views[0].width // 14]
    assert part.num_tokens == len(views) * makers.QUERIES
    assert np.abs(part.features["pixel_values"] - torch.cat(wanted).numpy()).max() < 1e-5


@pytest.mark.parametrize("size", SIZES)
def test_rows_equal_the_formulas(size):
    features = {key: torch.tensor(value) for key, value in processed(*size).parts[0].features.items()}
    with torch.inference_mode():
        found = load(tiny.checkpoint(NAME)).towers["image"].encode(features)
    assert (found - rows_of(*size, 0)).abs().max() < 1e-4


@pytest.mark.parametrize("chunk", [0, 7])
@pytest.mark.parametrize("prompt", MIXES)
def test_log_probabilities_equal_the_formulas(prompt, chunk):
    assert_logits_agree(NAME, prompt, chunk, logits(makers.decoder(), expected(prompt)), TOLERANCE)


@pytest.mark.parametrize("prompt", MIXES)
def test_greedy_tokens_equal_the_formulas(prompt):
    assert answered(NAME, prompt, 16) == greedy(makers.decoder(), expected(prompt), 16)


def film_read(frames, fps, height, width, options=MediaOptions()):  # noqa: B008 (a frozen value)
    """A film of noise as our processor reads it: (its plan, its part)."""
    plan = processor(NAME).plan_film(frames, fps, height, width, options, MediaLimits())
    data = np.stack([plan.scale.array(noise(height, width, int(index))) for index in plan.indices])
    item = MediaItem("video", data, plan.seconds_per_frame, plan.seconds)
    return plan, processor(NAME).process(item, bytes(16), options).parts[0]


@pytest.mark.parametrize(("frames", "fps"), [(40, 12.5), (9, 1.0), (100, 29.97), (3000, 25.0), (90_000, 30.0)])
def test_frames_and_moments_are_the_model_cards(frames, fps):
    chosen, groups = makers.sampled(frames, fps, 3.0)
    few = dataclasses.replace(MediaLimits(), video_max_frames=1000)
    plan = processor(NAME).plan_film(frames, fps, 60, 90, MediaOptions(), few)
    assert plan.indices.tolist() == chosen
    assert moments(plan.seconds, frames / fps).tolist() == [moment for group in groups for moment in group]
    assert frames_of(frames / fps, fps, MediaOptions()) == (len(chosen), len(groups[0]))


def test_a_request_chooses_frames():
    limits = MediaLimits()
    for options, count in ((MediaOptions(num_frames=7), 7), (MediaOptions(fps=0.5), 10), (MediaOptions(fps=1000), 256)):
        assert len(processor(NAME).plan_film(500, 25.0, 60, 90, options, limits).indices) == count
    assert len(processor(NAME).plan_film(3, 0.25, 60, 90, MediaOptions(), limits).indices) == 3
    assert frames_of(10.0, 25.0, MediaOptions(num_frames=400)) == (400, 3)


@torch.inference_mode()
def test_groups_of_frames_share_rows():
    """A film that needs groups: 5 frames a second of 40 seconds, two frames to a group."""
    options = MediaOptions(fps=5.0)
    plan, part = film_read(200, 5.0, 60, 90, options)
    _, groups = makers.sampled(200, 5.0, 5.0)
    assert [len(group) for group in groups] == [2] * 100
    assert (len(plan.indices), part.num_tokens) == (200, 100 * makers.QUERIES)
    features = {key: torch.tensor(value) for key, value in part.features.items()}
    few = {**features, "pixel_values": features["pixel_values"][: 5 * len(features["pixel_values"]) // 200]}
    few["moments"] = features["moments"][:5]
    found = load(tiny.checkpoint(NAME)).towers["video"].encode(few)
    size = makers.fitted(90, 60, True)
    views = [Image.fromarray(noise(60, 90, index)).resize(size, Image.Resampling.BICUBIC) for index in plan.indices[:5]]
    wanted = torch.stack([pixels(view) for view in views])
    assert (found - makers.film_rows(tiny.checkpoint(NAME), wanted, [*groups[:2], groups[2][:1]])).abs().max() < 1e-4
    filling = processor(NAME).fill(Processed("video", (part,)))
    said = encode_back(filling.token_ids[: 2 * (makers.QUERIES + 20)])
    assert said.startswith("<image>")
    assert "</image>\n<image>" in said
    assert "<image_id>" not in encode_back(filling.token_ids)
    assert [length for _, length in filling.runs[0]] == [makers.QUERIES] * 100


def test_slots_have_numbers_and_marks():
    """Pictures are numbered from 0, slices stand row by row, and rows are placeholders."""
    small, large = numbered([processed(40, 50), processed(120, 100)])
    mark, rows = tiny.IDS["<|IMAGE|>"], [tiny.IDS["<|IMAGE|>"]] * makers.QUERIES
    said = processor(NAME).fill(small).token_ids.tolist()
    assert said == [*encode("<image_id>0</image_id>"), *encode("<image>"), *rows, *encode("</image>")]
    filling, (count, columns) = processor(NAME).fill(large), large.parts[0].features["slices"][:2].tolist()
    line = [*encode("<slice>"), *rows, *encode("</slice>")] * columns
    lines = [token for number in range(count) for token in (encode("\n") if number else ()) + tuple(line)]
    head = [*encode("<image_id>1</image_id>"), *encode("<image>"), *rows, *encode("</image>")]
    assert count > 1
    assert filling.token_ids.tolist() == head + lines
    assert [length for _, length in filling.runs[0]] == [makers.QUERIES] * (1 + count * columns)
    assert all((filling.token_ids[first : first + length] == mark).all() for first, length in filling.runs[0])
    prompt = encode_back(spliced(NAME, "two pictures")[0].prompt_token_ids)
    assert [prompt.count(f"<image_id>{number}</image_id>") for number in range(3)] == [1, 1, 0]


@torch.inference_mode()
def test_pictures_of_several_requests_share_a_run():
    tower = load(tiny.checkpoint(NAME)).towers["image"]
    parts = [processed(*size).parts[0] for size in SIZES[:4]]
    features = [{key: torch.tensor(value) for key, value in part.features.items()} for part in parts]
    for rows, own in zip(tower.encode_together(features), map(tower.encode, features)):
        assert (rows - own).abs().max() < 1e-5
    for count in (3, 5, 17):
        for kind in ("image", "video"):
            assert len(tower.encode(tower.example(kind, count))) == max(5, count // 5 * 5)
    with pytest.raises(RequestError, match=r"do not fit views of \[\(1, 3, 8\)\]"):
        tower.encode({**features[2], "grid": torch.tensor([3, 8])})


async def test_pictures_and_films_are_seen_over_the_wire():
    """The published template takes content as text, in which the renderer writes the placeholders."""
    parts = {
        "image_url": data_url(picture(noise(60, 90, 1), "PNG"), "image/png"),
        "video_url": data_url(encoded(np.stack([noise(60, 90, seed) for seed in range(8)]), 4), "video/mp4"),
    }
    body = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    config = config_of(
        model={"model": str(tiny.checkpoint(NAME)), "num_threads": 1}, chat={"chat_template_content_format": "string"}
    )
    async with ready(config) as state:
        client, seen = maker(state)(), []
        for kind, url in (("text", ""), *parts.items()):
            content = [{"type": kind, kind: {"url": url}}] if url else []
            content.append({"type": "text", "text": "What is it?"})
            sent = {**body, "messages": [{"role": "user", "content": content}]}
            seen.append((await client.post("/v1/chat/completions", json=sent)).json())
    text, still, moving = (each["usage"]["prompt_tokens"] for each in seen)
    tags = [len(encode(f"<image>{mark}</image>")) for mark in ("", "\n")]
    around = 3  # the tiny tokenizer has marks around its placeholder, and a line ends behind an item
    assert still - text == len(processor(NAME).fill(processed(60, 90)).token_ids) + around
    assert moving - text == 6 * (makers.QUERIES + tags[0]) + 5 * (tags[1] - tags[0]) + around, "3 frames a second"
    assert len({each["choices"][0]["message"]["content"] for each in seen}) == 3


def test_the_published_model_is_planned(tmp_path):
    """openbmb/MiniCPM-V-4_5 has 8,695,895,280 parameters."""
    vision = {"hidden_size": 1152, "image_size": 980, "intermediate_size": 4304, "num_attention_heads": 16,
              "num_hidden_layers": 27}  # fmt: skip
    text = {"vocab_size": 151_748, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "query_num": 64}  # fmt: skip
    config = {**makers.CONFIG, **text, "vision_config": {**makers.VISION, **vision}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert weight_bytes(build_model(load_model_config(tmp_path), torch.bfloat16)) == 2 * 8_695_895_280


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"version": 2.6}, "version=2.6; this family is served in version 4.5"),
        ({"hidden_size": 200}, "hidden_size=200, drop_vision_last_layer=False; supported are multiples of 128"),
        ({"drop_vision_last_layer": True}, "drop_vision_last_layer=True"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, changes, complaint):
    (tmp_path / "config.json").write_text(json.dumps({**makers.CONFIG, **changes}))
    with pytest.raises(ConfigError, match=complaint):
        load_model_config(tmp_path)
