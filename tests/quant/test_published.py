"""Published quantised checkpoints, planned by the loader from start to end, without their weights.

Each file of layouts/ has what public pages give, with their addresses: config.json verbatim, hf_quant_config.json if
the checkpoint has one, and the sizes of weight files. `rest` marks the place where the stored page of config.json is
cut off; the keys after this place are from another page about the same base model. Bits and group sizes of a
repository's further files are in the files' names. No page has the names, dtypes and shapes of the tensors in a single
file of weights; the tests use those that the quantiser writes, and the file's size proves them. A size in bytes leaves
room for at most METADATA characters about the program that wrote the file; no tensor with its line of the header is
that small. A size such as "3.89 GB" is rounded, as on its page. Layouts that have only a configuration are planned with
random weights.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest

from engine.base.config import EngineConfig
from engine.base.errors import ConfigError
from engine.checkpoint.files import CONFIG
from engine.device.memory import DeviceMemory
from engine.run import estimate as estimate_module
from engine.run import shares as shares_module
from engine.run.estimate import estimate
from engine.weights.files import SINGLE, open_checkpoint

LAYOUTS = {path.stem: json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "layouts").glob("*"))}
FILES = [(name, number) for name, layout in LAYOUTS.items() for number in range(len(layout.get("files", ())))]
ALONE = [name for name, layout in LAYOUTS.items() if "files" not in layout and "refused" not in layout]
REFUSED = [name for name, layout in LAYOUTS.items() if "refused" in layout]
DIALECTS = {"awq", "compressed-tensors", "fp8", "gptq", "modelopt", "mxfp4"}  # each has a layout that is planned
METADATA = 160
SIZES = {"F32": 4, "I32": 4, "I64": 8, "F16": 2, "BF16": 2, "I8": 1}
ORDER = ["I64", "F32", "I32", "F16", "BF16", "I8"]  # in a file: the widest first
SCALES = ("scales", "weight_scale")  # float32 in memory
BESIDE = "hf_quant_config.json"
TIB = 1 << 40


def settings_of(layout: dict) -> dict:
    """The checkpoint's settings of quantisation, with `quant_method`."""
    beside = {"quant_method": "modelopt", **layout[BESIDE]["quantization"]} if BESIDE in layout else None
    return beside or layout[CONFIG]["quantization_config"]


def fields_of(layout: dict, said: dict) -> tuple[int, int]:
    """Bits and group size of a file of weights."""
    settings = settings_of(layout)
    if "config_groups" in settings:
        weights = settings["config_groups"]["group_0"]["weights"]
        return weights["num_bits"], weights["group_size"] or -1
    return said.get("bits", settings["bits"]), said.get("group_size", settings["group_size"])


def tensors_of(layout: dict, bits: int, group: int) -> dict[str, tuple[str, list[int]]]:
    """Name -> dtype and shape of every tensor of the file."""
    config = layout[CONFIG]
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    floats = {"float16": "F16", "bfloat16": "BF16"}[config["torch_dtype"]]
    head = hidden // config["num_attention_heads"]
    few = head * config.get("num_key_value_heads", config["num_attention_heads"])
    plain = {
        "inv_freq": ("F32", [head // 2]),
        "embed_tokens": (floats, [vocabulary, hidden]),
        "lm_head": (floats, [vocabulary, hidden]),
    }
    found = {}
    layers = [f"model.layers.{number}" for number in range(config["num_hidden_layers"])]
    for name in [*layout["names"], *(f"{layer}.{each}" for layer in layers for each in layout["layer"])]:
        ends = [part for part in name.split(".") if part in plain]
        found[name] = plain[ends[0]] if ends else (floats, [hidden])
    of_awq = settings_of(layout)["quant_method"] == "awq"
    shapes = {"down_proj": (hidden, inner), "gate_proj": (inner, hidden), "up_proj": (inner, hidden)}
    for module in layout["modules"]:
        last = module.rpartition(".")[2]
        rows, columns = shapes.get(last, (few if last in ("k_proj", "v_proj") else hidden, hidden))
        groups, words = 1 if group == -1 else columns // group, rows * bits // 32
        kinds = {
            "bias": (floats, [rows]), "g_idx": ("I32", [columns]), "input_scale": (floats, [1]),
            "qweight": ("I32", [columns, words] if of_awq else [columns * bits // 32, rows]),
            "qzeros": ("I32", [groups, words]), "scales": (floats, [groups, rows]),
            "weight": ("I8", [rows, columns]), "weight_packed": ("I32", [rows, columns * bits // 32]),
            "weight_scale": (floats, [rows, groups]), "weight_shape": ("I64", [2]),
        }  # fmt: skip
        found |= {f"{layer}.{module}.{kind}": kinds[kind] for layer in layers for kind in layout["kinds"]}
    return found


def header_of(tensors: dict[str, tuple[str, list[int]]]) -> tuple[bytes, int]:
    """The header as safetensors writes it (widest dtypes first, then by name), and how many bytes follow it."""
    header, end = {}, 0
    for name in sorted(tensors, key=lambda name: (ORDER.index(tensors[name][0]), name)):
        dtype, shape = tensors[name]
        begin, end = end, end + SIZES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"))
    return (text + " " * (-len(text) % 8)).encode(), end


def agrees(size: int | str, num_bytes: int) -> bool:
    """Whether a published size fits a file whose header and tensors take `num_bytes`."""
    if isinstance(size, int):
        return 0 <= size - num_bytes <= METADATA
    number, unit = size.split()
    whole = {"GB": 1e9, "MB": 1e6}[unit]
    return f"{num_bytes / whole:.{len(number.partition('.')[2])}f}" == number


def write_configuration(folder: Path, layout: dict, settings: dict | None) -> None:
    """Writes config.json with the given settings of quantisation if any; without them also hf_quant_config.json."""
    config = layout[CONFIG] if settings is None else {**layout[CONFIG], "quantization_config": settings}
    (folder / CONFIG).write_text(json.dumps(config))
    if BESIDE in layout and settings is None:
        (folder / BESIDE).write_text(json.dumps(layout[BESIDE]))


@pytest.fixture
def on_a_device(monkeypatch):
    """Simulates a device with 1 TiB of memory."""
    monkeypatch.setattr(estimate_module, "choose_device", lambda asked: "cuda:0")
    monkeypatch.setattr(shares_module, "device_memory", lambda device: DeviceMemory(TIB, TIB))


@pytest.mark.parametrize(("name", "number"), FILES)
@pytest.mark.usefixtures("on_a_device")
def test_a_published_file_is_planned(tmp_path, name, number):
    layout = LAYOUTS[name]
    said = layout["files"][number]
    bits, group = fields_of(layout, said)
    tensors = tensors_of(layout, bits, group)
    header, num_bytes = header_of(tensors)
    assert agrees(said["size"], 8 + len(header) + num_bytes)
    named = "bits" in said  # a further file of a repository
    settings = {**settings_of(layout), "bits": bits, "group_size": group} if named else None
    write_configuration(tmp_path, layout, settings)
    with (tmp_path / SINGLE).open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + num_bytes)  # the tensors' bytes are a hole
    found = estimate(EngineConfig(str(tmp_path)), open_checkpoint(tmp_path))
    sizes = {name: SIZES[dtype] * math.prod(shape) for name, (dtype, shape) in tensors.items()}
    unread = [each for each in tensors if each.endswith("inv_freq")]
    scales = sum(math.prod(shape) for each, (_, shape) in tensors.items() if each.endswith(SCALES))
    assert found.tensors.read == len(tensors) - len(unread)
    assert found.weight_bytes == num_bytes - sum(sizes[each] for each in unread) + 2 * scales
    matrices = 7 * layout[CONFIG]["num_hidden_layers"]
    method = settings_of(layout)["quant_method"]
    assert f"({method}): {matrices} matrices are codes in memory, 1 are floats" in found.lines[0]
    assert found.context == layout[CONFIG]["max_position_embeddings"]


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.usefixtures("on_a_device")
def test_a_published_configuration_is_planned(tmp_path, name):
    layout = LAYOUTS[name]
    config = layout[CONFIG]
    write_configuration(tmp_path, layout, None)
    coded = estimate(EngineConfig(str(tmp_path)), None)
    stacked = "num_local_experts" in config  # gpt-oss, whose attention is not quantised
    experts = config.get("num_local_experts", config.get("num_experts", 1))
    matrices = (3 * experts + 4 * (not stacked)) * config["num_hidden_layers"]  # gate, up and down; q, k, v and o
    assert f"({settings_of(layout)['quant_method']}): {matrices} matrices are codes in memory" in coded.lines[0]
    if stacked:
        return  # without its settings the experts would have another layout
    plain = estimate(EngineConfig(str(without_codes(tmp_path, config))), None)
    assert plain.lines == ()
    eight = settings_of(layout)["quant_method"] in ("fp8", "compressed-tensors")  # bits
    assert coded.weight_bytes < (0.65 if eight else 0.4) * plain.weight_bytes
    assert coded.context == plain.context
    codes_in_cache = settings_of(layout).get("kv_cache_quant_algo") == "FP8"
    assert coded.kv_bytes < 0.52 * plain.kv_bytes if codes_in_cache else coded.kv_bytes == plain.kv_bytes


def without_codes(folder: Path, config: dict) -> Path:
    """A folder with the same configuration, unquantised."""
    (plain := folder / "plain").mkdir()
    (plain / CONFIG).write_text(json.dumps({**config, "quantization_config": None}))
    return plain


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("on_a_device")
def test_a_published_configuration_is_refused(tmp_path, name):
    write_configuration(tmp_path, LAYOUTS[name], None)
    with pytest.raises(ConfigError, match=LAYOUTS[name]["refused"]):
        estimate(EngineConfig(str(tmp_path)), None)


def test_every_layout_names_its_source_and_every_dialect_has_a_layout():
    assert len(FILES) + len(ALONE) + len(REFUSED) >= 10
    planned = {name for name, _ in FILES} | set(ALONE)
    assert {settings_of(LAYOUTS[name])["quant_method"] for name in planned} == DIALECTS
    for name, layout in LAYOUTS.items():
        source = layout["source"]
        if "repository" in source:
            commits = [source[CONFIG], *(file["commit"] for file in layout.get("files", ()))]
            assert source["repository"].startswith("https://github.com/"), name
            assert all(len(commit) == 40 for commit in commits), name
        else:
            assert all(page.startswith(("https://github.com/", "https://huggingface.co/")) for page in source.values())
            assert all(part in source for part in (CONFIG, BESIDE, "files") if part in layout), name
