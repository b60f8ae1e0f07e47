"""ChatGLM and GLM-4V against their makers' formulas (tests/models/chatglm.py), alone and in a busy engine."""

from __future__ import annotations

import asyncio
import functools
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import engine.run.start
from engine.base.errors import ConfigError, RequestError
from engine.models.registry import build_model, load_model_config
from engine.weights.table import expand
from mm.item import MediaOptions
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import answer
from tests.invariance.devices import Answer, Device
from tests.invariance.test_seeing import TOKENS, request
from tests.mm.made import data_url, noise, picture
from tests.models import chatglm
from tests.models.harness import Harness
from tests.models.seeing import items, load, prepare, processor, spliced
from tests.models.test_decoders import prompt
from tests.models.test_families import PROMPTS, check_busy
from tests.models.test_families import TOKENS as MORE
from tests.quant.oracle import dequantised
from tests.quant.written import AWQ, BLOCKS, awq, floats8
from tests.server.conftest import config_of, maker, ready

NAME, TOLERANCE = "chatglm-vision", 1e-4
SIGHTS = ("picture", "two pictures", "three pictures")


@functools.cache
def oracle(name=NAME):
    return chatglm.Reference(tiny.checkpoint(name))


def rendered(sight):
    """The prompt with one token for each picture, and the pictures as scaled for the tower."""
    made, _ = spliced(NAME, sight)
    ids = made.prompt_token_ids.tolist()
    inside = {
        place for item in made.media for start, length in item.spans for place in range(start + 1, start + length)
    }
    return [token for place, token in enumerate(ids) if place not in inside], [item.data for item in items(NAME, sight)]


@pytest.mark.parametrize("changes", [{}, {"add_qkv_bias": False}, {"multi_query_group_num": 1, "rope_ratio": 500}])
def test_logits_of_a_text_are_those_of_the_makers_formulas(tmp_path, changes):
    folder, tokens = chatglm.checkpoint(tmp_path / "made", {**chatglm.TEXT, **changes}), prompt(40)
    harness, want = Harness(load(folder)), chatglm.Reference(folder).logits(tokens)
    for chunk in (0, 7):
        assert (harness.prefill(harness.add(tokens), chunk) - want).abs().max() <= TOLERANCE


@torch.inference_mode()
def test_positions_that_are_divided_are_another_kind_of_rope(tmp_path):
    """ChatGLM2-6B-32k divides positions; see engine/models/media/chatglm.py."""
    overrides = {"rope_ratio": 1, "rope_scaling": {"type": "linear", "factor": 4}}
    (tmp_path / "config.json").write_text(json.dumps({**chatglm.TEXT, **overrides}))
    rope = load_model_config(tmp_path).text.layers[0].rope
    assert (rope.kind, rope.factor, rope.theta, rope.rotary_dim) == ("linear", 4.0, 10_000.0, 12)


@pytest.mark.parametrize(("settings", "writer"), [(AWQ | {"group_size": 64}, awq(64)), (BLOCKS, floats8(per="block"))])
def test_quantised_products_are_arranged_too(tmp_path, settings, writer):
    """In a joined quantised matrix, rows of queries and keys are permuted from pairs to halves; rows of values stay."""
    sizes = {"hidden_size": 256, "ffn_hidden_size": 384, "kv_channels": 64}
    config = {**chatglm.TEXT, **sizes}
    plain = chatglm.checkpoint(tmp_path / "plain", config)
    coded = chatglm.checkpoint(tmp_path / "coded", {**config, "quantization_config": settings})
    held, draw = load_file(coded / "model.safetensors"), torch.Generator().manual_seed(5)
    del held["transformer.rotary_pos_emb.inv_freq"]
    for name in [name for name in held if ".layers." in name and "norm" not in name and "bias" not in name]:
        module, (rows, columns) = name.removesuffix(".weight"), held.pop(name).shape
        held |= {f"{module}.{kind}": tensor.contiguous() for kind, tensor in writer(draw, rows, columns).items()}
    save_file(held, coded / "model.safetensors")
    found = {name: torch.from_numpy(value).float().contiguous() for name, value in dequantised(coded).items()}
    save_file({**held, **found}, plain / "model.safetensors")
    harness, want = Harness(load(coded)), chatglm.Reference(plain).logits(prompt(20))
    assert (harness.prefill(harness.add(prompt(20))) - want).abs().max() <= 1e-3 * want.abs().max()


@pytest.mark.parametrize("chunk", [0, 7])
@pytest.mark.parametrize("sight", ["text", *SIGHTS])
def test_logits_behind_pictures_are_those_of_the_makers_formulas(sight, chunk):
    harness = Harness(load(tiny.checkpoint(NAME)))
    got = harness.prefill(prepare(NAME, sight, harness), chunk)
    assert (got - oracle().logits(*rendered(sight))).abs().max() <= TOLERANCE


@pytest.mark.parametrize("sight", SIGHTS)
def test_positions_are_those_of_the_makers(sight):
    made, _ = spliced(NAME, sight)
    _, want = oracle().inputs(*rendered(sight))
    assert (made.positions == want.numpy()).all()
    assert made.position_delta == int(want[-1]) + 1 - len(want)


@pytest.mark.parametrize("accelerated", [False, True])
async def test_tokens_of_a_busy_engine_are_those_of_the_formulas(monkeypatch, accelerated):
    """Tokens are equal in batches, in chunks, preempted, from the prefix cache, and in an accelerator's steps."""
    if accelerated:
        monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    device, folder = Device("cpu"), tiny.checkpoint("chatglm")
    await check_busy(folder, device, [Answer(oracle("chatglm").greedy(tokens, MORE)) for tokens in PROMPTS])
    wanted = {sight: Answer(oracle().greedy(*rendered(sight)[:1], TOKENS, rendered(sight)[1])) for sight in SIGHTS}
    settings = {"max_prefill_chunk": 7, "num_gpu_blocks_override": 7, "max_model_len": 64}
    async with device.running(tiny.checkpoint(NAME), **settings) as served:
        for turn in range(2):
            sent = [answer(served, request(NAME, sight)) for sight in wanted for _ in range(2)]
            got = [choices[0] for choices in await asyncio.gather(*sent)]
            device.check(got, [wanted[sight] for sight in wanted for _ in range(2)], f"turn {turn}")
        assert served.stats.preemptions > 0
        for sight in ("picture", "picture"):
            device.check(await answer(served, request(NAME, sight)), [wanted[sight]], sight)
        assert served.stats.prefix_hits > 0


def test_pictures_are_stretched_and_normalised_as_by_the_makers():
    """tokenization_chatglm.py has transforms.Resize of a Pillow image, ToTensor and Normalize."""
    reads, data = processor(NAME), noise(60, 90, 2)
    scaled = reads.plan_image(60, 90, MediaOptions(max_pixels=100)).array(data)
    square = np.asarray(Image.fromarray(data).resize((56, 56), Image.Resampling.BICUBIC))
    assert (scaled == square).all()
    part = items(NAME, "picture")[0]
    patches = reads.features(part, MediaOptions())[0]["pixel_values"]
    pixels = (part.data / 255 - chatglm.MEAN) / chatglm.STD
    want = pixels.reshape(4, 14, 4, 14, 3).transpose(0, 2, 4, 1, 3).reshape(16, -1)
    assert np.abs(patches - want).max() < 1e-5


@torch.inference_mode()
def test_pictures_of_several_requests_share_a_run():
    tower = load(tiny.checkpoint(NAME)).towers["image"]
    parts = [item.parts[0] for item in spliced(NAME, "three pictures")[1]]
    features = [{key: torch.tensor(value) for key, value in part.features.items()} for part in parts]
    for rows, own in zip(tower.encode_together(features), map(tower.encode, features)):
        assert (rows - own).abs().max() < 1e-5
    assert len(tower.encode(tower.example("image", 400))) == 6
    with pytest.raises(RequestError, match="one picture of 16 patches of 588 numbers"):
        tower.encode({"pixel_values": features[0]["pixel_values"][:8]})


async def test_pictures_are_seen_over_the_wire():
    url = {"url": data_url(picture(noise(60, 90, 1), "PNG"), "image/png")}
    parts = [{"type": "image_url", "image_url": url}, {"type": "text", "text": "What is it?"}]
    body = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    async with ready(config_of(model={"model": str(tiny.checkpoint(NAME)), "num_threads": 1})) as state:
        client, found = maker(state)(), []
        for content in (parts, "What is it?"):
            messages = [{"role": "user", "content": content}]
            found.append((await client.post("/v1/chat/completions", json={**body, "messages": messages})).json())
    seen, blind = found
    assert seen["usage"]["prompt_tokens"] - blind["usage"]["prompt_tokens"] == 6 + 2  # the template's text around it
    assert seen["choices"][0]["message"] != blind["choices"][0]["message"]


def test_published_widths_make_as_many_parameters_as_are_published(tmp_path):
    """https://github.com/zai-org/GLM-4/issues/500 has glm-4v-9b's counts: its layers, its tower's layers, and all."""
    (tmp_path / "config.json").write_text(json.dumps(chatglm.PUBLISHED))
    model = build_model(load_model_config(tmp_path), torch.bfloat16)
    sizes = {name: math.prod(place.wanted.shape) for name, place in expand(model.weight_table(), model).items()}
    wanted = {"encoder.layers.": 8_158_433_280, "vision.transformer.layers.": 4_279_387_392, "": 13_906_320_896}
    found = {prefix: sum(size for name, size in sizes.items() if name.startswith(prefix)) for prefix in wanted}
    assert found == wanted
    assert model.towers["image"].config.num_rows == 1602


@pytest.mark.parametrize("architecture", ["ChatGLMForConditionalGeneration", "GLM4VForCausalLM"])
def test_the_same_folder_has_several_names(tmp_path, architecture):
    (tmp_path / "config.json").write_text(json.dumps({**chatglm.SEEING, "architectures": [architecture]}))
    config = load_model_config(tmp_path)
    assert (config.processor, config.axes, config.max_position) == ("chatglm:ChatGLM", 3, 2048)
    blind = load_model_config(tmp_path, without=("image", "audio", "video"))
    assert (blind.processor, blind.towers, blind.left_out) == ("", {}, True)
    assert load_model_config(tiny.checkpoint("chatglm")).axes == 1


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"multi_query_attention": None}, "ChatGLM-6B .2023. is not supported"),
        ({"rmsnorm": False}, "rmsnorm=False of ChatGLMModel is not supported"),
        ({"pre_seq_len": 128}, "pre_seq_len=128"),
        ({"quantization_bit": 4}, "quantization_bit=4"),
        ({"rope_ratio": 0}, "rope_ratio=0.0 must be larger than 0"),
        ({"vision_config": {**chatglm.VISION, "num_positions": 16}}, "num_positions=16 one more than"),
        ({"vision_config": {**chatglm.VISION, "scaling_factor": None}}, "scaling_factor is missing"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, changes, complaint):
    (tmp_path / "config.json").write_text(json.dumps({**chatglm.SEEING, **changes}))
    with pytest.raises(ConfigError, match=complaint):
        load_model_config(tmp_path)
