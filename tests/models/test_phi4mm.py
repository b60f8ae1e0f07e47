"""Phi-4-multimodal's pictures against transformers: tiles, counts, rows; tokens of mixed batches in both layouts."""

from __future__ import annotations
import __future__

import ast
import asyncio
import copy
import functools
import importlib.util
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import engine.run.start
from engine.base.errors import ConfigError, RequestError
from engine.base.request import Request, SamplingParams
from engine.models.registry import load_model_config
from mm.errors import MediaError
from mm.item import MediaItem, MediaOptions, Processed
from mm.processors.phi4mm_pictures import Pictures
from mm.splice import splice
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import answer, running
from tests.models.harness import load
from tests.models.test_adapters import base_oracle
from tests.models.test_sounds import FAMILY, processed, processor, theirs
from tests.tiny_hearing import cached_checkpoint
from tests.tiny_sounds import AUDIO, PHI4_ALPHA, PHI4_RANK

PHI4 = FAMILY["phi4mm"]
IMAGE, TOKENS = tiny.IDS["<|IMAGE|>"], 16
TALL, SMALL, TWO = (448, 40), (100, 160), (200, 500)  # (height, width): part of a tile, one tile, two
# (sizes of pictures, numbers of samples of sounds) of each prompt.
PROMPTS = (((), ()), ((SMALL,), ()), ((), (20000,)), ((TALL,), (1500,)), ((TWO, SMALL), ()))
PLAIN = MediaOptions()


def pixels(size: tuple[int, int]) -> np.ndarray:
    """A smooth picture with distinct values everywhere."""
    draw = np.random.default_rng(size[0] * 10007 + size[1])
    coarse = torch.tensor(draw.uniform(0, 255, (1, 3, 7, 9)))
    return torch.nn.functional.interpolate(coarse, size=size, mode="bilinear")[0].permute(1, 2, 0).byte().numpy()


@functools.cache
def picture(size: tuple[int, int]) -> Processed:
    made = processor(PHI4)
    item = MediaItem("image", pixels(size), scale=made.plan_image(*size, PLAIN))
    return made.process(item, repr(size).encode().ljust(16, b"-")[:16], PLAIN)


@functools.cache
def published(size: tuple[int, int]):
    """transformers' processor, run by its methods; its file imports torchvision and calls two functions of it."""
    root = Path(importlib.util.find_spec("transformers").origin).parent
    path = root / "models/phi4_multimodal/image_processing_phi4_multimodal.py"
    names = {"math": math, "torch": torch, "tvF": Functions, "BatchFeature": lambda data, tensor_type: data}
    (kind,) = (
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and "Kwargs" not in node.name
    )
    methods = [
        node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name not in ("__init__", "preprocess")
    ]
    lazy = __future__.annotations.compiler_flag
    exec(compile(ast.Module(methods, []), str(path), "exec", lazy), names)
    own = type("Own", (Functions,), {node.name: names[node.name] for node in methods})()
    settings = {"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
    settings |= {"image_mean": 0.5, "image_std": 0.5, "patch_size": 14, "dynamic_hd": 36, "return_tensors": "pt"}
    return own._preprocess(
        [torch.tensor(pixels(size)).permute(2, 0, 1)],
        size=SimpleNamespace(height=448, width=448),
        resample=3,
        **settings,
    )


class Functions:
    """Stand-ins for torchvision's functions and for those of the processor's base class."""

    @staticmethod
    def resize(image: torch.Tensor, size, resample: int = 2, antialias: bool = True) -> torch.Tensor:
        height, width = size if isinstance(size, list) else (size.height, size.width)
        mode = {2: "bilinear", 3: "bicubic"}[resample]
        return torch.nn.functional.interpolate(image[None], (height, width), mode=mode, antialias=antialias)[0]

    @staticmethod
    def pad(image: torch.Tensor, padding: list[int], fill: list[int]) -> torch.Tensor:
        left, top, right, bottom = padding
        return torch.nn.functional.pad(image, (left, right, top, bottom), value=fill[0])

    @staticmethod
    def rescale_and_normalize(image, do_rescale, factor, do_normalize, mean, std) -> torch.Tensor:
        return (image.float() * factor - mean) / std


def request(prompt: tuple) -> Request:
    """A request with text between the media."""
    pictures, sounds = prompt
    media = [(IMAGE, picture(size)) for size in pictures]
    media += [(AUDIO, processed(PHI4, count)) for count in sounds]
    ids, slots = [5, 9, 33, 8], []
    for token, _ in media:
        slots.append(len(ids))
        ids += [token, 40, 7]
    made = splice(ids, slots, [item for _, item in media], processor(PHI4))
    return Request(made.prompt_token_ids, SamplingParams(TOKENS, 0.0, ignore_eos=True), media=made.media)


@functools.cache
def seeing_oracle():
    """transformers' model with the vision adapter merged into its matrices."""
    stored, model = load_file(PHI4.folder / "model.safetensors"), copy.deepcopy(base_oracle(PHI4))
    for name, parameter in model.named_parameters():
        module = name.removesuffix(".weight")
        if (a := stored.get(f"{module}.lora_A.vision.weight")) is not None:
            parameter.data += PHI4_ALPHA / PHI4_RANK * stored[f"{module}.lora_B.vision.weight"] @ a
    return model


@functools.cache
def wanted(prompt: tuple) -> list[int]:
    """Greedy tokens of transformers, with inputs from its own processors."""
    pictures, sounds = prompt
    model = seeing_oracle() if pictures else PHI4.oracle if sounds else base_oracle(PHI4)
    ids = request(prompt).prompt_token_ids
    inputs = {}
    if pictures:
        made = [published(size) for size in pictures]
        most = max(one["image_pixel_values"].shape[1] for one in made)
        for key, fill in (("image_pixel_values", 0), ("image_attention_mask", 1)):
            parts = [one[key] for one in made]
            pads = [part.new_full((1, most - part.shape[1], *part.shape[2:]), fill) for part in parts]
            inputs[key] = torch.cat([torch.cat(pair, 1) for pair in zip(parts, pads)])
        inputs["image_sizes"] = torch.cat([one["image_sizes"] for one in made])
    if sounds:
        (count,) = sounds
        features, rows = theirs(PHI4, count)
        inputs |= {"audio_input_features": features["input_features"], "audio_embed_sizes": torch.tensor([rows])}
    with torch.inference_mode():
        made = model.generate(
            input_ids=torch.tensor(ids.astype(np.int64))[None], **inputs, max_new_tokens=TOKENS, min_new_tokens=TOKENS,
            do_sample=False, eos_token_id=None,
        )  # fmt: skip
    return made[0, -TOKENS:].tolist()


@pytest.mark.parametrize(
    "size", [SMALL, TALL, TWO, (448, 448), (449, 448), (700, 1000), (3000, 300), (2500, 2900)], ids=str
)
def test_tiles_and_counts_are_the_published_processors(size):
    part, want = picture(size).parts[0], published(size)
    assert part.num_tokens == int(want["num_img_tokens"][0]) == len(part.features["places"])
    tiles = want["image_pixel_values"][0].unfold(2, 14, 14).unfold(3, 14, 14)  # [tiles, 3, 32, 32, 14, 14]
    tiles = tiles.permute(0, 2, 3, 1, 4, 5).reshape(-1, 3 * 14 * 14).numpy()
    mine = part.features["pixel_values"]
    assert mine.shape == tiles.shape
    assert np.abs(mine - tiles)[1024:].max() < 2.01 / 255, "pixels are spread over -1 to 1"
    assert np.abs(mine - tiles)[:1024].max() < 2 * 2.01 / 255, "a cubic filter widens what the linear one rounds"
    shown = want["image_attention_mask"][0].bool()
    sides = torch.stack([shown[:, :, 0].sum(1), shown[:, 0].sum(1)], dim=1)
    assert part.features["extents"].tolist() == sides.tolist()


def test_a_request_may_lower_the_number_of_tiles():
    pictures = Pictures({}, {})
    whole = pictures.plan(2500, 2900, PLAIN)
    assert (whole.rows, whole.columns) == (5, 6)
    small = pictures.plan(2500, 2900, MediaOptions(max_pixels=4 * 448**2))
    assert (small.rows, small.columns) == (2, 2)
    assert pictures.plan(2500, 2900, MediaOptions(max_pixels=7)).rows == 1
    with pytest.raises(MediaError, match=r"is 9000x20; scaled for this model it would be 1792x3, and sides of 10"):
        Pictures({"dynamic_hd": 4}, {}).plan(20, 9000, PLAIN)


def test_rows_are_the_published_models():
    tower, theirs = load(PHI4.folder).towers["image"], PHI4.oracle.model.embed_tokens_extend.image_embed
    sizes = SMALL, TALL, TWO, (700, 1000)
    given = [{key: torch.tensor(array) for key, array in picture(size).parts[0].features.items()} for size in sizes]
    with torch.inference_mode():
        together = tower.encode_together(given)
        for size, features, shared in zip(sizes, given, together):
            rows, made = tower.encode(features), published(size)
            assert torch.equal(shared, rows)
            assert shared.untyped_storage().nbytes() == shared.nbytes
            ids = torch.full((1, len(rows)), IMAGE)
            want = theirs(
                ids,
                torch.zeros(1, len(rows), rows.shape[1]),
                made["image_pixel_values"],
                made["image_sizes"],
                made["image_attention_mask"],
            )[0]
            assert (rows - want).abs().max() < 2e-2 * want.abs().max(), "pixels differ by a rounding"
            exact = {**features, "pixel_values": as_patches(made["image_pixel_values"][0])}
            assert (tower.encode(exact) - want).abs().max() < 2e-4 * want.abs().max()


def as_patches(tiles: torch.Tensor) -> torch.Tensor:
    return tiles.unfold(2, 14, 14).unfold(3, 14, 14).permute(0, 2, 3, 1, 4, 5).reshape(-1, 3 * 14 * 14)


@pytest.mark.parametrize("rows", [3, 40, 300, 700])
def test_the_examples_of_the_start_have_at_most_as_many_rows(rows):
    tower = load(PHI4.folder).towers["image"]
    with torch.inference_mode():
        assert 1 <= len(tower.encode(tower.example("image", rows))) <= rows


def test_features_that_contradict_each_other_are_refused():
    tower = load(PHI4.folder).towers["image"]
    features = tower.example("image", 300)
    for wrong in ({"pixel_values": features["pixel_values"][1:]}, {"places": torch.tensor([9999])}):
        with pytest.raises(RequestError, match="1024 patches of 588 numbers for each tile, and places up to 257"):
            tower.encode({**features, **wrong})


async def check(folder, asked=PROMPTS, **settings):
    """All prompts at once, twice: texts, pictures, sounds, and pictures with sounds in the same steps."""
    async with running(folder, encoder_cache_tokens=2048, **settings) as engine:
        for turn in range(2):
            found = await asyncio.gather(*(answer(engine, request(prompt)) for prompt in asked))
            for prompt, (got,) in zip(asked, found):
                assert got == await asyncio.to_thread(wanted, prompt), (turn, prompt)
        return engine.stats


async def test_tokens_in_chunks_with_few_blocks_equal_transformers():
    """The cache is too small for all answers of these prompts at one time."""
    stats = await check(PHI4.folder, PROMPTS[:4], max_prefill_chunk=61, num_gpu_blocks_override=51)
    assert stats.preemptions > 0
    assert stats.prefix_hits > 0


async def test_tokens_of_an_accelerators_steps_equal_transformers(monkeypatch):
    monkeypatch.setattr(engine.run.start, "open_accelerator", lambda device: HostAccelerator())
    assert (await check(PHI4.folder)).prefix_hits > 0


def transformers_layout(folder) -> None:
    """Base matrices as transformers saves them; adapters as its script extracts them, one with PEFT's prefix."""
    tiny.save(base_oracle(PHI4), folder)
    for other in ("preprocessor_config.json", "processor_config.json"):
        (folder / other).unlink(missing_ok=True)
    stored = load_file(PHI4.folder / "model.safetensors")
    for name, prefix in (("speech", ""), ("vision", "base_model.model.")):
        (folder / f"{name}-lora").mkdir()
        halves = {
            prefix + key.replace(f".{name}", ""): part
            for key, part in stored.items()
            if f".{name}." in key and "lora_" in key
        }
        save_file(halves, folder / f"{name}-lora" / "adapter_model.safetensors", {"format": "pt"})
        settings = {"r": PHI4_RANK, "lora_alpha": PHI4_ALPHA, "target_modules": "model.layers.\\d+.(a|b)"}
        (folder / f"{name}-lora" / "adapter_config.json").write_text(json.dumps(settings))


async def test_transformers_layout_is_the_same(tmp_path):
    folder = cached_checkpoint("phi4-multimodal", transformers_layout, __file__)
    await check(folder)
    without = load_model_config(folder, without=("image", "video"))
    assert list(without.towers) == ["audio"]
    model = load(folder)
    assert model.adapters == ("image", "audio")
    assert model.towers["audio"].pictures == 1


async def test_an_adapter_whose_folder_is_absent_changes_nothing(tmp_path):
    """transformers has the same results before it loads an adapter; a sound with a picture has its own projection."""
    tiny.save(base_oracle(PHI4), tmp_path)
    model = load(tmp_path)
    assert model.adapters == ("image", "audio")
    assert model.layers[0].o.site is None
    prompt = PROMPTS[3]
    async with running(tmp_path, encoder_cache_tokens=2048) as engine:
        (got,) = await answer(engine, request(prompt))
        (read,) = await answer(engine, request(PROMPTS[0]))
    assert read == await asyncio.to_thread(wanted, PROMPTS[0])
    assert len(got) == TOKENS


async def test_without_pictures_sounds_are_as_before():
    async with running(PHI4.folder, encoder_cache_tokens=512, without_media=("image", "video")) as engine:
        (got,) = await answer(engine, request(PROMPTS[2]))
    assert got == await asyncio.to_thread(wanted, PROMPTS[2])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            {"embd_layer": {"image_embd_layer": {"hd_transform_order": "glb_sub"}}},
            "pictures are supported with 'sub_glb'",
        ),
        ({"embd_layer": {"image_embd_layer": {"crop_size": 336}}}, "image_size=448 must be crop_size=336"),
        ({"vision_config": {"num_attention_heads": 5}}, "hidden_size=24 a multiple of num_attention_heads=5"),
    ],
)
def test_pictures_that_are_built_otherwise_are_refused(overrides, said):
    with pytest.raises(ConfigError, match=said):
        load_model_config(PHI4.folder, overrides)
