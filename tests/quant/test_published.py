"""Published quantised checkpoints, planned by the loader from start to end without a weight of theirs.

Each file of layouts/ holds what a public repository gives, and its commits: config.json word for word, and the sizes of
files of weights. Bits and group sizes of the further files of a repository are those of the files' names. Nothing
publishes the names, dtypes and shapes in a single file of weights; they are those that AutoGPTQ writes, and the file's
size shows them right: safetensors' header and the bytes behind it have that size, but for an entry of at most METADATA
characters about the program that wrote the file, and no tensor is that small with its line of the header. Where a
repository gives config.json alone, the layout is planned with random weights.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest

from engine import estimate as estimate_module
from engine.checkpoint.files import CONFIG
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.estimate import estimate
from engine.memory import DeviceMemory
from engine.weights.files import SINGLE, open_checkpoint

LAYOUTS = {path.stem: json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "layouts").glob("*"))}
FILES = [(name, number) for name, layout in LAYOUTS.items() for number in range(len(layout.get("files", ())))]
ALONE = [name for name, layout in LAYOUTS.items() if "files" not in layout and "refused" not in layout]
REFUSED = [name for name, layout in LAYOUTS.items() if "refused" in layout]
METADATA = 160
SIZES = {"F32": 4, "I32": 4, "F16": 2}
TIB = 1 << 40


def tensors_of(layout: dict, bits: int, group: int) -> dict[str, tuple[str, list[int]]]:
    """Name -> dtype and shape."""
    config = layout[CONFIG]
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    plain = {
        "inv_freq": ("F32", [hidden // config["num_attention_heads"] // 2]),
        "embed_tokens": ("F16", [vocabulary, hidden]),
        "lm_head": ("F16", [vocabulary, hidden]),
    }
    found = {}
    layers = [f"model.layers.{number}" for number in range(config["num_hidden_layers"])]
    for name in [*layout["names"], *(f"{layer}.{each}" for layer in layers for each in layout["layer"])]:
        ends = [part for part in name.split(".") if part in plain]
        found[name] = plain[ends[0]] if ends else ("F16", [hidden])
    for module in layout["modules"]:
        rows, columns = (hidden, hidden) if "self_attn" in module else (inner, hidden)
        if module.endswith("down_proj"):
            rows, columns = hidden, inner
        groups = 1 if group == -1 else columns // group
        kinds = {
            "bias": ("F16", [rows]), "g_idx": ("I32", [columns]), "qweight": ("I32", [columns * bits // 32, rows]),
            "qzeros": ("I32", [groups, rows * bits // 32]), "scales": ("F16", [groups, rows]),
        }  # fmt: skip
        found |= {f"{layer}.{module}.{kind}": kinds[kind] for layer in layers for kind in layout["kinds"]}
    return found


def header_of(tensors: dict[str, tuple[str, list[int]]]) -> tuple[bytes, int]:
    """The header as safetensors writes it, and how many bytes follow it: the widest dtypes first, then by name."""
    header, end, order = {}, 0, list(SIZES)
    for name in sorted(tensors, key=lambda name: (order.index(tensors[name][0]), name)):
        dtype, shape = tensors[name]
        begin, end = end, end + SIZES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"))
    return (text + " " * (-len(text) % 8)).encode(), end


@pytest.fixture
def on_a_device(monkeypatch):
    """A device of a TiB."""
    monkeypatch.setattr(estimate_module, "choose_device", lambda asked: "cuda:0")
    monkeypatch.setattr(estimate_module, "device_memory", lambda device: DeviceMemory(TIB, TIB))


@pytest.mark.parametrize(("name", "number"), FILES)
@pytest.mark.usefixtures("on_a_device")
def test_a_published_file_is_planned(tmp_path, name, number):
    layout = LAYOUTS[name]
    said = layout["files"][number]
    bits, group = said["bits"], said["group_size"]
    tensors = tensors_of(layout, bits, group)
    header, num_bytes = header_of(tensors)
    assert 0 <= said["size"] - 8 - len(header) - num_bytes <= METADATA
    config = layout[CONFIG]
    settings = {**config["quantization_config"], "bits": bits, "group_size": group}
    (tmp_path / CONFIG).write_text(json.dumps({**config, "quantization_config": settings}))
    with (tmp_path / SINGLE).open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + num_bytes)  # the bytes behind the header are a hole
    found = estimate(EngineConfig(str(tmp_path)), open_checkpoint(tmp_path))
    numbers = {name: math.prod(shape) for name, (_, shape) in tensors.items()}
    unread = [each for each in tensors if each.endswith("inv_freq")]
    scales = sum(numbers[each] for each in tensors if each.endswith("scales"))
    assert found.num_tensors == len(tensors) - len(unread)
    assert found.weight_bytes == num_bytes - 4 * sum(numbers[each] for each in unread) + 2 * scales  # float32 in memory
    assert f"(gptq): {7 * config['num_hidden_layers']} matrices are codes in memory, 1 are floats" in found.quantised
    assert found.context == config["max_position_embeddings"]


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.usefixtures("on_a_device")
def test_a_published_configuration_is_planned(tmp_path, name):
    config = LAYOUTS[name][CONFIG]
    (tmp_path / CONFIG).write_text(json.dumps(config))
    coded = estimate(EngineConfig(str(tmp_path)), None)
    (tmp_path / CONFIG).write_text(json.dumps({**config, "quantization_config": None}))
    plain = estimate(EngineConfig(str(tmp_path)), None)
    assert " matrices are codes in memory, 1 are floats" in coded.quantised
    assert plain.quantised is None
    assert coded.weight_bytes < 0.4 * plain.weight_bytes
    assert (coded.context, coded.kv_bytes) == (plain.context, plain.kv_bytes)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("on_a_device")
def test_a_published_configuration_is_refused(tmp_path, name):
    (tmp_path / CONFIG).write_text(json.dumps(LAYOUTS[name][CONFIG]))
    with pytest.raises(ConfigError, match=LAYOUTS[name]["refused"]):
        estimate(EngineConfig(str(tmp_path)), None)


def test_every_layout_names_its_source():
    assert len(FILES) + len(ALONE) + len(REFUSED) >= 10
    for name, layout in LAYOUTS.items():
        assert layout["source"]["repository"].startswith("https://github.com/"), name
        commits = [layout["source"][CONFIG], *(file["commit"] for file in layout.get("files", ()))]
        assert all(len(commit) == 40 for commit in commits), name
