"""Kimi-VL against its makers' formulas (tests/models/kimi_vl.py): sizes, rows, tokens, over the wire."""

from __future__ import annotations

import functools
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

from engine.base.errors import ConfigError, RequestError
from engine.models.registry import build_model, load_model_config
from engine.weights.load import load_weights
from mm.errors import MediaError
from mm.item import MediaItem, MediaOptions
from server import cli
from tests import tiny
from tests.mm.made import data_url, noise, picture
from tests.models import kimi_vl as makers
from tests.models.harness import Harness
from tests.models.seeing import PROMPTS, answered, assert_logits_agree, load, processor, spliced
from tests.models.with_rows import embedded, greedy, logits
from tests.server.conftest import config_of, maker, ready

NAME = "kimi_vl"
TOLERANCE = 3e-4
MIXES = ("picture", "large picture", "two pictures")
SIZES = ((60, 90), (200, 170), (70, 98), (28, 28), (5, 7), (140, 20))


@functools.cache
def filled(height, width, seed):
    """The makers' picture: scaled if it has too many whole patches, and filled up with black, [3, height, width]."""
    image = Image.fromarray(noise(height, width, seed))
    count = (width // 14) * (height // 14)
    if count > makers.LIMIT:
        shrink = math.sqrt(makers.LIMIT / count)
        image = image.resize((int(width * shrink), int(height * shrink)), Image.Resampling.BICUBIC)
    found = torch.tensor(np.asarray(image, np.float32) / 255).permute(2, 0, 1)
    bottom, right = (-side % 28 for side in found.shape[1:])
    return torch.nn.functional.pad(found, (0, right, 0, bottom)) * 2 - 1


def processed(height, width, seed=0):
    scale = processor(NAME).plan_image(height, width, MediaOptions())
    return processor(NAME).process(
        MediaItem("image", scale.array(noise(height, width, seed))), bytes(16), MediaOptions()
    )


@functools.cache
def expected(prompt):
    """The prompt's embeddings with the rows of the formulas, [1, T, hidden]."""
    sizes = [(*size, 0)[:3] for _, *size in PROMPTS[prompt]]
    rows = torch.cat([makers.rows(tiny.checkpoint(NAME), filled(*size)) for size in sizes])
    return embedded(makers.decoder(), spliced(NAME, prompt)[0].prompt_token_ids.tolist(), tiny.IDS["<|IMAGE|>"], rows)


@pytest.mark.parametrize("size", SIZES)
def test_patches_and_rows_equal_the_formulas(size):
    part = processed(*size).parts[0]
    pixels = filled(*size, 0)
    wanted = torch.nn.functional.unfold(pixels[None], 14, stride=14)[0].T
    assert part.features["grid"].tolist() == [side // 14 for side in pixels.shape[1:]]
    assert np.abs(part.features["pixel_values"] - wanted.numpy()).max() < 1e-5
    features = {key: torch.tensor(value) for key, value in part.features.items()}
    with torch.inference_mode():
        found = load(tiny.checkpoint(NAME)).towers["image"].encode(features)
    want = makers.rows(tiny.checkpoint(NAME), pixels)
    assert len(found) == part.num_tokens
    assert (found - want).abs().max() < 1e-4


@pytest.mark.parametrize("chunk", [0, 7])
@pytest.mark.parametrize("prompt", MIXES)
def test_log_probabilities_equal_the_formulas(prompt, chunk):
    assert_logits_agree(NAME, prompt, chunk, logits(makers.decoder(), expected(prompt)), TOLERANCE)


@pytest.mark.parametrize("prompt", MIXES)
def test_greedy_tokens_equal_the_formulas(prompt):
    assert answered(NAME, prompt, 16) == greedy(makers.decoder(), expected(prompt), 16)


@torch.inference_mode()
def test_pictures_of_several_requests_share_a_run():
    tower = load(tiny.checkpoint(NAME)).towers["image"]
    parts = [processed(*size).parts[0] for size in SIZES]
    features = [{key: torch.tensor(value) for key, value in part.features.items()} for part in parts]
    for rows, own in zip(tower.encode_together(features), map(tower.encode, features)):
        assert (rows - own).abs().max() < 1e-5
    assert len(tower.encode(tower.example("image", 9))) == 9
    with pytest.raises(RequestError, match="do not fit the grid 3 x 8"):
        tower.encode({**features[0], "grid": torch.tensor([3, 8])})


def test_a_picture_with_too_many_patches_along_a_side_is_refused():
    assert processor(NAME).plan_image(14, 510 * 14, MediaOptions()).width < 510 * 14
    long = {**makers.FILES, "in_token_limit": 4096}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processor(NAME), "most", long["in_token_limit"])
        assert processor(NAME).plan_image(14, 510 * 14, MediaOptions()).width == 510 * 14
        with pytest.raises(MediaError, match="7154 x 14 pixels has more than 511 patches of 14 pixels along a side"):
            processor(NAME).plan_image(14, 511 * 14, MediaOptions())


async def test_pictures_are_seen_over_the_wire():
    url = {"url": data_url(picture(noise(60, 90, 1), "PNG"), "image/png")}
    content = [{"type": "image_url", "image_url": url}, {"type": "text", "text": "What is it?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    said = [{"role": "user", "content": "What is it?"}]
    async with ready(config_of(model={"model": str(tiny.checkpoint(NAME)), "num_threads": 1})) as state:
        client = maker(state)()
        seen = (await client.post("/v1/chat/completions", json=body)).json()
        text = (await client.post("/v1/chat/completions", json={**body, "messages": said})).json()
    assert seen["usage"]["prompt_tokens"] - text["usage"]["prompt_tokens"] == 2 + 3 * 4
    assert seen["choices"][0]["message"]["content"] != text["choices"][0]["message"]["content"]


def test_check_names_what_transformers_computes(capsys):
    """The decoder's implementation decides about threads, --deterministic and the cache's formats."""
    folder = str(tiny.checkpoint(NAME))
    assert load_model_config(folder).implementation == "transformers"
    flags = ["--load-format", "dummy", "--kv-cache-memory-bytes", "1000000"]
    assert cli.main(["check", folder, *flags]) == 0
    said = capsys.readouterr().out
    assert "its decoder through transformers, its encoders natively (KimiVLForConditionalGeneration)" in said
    assert "takes text, image" in said
    assert cli.main(["check", folder, *flags, "--language-model-only"]) == 0
    assert "takes text\n" in capsys.readouterr().out
    assert cli.main(["check", folder, *flags, "--model-impl", "native"]) == 1
    assert "the decoder of KimiVLForConditionalGeneration runs through transformers" in capsys.readouterr().out


@torch.inference_mode()
def test_its_decoder_alone_reads_text():
    model = build_model(load_model_config(tiny.checkpoint(NAME), without=("image", "video", "audio")), torch.float32)
    load_weights(model, str(tiny.checkpoint(NAME)))
    harness, tokens = Harness(model), [5, 9, 13, 40, 7]
    want = makers.decoder()(input_ids=torch.tensor([tokens])).logits[0]
    assert (harness.prefill(harness.add(tokens)) - want).abs().max() <= TOLERANCE


@pytest.mark.parametrize(
    ("section", "changes", "complaint"),
    [
        ("vision_config", {"merge_kernel_size": [2, 3]}, r"merge_kernel_size=\[2, 3\] two equal numbers"),
        ("vision_config", {"num_attention_heads": 5}, "hidden_size=72 over num_attention_heads=5"),
        ("text_config", {"model_type": "other"}, "model_type='other' is no decoder of transformers"),
        ("text_config", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, section, changes, complaint):
    config = {**makers.CONFIG, section: {**makers.CONFIG[section], **changes}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=complaint):
        load_model_config(tmp_path)
