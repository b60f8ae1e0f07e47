"""MiniCPM-V 4.5 against its makers' formulas (tests/models/minicpmv.py): views, rows, tokens, over the wire."""

from __future__ import annotations

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
from mm.item import MediaItem, MediaOptions
from mm.splice import numbered
from tests import tiny
from tests.mm.made import data_url, noise, picture
from tests.models import minicpmv as makers
from tests.models.seeing import PROMPTS, answered, assert_logits_agree, encode, load, processor, spliced
from tests.models.with_rows import embedded, greedy, logits
from tests.server.conftest import config_of, maker, ready

NAME = "minicpmv"
TOLERANCE = 3e-4
MIXES = ("picture", "large picture", "two pictures")
SIZES = ((60, 90), (200, 170), (40, 50), (30, 400), (90, 60), (57, 56), (500, 90), (14, 14))


def pixels(image):
    return torch.tensor(np.asarray(image, np.float32) / 255 * 2 - 1).permute(2, 0, 1)


@functools.cache
def rows_of(height, width, seed):
    """The rows of the formulas for a picture of this size."""
    views, _ = makers.views_of(Image.fromarray(noise(height, width, seed)))
    return torch.cat([makers.rows(tiny.checkpoint(NAME), pixels(view)) for view in views])


@functools.cache
def expected(prompt):
    """The prompt's embeddings with the rows of the formulas, [1, T, hidden]."""
    sizes = [(*size, 0)[:3] for _, *size in PROMPTS[prompt]]
    rows = torch.cat([rows_of(*size) for size in sizes])
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
        assert len(tower.encode(tower.example("image", count))) == max(5, count // 5 * 5)
    with pytest.raises(RequestError, match=r"do not fit views of \[\(1, 3, 8\)\]"):
        tower.encode({**features[2], "grid": torch.tensor([3, 8])})


async def test_pictures_are_seen_over_the_wire():
    url = {"url": data_url(picture(noise(60, 90, 1), "PNG"), "image/png")}
    content = [{"type": "image_url", "image_url": url}, {"type": "text", "text": "What is it?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    said = [{"role": "user", "content": "What is it?"}]
    async with ready(config_of(model={"model": str(tiny.checkpoint(NAME)), "num_threads": 1})) as state:
        client = maker(state)()
        seen = (await client.post("/v1/chat/completions", json=body)).json()
        text = (await client.post("/v1/chat/completions", json={**body, "messages": said})).json()
        film = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
        refused = await client.post("/v1/chat/completions", json={**body, "messages": [{**said[0], "content": [film]}]})
    written = 2 + len(spliced(NAME, "picture")[0].prompt_token_ids) - len([5, 9, 13, 1, 2, 20, 7, 8])
    assert seen["usage"]["prompt_tokens"] - text["usage"]["prompt_tokens"] == written
    assert seen["choices"][0]["message"]["content"] != text["choices"][0]["message"]["content"]
    assert refused.status == 400
    assert "takes no video input" in refused.json()["error"]["message"]


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
