"""ERNIE 4.5 VL: films as transformers reads them, sizes, the wire, and the device path.

tests/models/test_qwen_vl.py compares its tokens and logits with transformers.
"""

from __future__ import annotations

import asyncio
import functools
import io
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

import engine.run.start
from engine.base.errors import ConfigError, RequestError
from engine.models.registry import build_model, load_model_config
from engine.weights.load import weight_bytes
from mm.client_rows import ClientRows
from mm.decode.frames import FilmPlan
from mm.errors import MediaError
from mm.item import MediaItem, MediaOptions
from mm.limits import MediaLimits
from mm.processors.ernie_vl import ErnieVL, time_text
from mm.processors.given import given
from mm.splice import splice
from mm.transform.image import PatchSettings, Scale, patchify, smart_resize
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import answer, running, text_request
from tests.invariance.devices import Device
from tests.invariance.test_seeing import alone, request
from tests.mm.made import data_url, film, noise, picture
from tests.mm.reference import cut_out
from tests.models.seeing import load, processor, spliced
from tests.server.conftest import config_of, maker, ready

NAME = "ernie4_5_vl_moe"


@functools.cache
def of_films(name):
    """A method of transformers' processor of films, which cannot be imported without torchvision."""
    found = cut_out("models/ernie4_5_vl_moe/video_processing_ernie4_5_vl_moe.py", name)
    found.__globals__.update(
        ImageDraw=ImageDraw,
        ImageFont=ImageFont,
        to_pil_image=lambda frame: Image.fromarray(frame.permute(1, 2, 0).numpy()),
        pil_to_tensor=lambda image: torch.tensor(np.asarray(image)).permute(2, 0, 1),
    )
    return found


@pytest.mark.parametrize(("frames", "fps", "height", "width"), [(9, 3.0, 60, 90), (40, 12.5, 120, 64), (3, 1, 40, 40)])
def test_films_equal_transformers(frames, fps, height, width):
    """Chosen frames, and their times, drawn on each before it is scaled; the last is repeated to make pairs."""
    whole = np.stack([noise(height, width, seed) for seed in range(frames)])
    plan = processor(NAME).plan_film(frames, fps, height, width, MediaOptions(), MediaLimits())
    settings = SimpleNamespace(num_frames=None, font=str(tiny.checkpoint(NAME) / "tiny.ttf"))
    film = SimpleNamespace(total_num_frames=frames, fps=fps)
    chosen = of_films("sample_frames")(settings, film, min_frames=2, max_frames=16, fps=2.0)
    assert plan.indices.tolist() == chosen.tolist()
    assert plan.scale == Scale(height, width), "times are drawn at the film's own size"
    drawn = []
    for index in chosen.tolist():
        text = of_films("_convert_timestamp")(settings, index / fps)
        frame = torch.tensor(whole[index]).permute(2, 0, 1)
        drawn.append(of_films("_render_image_with_timestamp")(settings, frame, text).permute(1, 2, 0).numpy())
    assert (drawn[0] != whole[0]).any()
    drawn += [drawn[-1]] * (len(drawn) % 2)
    scale = Scale(*smart_resize(height, width, 28, 56**2, 112**2))
    patches, grid = patchify(np.stack([scale.array(each) for each in drawn]), PatchSettings(temporal_patch_size=1))
    item = MediaItem("video", whole[plan.indices], plan.seconds_per_frame, plan.seconds)
    (part,) = processor(NAME).process(item, bytes(16), MediaOptions()).parts
    assert part.features["grid_thw"].tolist() == [list(grid)]
    assert part.num_tokens == grid[0] // 2 * (grid[1] // 2) * (grid[2] // 2)
    assert np.abs(part.features["pixel_values"] - patches).max() < 1e-5


def test_pictures_equal_transformers():
    from transformers.models.ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe import Ernie4_5_VLMoeImageProcessorPil

    for height, width in ((60, 90), (200, 170)):
        want = Ernie4_5_VLMoeImageProcessorPil(size={"shortest_edge": 56**2, "longest_edge": 224**2})(
            noise(height, width, 3), return_tensors="np", input_data_format="channels_last"
        )
        scale = processor(NAME).plan_image(height, width, MediaOptions(max_pixels=224**2))
        features = processor(NAME).vision.still(scale.array(noise(height, width, 3)), None)[0]
        assert features["grid_thw"].tolist() == want["image_grid_thw"].tolist()
        assert np.abs(features["pixel_values"] - want["pixel_values"]).max() < 1e-5


def test_frames_of_a_film():
    """16 to 180 frames if neither the files nor the request give a number; the request's number counts first."""
    reader, limits = ErnieVL(tiny.checkpoint(NAME), {}), MediaLimits()
    reader.film_fps, reader.least_frames, reader.most_frames = None, 16, 180

    def count(frames, **options):
        return len(reader.plan_film(frames, 10.0, 60, 60, MediaOptions(**options), limits).indices)

    assert [count(frames) for frames in (5, 30, 400)] == [5, 30, 180]
    assert count(400, fps=1.0) == 40
    assert count(100, fps=0.1) == 16
    assert count(400, num_frames=7) == 7
    few = replace(limits, video_max_total_pixels=40_000)
    assert reader.plan_film(400, 10.0, 60, 60, MediaOptions(num_frames=98), few).scale == Scale(20, 20)
    assert time_text(3671.5) == "time: 01:01:11.50"


def test_positions_follow_the_largest():
    """A film with more pairs of frames than rows and columns: the time axis is the longest, and the answer follows."""
    made, _ = spliced(NAME, "film")
    assert made.position_delta == made.positions.max() + 1 - len(made.prompt_token_ids)
    frames = np.stack([noise(56, 56, number) for number in range(24)])
    plan = FilmPlan(np.arange(24), Scale(56, 56), 0.5, np.arange(24) / 2)
    done = processor(NAME).process(MediaItem("video", frames, 0.5, plan.seconds), bytes(16), MediaOptions())
    tall = splice([5, tiny.IDS["<|VIDEO|>"], 7], [1], [done], processor(NAME))
    assert tall.positions[0].max() == 12
    assert tall.position_delta == 13 - len(tall.prompt_token_ids)


def test_without_its_font_a_checkpoint_reads_no_films(tmp_path):
    for file in tiny.checkpoint(NAME).iterdir():
        if file.name != "tiny.ttf":
            (tmp_path / file.name).symlink_to(file)
    config = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(Exception, match=r"lacks tiny.ttf, the font of the times"):
        ErnieVL(tmp_path, config).plan_film(9, 3.0, 60, 60, MediaOptions(), MediaLimits())
    assert ErnieVL(tmp_path, config).plan_image(60, 60, MediaOptions()).pixels == 56 * 56
    font = ImageFont.truetype(io.BytesIO(processor(NAME).font), 12)
    assert font.getlength("time") > 0


def test_items_of_several_requests_share_a_run():
    tower = load(tiny.checkpoint(NAME)).towers["image"]
    parts = [item.parts[0] for item in spliced(NAME, "picture, film, picture")[1]]
    features = [{key: torch.tensor(value) for key, value in part.features.items()} for part in parts]
    with torch.inference_mode():
        for rows, own in zip(tower.encode_together(features), map(tower.encode, features)):
            assert (rows - own).abs().max() < 1e-5
        assert [len(tower.encode(tower.example(kind, 9))) for kind in ("image", "video")] == [9, 8]
    with pytest.raises(RequestError, match="the grid 3 x 2 x 2 must have 1 frame, or pairs of frames"):
        tower.encode({"pixel_values": torch.zeros(12, 588), "grid_thw": torch.tensor([[3, 2, 2]])})


def test_rows_of_a_film_come_with_the_grid_of_its_frames():
    """A client's rows in place of the tower's: a row stands for two frames."""
    made, processed = spliced(NAME, "film")
    (part,) = processed[0].parts
    rows = ClientRows(np.zeros((part.num_tokens, 96), np.float32), bytes(16))
    grid = part.features["grid_thw"]
    again = splice(
        [5, 9, 13, tiny.IDS["<|VIDEO|>"], 7], [3], [given(processor(NAME), "video", rows, grid)], processor(NAME)
    )
    start = made.prompt_token_ids.tolist().index(tiny.IDS["<|VIDEO|>"])
    own = made.positions[:, start : start + part.num_tokens]
    assert (again.positions[:, 3 : 3 + part.num_tokens] == own - own[0, 0] + 3).all()
    with pytest.raises(MediaError, match="a multiple of 2 and two multiples of 2"):
        given(processor(NAME), "video", rows, grid // (2, 1, 1))


async def test_on_the_device_path_answers_equal_the_cpus(monkeypatch):
    wanted = await asyncio.to_thread(alone, Device("cpu"), NAME)
    made = []
    monkeypatch.setattr(
        engine.run.start, "open_accelerator", lambda _device: made.append(HostAccelerator()) or made[-1]
    )
    few = {"max_num_seqs": 4, "max_num_queued_reqs": 4, "max_num_batched_tokens": 128, "encoder_cache_tokens": 256}
    async with running(tiny.checkpoint(NAME), **few) as served:
        texts = [answer(served, text_request(range(2, 9), 12))]
        got = await asyncio.gather(*[answer(served, request(NAME, mix)) for mix in wanted], *texts)
    assert [each[0] for each in got[:-1]] == [each.tokens for each in wanted.values()]
    assert made, "it was the device path"


async def test_pictures_and_films_are_seen_over_the_wire():
    parts = {
        "image_url": data_url(picture(noise(60, 90, 1), "PNG"), "image/png"),
        "video_url": data_url(film(np.stack([noise(60, 90, seed) for seed in range(8)]), 4), "video/mp4"),
    }
    body = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    async with ready(config_of(model={"model": str(tiny.checkpoint(NAME)), "num_threads": 1})) as state:
        client, seen = maker(state)(), []
        for kind, url in (("text", ""), *parts.items()):
            content = [{"type": kind, kind: {"url": url}}] if url else []
            content.append({"type": "text", "text": "What is it?"})
            sent = {**body, "messages": [{"role": "user", "content": content}]}
            seen.append((await client.post("/v1/chat/completions", json=sent)).json())
    text, still, moving = (each["usage"]["prompt_tokens"] for each in seen)
    assert still - text == 2 + 2 * 3
    assert moving > still
    assert len({each["choices"][0]["message"]["content"] for each in seen}) == 3


def test_the_published_model_is_planned(tmp_path):
    """The defaults of transformers' configuration are ERNIE-4.5-VL-28B-A3B's; its class counts the parameters."""
    from transformers import Ernie4_5_VLMoeConfig, Ernie4_5_VLMoeForConditionalGeneration

    config = Ernie4_5_VLMoeConfig()
    config.architectures = ["Ernie4_5_VLMoeForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    with tiny.quiet(), torch.device("meta"):
        model = Ernie4_5_VLMoeForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    count = sum(tensor.numel() for tensor in model.parameters())
    assert weight_bytes(build_model(load_model_config(tmp_path), torch.bfloat16)) == 2 * count == 2 * 29_399_294_336


@pytest.mark.parametrize(
    ("section", "changes", "complaint"),
    [
        ("vision_config", {"temporal_merge_size": 3}, "temporal_merge_size=3 and rms_norm_eps=1e-06; this tower is"),
        ("vision_config", {"num_heads": 5}, "hidden_size=72 over num_heads=5 must give heads of a multiple of 4"),
        ("text_config", {"moe_intermediate_size": [40]}, r"moe_intermediate_size=\[40\] must be two widths"),
        ("text_config", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types must say 'dense' or 'sparse' of each of 3"),
        ("text_config", {"use_bias": True}, "use_bias"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, section, changes, complaint):
    config = json.loads((tiny.checkpoint(NAME) / "config.json").read_text())
    config[section].update(changes)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=complaint):
        load_model_config(tmp_path)
