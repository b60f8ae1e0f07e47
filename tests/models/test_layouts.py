"""Published checkpoints, planned by the loader from configuration to bytes, without their weights.

Each file of layouts/ has what public repositories publish, with their commits: config.json or params.json verbatim,
the names of model.safetensors.index.json (a layer's names once, since every layer has the same) and its total size.
Shapes are not published there; they follow from the configuration. The total size, equal to the byte, proves that the
shapes are right and that no tensor is missing or left over.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest
import torch

from engine.base.config import EngineConfig
from engine.checkpoint.files import CONFIG, PARAMS
from engine.device.memory import DeviceMemory
from engine.models.registry import build_model, load_model_config
from engine.run import estimate as estimate_module
from engine.run import shares as shares_module
from engine.run.estimate import estimate
from engine.weights.files import INDEX, open_checkpoint
from engine.weights.table import expand

LAYOUTS = {
    path.stem: json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "layouts").glob("*.json"))
}
SHARD = "model-00001-of-00001.safetensors"
TIB = 1 << 40


def names_of(layout):
    layers = [
        f"{path}.{number}.{name}"
        for path, each in layout["layers"].items()
        for number in range(each["count"])
        for name in each["names"]
    ]
    return [*layout["names"], *layers]


def shapes_of(model, names):
    """The shape that the model wants for each name; a tied head has the embedding's shape."""
    table = model.weight_table()
    places = expand(table, model)
    shapes = {}
    for name in names:
        canonical = table.canonical(name)
        if canonical in places:
            shapes[name] = places[canonical].wanted.shape
        else:
            assert table.ignored(canonical), f"{name} is left over"
            shapes[name] = places["embed_tokens.weight"].wanted.shape
    return shapes


def write_header(folder, shapes):
    """Writes a shard that has only its header; the tensors' bytes are a hole in a sparse file."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (folder / SHARD).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_published_layout_is_planned(tmp_path, monkeypatch, name):
    layout = LAYOUTS[name]
    file = CONFIG if CONFIG in layout else PARAMS
    (tmp_path / file).write_text(json.dumps(layout[file]))
    config = load_model_config(tmp_path)
    names = names_of(layout)
    shapes = shapes_of(build_model(config, torch.bfloat16), names)
    assert 2 * sum(map(math.prod, shapes.values())) == layout["total_size"]
    weight_map = dict.fromkeys(names, SHARD)
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    write_header(tmp_path, shapes)
    monkeypatch.setattr(estimate_module, "choose_device", lambda asked: "cuda:0")
    monkeypatch.setattr(shares_module, "device_memory", lambda device: DeviceMemory(TIB, TIB))
    found = estimate(EngineConfig(str(tmp_path)), open_checkpoint(tmp_path))
    unread = [name for name in names if name == "lm_head.weight" and config.text.tie_embeddings]
    assert found.tensors.read == len(names) - len(unread)
    assert found.weight_bytes == layout["total_size"] - sum(2 * math.prod(shapes[name]) for name in unread)
    assert found.context == config.max_position


def test_every_layout_names_its_source():
    for name, layout in LAYOUTS.items():
        source = layout["source"]
        assert source["repository"].startswith("https://github.com/"), name
        assert set(source) - {"repository"} == {INDEX, CONFIG if CONFIG in layout else PARAMS}, name
        assert all(len(commit) == 40 for key, commit in source.items() if key != "repository"), name
