"""Llama 4's processor against functions of transformers' modules, which cannot be imported without torchvision."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import math
import random
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mm.item import MediaItem, MediaOptions
from mm.processors.llama4 import WORDS, Llama4, canvas, fitted
from tests.mm import made

pytest.importorskip("transformers")
PLAIN = MediaOptions()
PATCH, VISION = 9, {"patch_size": 14, "image_size": 56}
IDS = {word: 300 + number for number, word in enumerate([*WORDS.values(), "<|patch|>"])}
IDS["<|patch|>"] = PATCH


@functools.cache
def theirs() -> SimpleNamespace:
    """transformers' functions that choose canvas and size, and the method that writes a slot's tokens."""
    folder = Path(importlib.util.find_spec("transformers").origin).parent / "models" / "llama4"
    wanted = {"get_factors", "find_supported_resolutions", "get_best_fit", "get_max_res_without_distortion"}
    wanted.add("_prompt_split_image")
    names = {
        "math": math,
        "torch": torch,
        "defaultdict": defaultdict,
        "lru_cache": lambda **_: lambda function: function,
    }
    for file in ("image_processing_llama4.py", "processing_llama4.py"):
        tree = ast.parse((folder / file).read_text(encoding="utf-8"))
        found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in wanted]
        exec(compile(ast.Module(found, []), file, "exec"), names)  # annotations stay texts, as in this file
    return SimpleNamespace(**{name: names[name] for name in wanted})


def processor(folder: Path, **settings) -> Llama4:
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 56, "width": 56}, **settings}))
    config = {"vision_config": VISION, "image_token_index": PATCH}
    return Llama4(folder, config, encode=lambda text: [IDS[text]])


def test_canvas_and_size_equal_the_reference():
    rng = random.Random(0)
    sizes = [(rng.randrange(1, 1500), rng.randrange(1, 1500)) for _ in range(200)]
    for most in (1, 4, 16):
        grids = theirs().find_supported_resolutions(most, SimpleNamespace(height=56, width=56))
        for height, width in [*sizes, (56, 56), (112, 56), (57, 56), (1, 1400)]:
            best = theirs().get_best_fit((height, width), torch.tensor(grids)).tolist()
            rows, columns = canvas(height, width, 56, most)
            assert [rows * 56, columns * 56] == best
            bounds = tuple(min(max(side, 56), most) for side, most in zip((height, width), best))
            wanted = theirs().get_max_res_without_distortion((height, width), bounds)
            assert fitted(height, width, *bounds) == tuple(max(side, 1) for side in wanted)


@pytest.mark.parametrize(("height", "width"), [(40, 30), (56, 56), (100, 150), (60, 300)])
def test_tiles_and_tokens_of_a_slot(tmp_path, height, width):
    ours = processor(tmp_path, max_patches=4)
    pixels = made.noise(height, width)
    scale = ours.plan_image(height, width, PLAIN)
    item = ours.process(MediaItem("image", pixels, scale=scale), bytes(16), PLAIN)
    features = item.parts[0].features
    rows, columns = features["tiles"].tolist()
    assert (rows * 56, columns * 56) == (scale.height, scale.width)
    written = theirs()._prompt_split_image(None, (rows, columns), 4)
    wanted = [IDS[f"<|{word}|>"] for word in written.removeprefix("<|").removesuffix("|>").split("|><|")]
    filling = ours.fill(item)
    assert filling.token_ids.tolist() == wanted
    places = [place for start, count in filling.runs[0] for place in range(start, start + count)]
    assert places == np.flatnonzero(filling.token_ids == PATCH).tolist()
    assert len(places) == item.parts[0].num_tokens == 4 * (rows * columns + (rows * columns > 1))
    patches = features["pixel_values"].reshape(-1, 4, 4, 3, 14, 14).transpose(0, 1, 4, 2, 5, 3).reshape(-1, 56, 56, 3)
    tiles = patches[: rows * columns].reshape(rows, columns, 56, 56, 3).transpose(0, 2, 1, 3, 4)
    shown = np.rint((tiles.reshape(rows * 56, columns * 56, 3) + 1) * 127.5).astype(np.uint8)
    bounds = [min(max(side, 56), most) for side, most in zip((height, width), shown.shape)]
    high, wide = theirs().get_max_res_without_distortion((height, width), bounds)
    picture = type(scale)(high, wide, 2).array(pixels)
    assert np.array_equal(shown[:high, :wide], picture)
    assert not shown[high:].any()
    assert not shown[:, wide:].any()


def test_what_is_not_supported_is_refused_at_start(tmp_path):
    with pytest.raises(ValueError, match="resize_to_max_canvas=true is not supported: set it to false"):
        processor(tmp_path, resize_to_max_canvas=True)
    with pytest.raises(ValueError, match="the tower reads tiles of 56 x 56 pixels"):
        processor(tmp_path, size={"height": 70, "width": 70})
