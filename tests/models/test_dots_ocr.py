"""dots.ocr against its makers' formulas (tests/models/dots_ocr.py): patches, rows, tokens, over the wire."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import torch
from PIL import Image

from engine.base.errors import ConfigError, RequestError
from engine.models.registry import build_model, load_model_config
from engine.weights.load import weight_bytes
from mm.item import MediaOptions
from tests import tiny
from tests.mm.made import data_url, noise, picture
from tests.models import dots_ocr as makers
from tests.models.seeing import answered, assert_logits_agree, items, load, processor, spliced
from tests.models.with_rows import embedded, greedy, logits
from tests.server.conftest import config_of, maker, ready

NAME = "dots_ocr"
TOLERANCE = 2e-4
PROMPTS = ("picture", "large picture", "two pictures")


@functools.cache
def expected(prompt):
    """The prompt's embeddings with the rows of the formulas, [1, T, hidden]."""
    made, processed = spliced(NAME, prompt)
    rows = []
    for item in processed:
        features = item.parts[0].features
        _, height, width = features["grid_thw"][0].tolist()
        rows.append(makers.rows(tiny.checkpoint(NAME), torch.tensor(features["pixel_values"]), (height, width)))
    return embedded(makers.decoder(), made.prompt_token_ids.tolist(), tiny.IDS["<|IMAGE|>"], torch.cat(rows))


@pytest.mark.parametrize("chunk", [0, 7])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_log_probabilities_equal_the_formulas(prompt, chunk):
    assert_logits_agree(NAME, prompt, chunk, logits(makers.decoder(), expected(prompt)), TOLERANCE)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_equal_the_formulas(prompt):
    assert answered(NAME, prompt, 16) == greedy(makers.decoder(), expected(prompt), 16)


def test_patches_equal_transformers():
    """The checkpoint's files name Qwen2-VL's picture processor; positions count tokens."""
    from transformers import Qwen2VLImageProcessorPil

    same = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
    size = {"shortest_edge": makers.FILES["min_pixels"], "longest_edge": makers.FILES["max_pixels"]}
    reference = Qwen2VLImageProcessorPil(**{key: makers.FILES[key] for key in same}, size=size)
    for height, width in ((60, 90), (200, 170), (20, 30)):
        want = reference(Image.fromarray(noise(height, width, 3)), return_tensors="np")
        scale = processor(NAME).plan_image(height, width, MediaOptions())
        features = processor(NAME).vision.still(scale.array(noise(height, width, 3)), None)[0]
        assert features["grid_thw"].tolist() == want["image_grid_thw"].tolist()
        assert np.abs(features["pixel_values"] - want["pixel_values"]).max() < 1e-5
    assert spliced(NAME, "two pictures")[0].positions is None


def test_pictures_of_several_requests_share_a_run():
    tower = load(tiny.checkpoint(NAME)).towers["image"]
    parts = [item.parts[0] for item in spliced(NAME, "two pictures")[1]]
    features = [{key: torch.tensor(value) for key, value in part.features.items()} for part in parts]
    with torch.inference_mode():
        for rows, own in zip(tower.encode_together(features), map(tower.encode, features)):
            assert (rows - own).abs().max() < 1e-5
        assert len(tower.encode(tower.example("image", 9))) == 9
    with pytest.raises(RequestError, match="do not fit the grid 1 x 3 x 8"):
        tower.encode({**features[0], "grid_thw": torch.tensor([[1, 3, 8]])})
    assert len(items(NAME, "two pictures")) == 2


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
    assert seen["usage"]["prompt_tokens"] - text["usage"]["prompt_tokens"] == 2 + 2 * 3
    assert seen["choices"][0]["message"]["content"] != text["choices"][0]["message"]["content"]
    assert refused.status == 400
    assert "video" in refused.json()["error"]["message"]


def test_the_published_model_is_planned(tmp_path):
    """rednote-hilab/dots.ocr has 3,039,179,264 parameters; widths are those of its config.json."""
    vision = {"embed_dim": 1536, "hidden_size": 1536, "intermediate_size": 4224, "num_hidden_layers": 42,
              "num_attention_heads": 12}  # fmt: skip
    text = {"vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
            "num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 131_072}  # fmt: skip
    config = {**makers.CONFIG, **text, "vision_config": {**makers.VISION, **vision}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert weight_bytes(build_model(load_model_config(tmp_path), torch.bfloat16)) == 2 * 3_039_179_264


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"use_bias": True}, "use_bias=True; this tower is supported with False"),
        ({"temporal_patch_size": 2}, "temporal_patch_size=2; this tower is supported with 1"),
        ({"num_attention_heads": 5}, "embed_dim=72 over num_attention_heads=5"),
        ({"hidden_size": 64}, "makes rows of 64 numbers; the decoder's hidden_size=96 is needed"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, changes, complaint):
    config = {**makers.CONFIG, "vision_config": {**makers.VISION, **changes}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=complaint):
        load_model_config(tmp_path)
