"""HunyuanOCR against transformers, with the rotation by pairs of the makers' code (models/media/hunyuan_vl.py)."""

from __future__ import annotations

import asyncio
import functools
import json
import shutil
from types import MethodType

import numpy as np
import pytest
import torch

from engine.base.errors import ConfigError, RequestError
from engine.encoders.hunyuan_vl import taps_of
from engine.models.registry import build_model, load_model_config
from engine.weights.load import load_weights
from mm.item import MediaOptions
from mm.processors.hunyuan_vl import HunYuanVL
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import answer
from tests.invariance.devices import Device
from tests.invariance.test_seeing import alone, request
from tests.mm.made import data_url, noise, picture
from tests.models.harness import Harness
from tests.models.seeing import load, prepare, spliced
from tests.server.conftest import config_of, maker, ready

NAME = "hunyuan_vl"
SAID = [{"role": "user", "content": "What is it?"}]
TOLERANCE = 1e-4
PROMPTS = ("picture", "large picture", "two pictures", "three pictures")


def by_pairs(rotary, table):
    """The makers' apply_rotary_pos_emb_xdrope in transformers 4.57 (`xdrope_section * 2` repeats the list)."""
    table = torch.cat([table, table], dim=-1)
    sections = list(rotary.mrope_section)
    pieces = table.split(sections * 2, dim=-1)
    return torch.cat([piece[number % len(sections)] for number, piece in enumerate(pieces)], dim=-1)


@functools.cache
def oracle(name=NAME):
    model = tiny.reference(tiny.checkpoint(name))
    rotary = model.model.language_model.rotary_emb
    rotary.recomposition_frequencies = MethodType(by_pairs, rotary)
    return model


def oracle_inputs(prompt, name=NAME):
    """transformers' arguments for the same prompt."""
    made, processed = spliced(name, prompt)
    ids = torch.tensor(made.prompt_token_ids, dtype=torch.long)[None]
    features = [item.parts[0].features for item in processed]
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == tiny.IDS["<|IMAGE|>"]).int(),
        "pixel_values": torch.tensor(np.concatenate([each["pixel_values"] for each in features])),
        "image_grid_thw": torch.tensor(np.concatenate([each["grid_thw"] for each in features])),
    }


@pytest.mark.parametrize("chunk", [0, 7])
@pytest.mark.parametrize("prompt", PROMPTS)
@torch.inference_mode()
def test_logits_equal_transformers(prompt, chunk):
    harness = Harness(load(tiny.checkpoint(NAME)))
    want = oracle()(**oracle_inputs(prompt)).logits[0]
    assert (harness.prefill(prepare(NAME, prompt, harness), chunk) - want).abs().max() <= TOLERANCE


@torch.inference_mode()
def test_positions_have_three_rows_where_there_are_three_sections():
    name, prompt = "hunyuan_vl-three", "two pictures"
    harness = Harness(load(tiny.checkpoint(name)))
    row = prepare(name, prompt, harness)
    assert len(row.positions) == 3
    want = oracle(name)(**oracle_inputs(prompt, name)).logits[0]
    assert (harness.prefill(row, 7) - want).abs().max() <= TOLERANCE


@torch.inference_mode()
def test_a_text_is_read_as_by_transformers_untouched():
    harness = Harness(load(tiny.checkpoint(NAME)))
    row = prepare(NAME, "text", harness)
    want = tiny.reference(tiny.checkpoint(NAME))(input_ids=torch.tensor([row.tokens])).logits[0]
    assert (harness.prefill(row) - want).abs().max() <= TOLERANCE


@pytest.mark.parametrize("prompt", ["picture", "three pictures"])
def test_greedy_tokens_equal_transformers(prompt):
    harness, inputs = Harness(load(tiny.checkpoint(NAME))), oracle_inputs(prompt)
    oracle().generation_config.eos_token_id = None
    out = oracle().generate(**inputs, max_new_tokens=16, do_sample=False)
    want = out[0, inputs["input_ids"].shape[1] :].tolist()
    assert harness.generate(prepare(NAME, prompt, harness), 16, chunk=13) == want


@pytest.mark.parametrize("prompt", PROMPTS)
def test_positions_are_those_of_transformers(prompt):
    made, _ = spliced(NAME, prompt)
    inputs = oracle_inputs(prompt)
    wanted = ("input_ids", "attention_mask", "mm_token_type_ids", "image_grid_thw")
    rows, delta = oracle().model.get_rope_index(**{name: inputs[name] for name in wanted})
    assert np.array_equal(made.positions, rows[:, 0])
    assert made.position_delta == int(delta) == 0


@torch.inference_mode()
def test_its_decoder_runs_through_transformers_too():
    """transformers' decoder has four axes of positions too; the rotation is transformers' own."""
    folder = tiny.checkpoint(NAME)
    config = load_model_config(folder, implementation="transformers")
    assert config.axes == 4
    model = build_model(config, torch.float32)
    load_weights(model, config.folder)
    row, harness = prepare(NAME, "two pictures", Harness(load(folder))), Harness(model)
    want = tiny.reference(folder)(**oracle_inputs("two pictures")).logits[0]
    got = harness.prefill(harness.add(row.tokens, positions=row.positions, media=row.media), 7)
    assert (got - want).abs().max() <= TOLERANCE


@torch.inference_mode()
def test_pictures_of_several_requests_share_a_run():
    tower = load(tiny.checkpoint(NAME)).towers["image"]
    parts = [item.parts[0] for item in spliced(NAME, "three pictures")[1]]
    features = [{key: torch.tensor(value) for key, value in part.features.items()} for part in parts]
    for rows, own in zip(tower.encode_together(features), map(tower.encode, features)):
        assert (rows - own).abs().max() < 1e-5
    for grid in ([1, 3, 8], [1, 2, 20_000]):
        with pytest.raises(RequestError, match="with sides of multiples of 2 and at most 16384 patches"):
            tower.encode({**features[0], "grid_thw": torch.tensor([grid])})


@pytest.mark.parametrize("grid", [(2, 3), (7, 7), (5, 12)])
def test_positions_are_interpolated_as_by_torch(grid):
    table = torch.randn(49, 6)
    want = torch.nn.functional.interpolate(table.T.view(1, 6, 7, 7), size=grid, mode="bilinear", align_corners=False)
    places, shares = taps_of(grid, 7)
    assert ((table[places] * shares[..., None]).sum(1) - want[0].flatten(1).T).abs().max() < 1e-5


@pytest.mark.parametrize("rows", [4, 9, 300])
def test_an_example_has_at_most_so_many_rows(rows):
    tower = load(tiny.checkpoint(NAME)).towers["image"]
    assert rows // 2 < len(tower.encode(tower.example("image", rows))) <= rows


@pytest.mark.parametrize("settings", [{"max_prefill_chunk": 7}, {"num_gpu_blocks_override": 36, "max_model_len": 540}])
async def test_so_do_tokens_of_an_accelerators_steps(settings, monkeypatch):
    """Tokens of an accelerator's steps on CPU tensors: in batches, in chunks, preempted, from the prefix cache."""
    device = Device("cpu")
    wanted = await asyncio.to_thread(alone, device, NAME)
    monkeypatch.setattr("engine.run.start.open_accelerator", lambda _device: HostAccelerator())
    async with device.running(tiny.checkpoint(NAME), encoder_cache_tokens=256, **settings) as engine:
        for turn in range(2):
            sent = [answer(engine, request(NAME, mix)) for mix in wanted for _ in range(2)]
            got = [choices[0] for choices in await asyncio.gather(*sent)]
            device.check(got, [wanted[mix] for mix in wanted for _ in range(2)], f"turn {turn}")
        assert engine.stats.prefix_hits > 0


async def test_pictures_are_seen_over_the_wire():
    """A prompt has as many tokens as transformers' processor writes; beams continue its positions."""
    url = {"url": data_url(picture(noise(60, 90, 1), "PNG"), "image/png")}
    content = [{"type": "image_url", "image_url": url}, {"type": "text", "text": "What is it?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    async with ready(config_of(model={"model": str(tiny.checkpoint(NAME)), "num_threads": 1})) as state:
        client = maker(state)()
        plain = (await client.post("/v1/chat/completions", json=body)).json()
        beam = (await client.post("/v1/chat/completions", json={**body, "use_beam_search": True, "n": 1})).json()
        text = (await client.post("/v1/chat/completions", json={**body, "messages": SAID})).json()
    assert plain["usage"]["prompt_tokens"] - text["usage"]["prompt_tokens"] == 2 + 2 * (3 + 1) + 2
    assert plain["choices"][0]["message"]["content"] == beam["choices"][0]["message"]["content"]


def test_the_largest_example_is_the_largest_picture():
    tower = load(tiny.checkpoint(NAME)).towers["image"]
    assert tower.example("image", 100_000)["grid_thw"].tolist() == [[1, 128, 128]]


def test_pictures_are_scaled_to_what_the_tower_takes(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text('{"min_pixels": 784, "max_pixels": 4000000}')
    config = json.loads((tiny.checkpoint(NAME) / "config.json").read_text())
    config["vision_config"]["max_vit_seq_len"] = 100
    scale = HunYuanVL(tmp_path, config).plan_image(900, 500, MediaOptions())
    assert scale.pixels <= 100 * 14**2


def rewritten(folder, change):
    """The configuration as released, with the decoder's keys at the top level, after `change` has changed it."""
    source = tiny.checkpoint(NAME)
    config = json.loads((source / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    scaling = {"type": "xdrope", "factor": 1.0, "alpha": rope["alpha"], "xdrope_section": rope["mrope_section"]}
    text["attention_head_dim"] = text.pop("head_dim")
    config = {**text, **config, "rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(source / "model.safetensors", folder)
    return folder


@torch.inference_mode()
def test_a_released_configuration_means_the_same(tmp_path):
    ours, same = (Harness(load(each)) for each in (rewritten(tmp_path, lambda _: None), tiny.checkpoint(NAME)))
    assert ours.model.config.text == same.model.config.text
    assert torch.equal(ours.prefill(prepare(NAME, "picture", ours)), same.prefill(prepare(NAME, "picture", same)))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda config: config["rope_scaling"].pop("xdrope_section"), "xdrope_section. is missing"),
        (
            lambda config: config["rope_scaling"].update(xdrope_section=[5, 5]),
            r"must be 3 or 4 numbers that add up to 10",
        ),
        (lambda config: config["vision_config"].update(interpolate_mode="bicubic"), "interpolate_mode='bicubic'"),
        (lambda config: config["vision_config"].update(num_attention_heads=7), "must be a multiple of"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, change, complaint):
    with pytest.raises(ConfigError, match=complaint):
        load_model_config(rewritten(tmp_path, change))
