"""explain prints the parts of a model and its steps' kernels; a tiny model with real weights launches the same."""

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from engine.base.config import EngineConfig
from engine.cache.layout import CacheLayout
from engine.explain.explained import explain
from engine.explain.launches import Launches
from engine.explain.parts import objects_of
from engine.explain.runs import fill, steps_of, towers_of
from engine.explain.sections import ITEM, by_size, kernels_of, ranges
from engine.kernels.gemm.pack import Placement
from engine.kernels.target import CARDS
from engine.models.registry import build_model, load_model_config
from server import cli
from server.start import explain as command
from tests import pooling_kit, tiny
from tests.engine_kit import answer, running, text_request
from tests.models.harness import load

FAMILIES = {
    "dense": lambda: tiny.checkpoint("qwen3"),
    "experts": lambda: tiny.checkpoint("qwen3_moe"),
    "sliding": lambda: tiny.checkpoint("gemma3"),
    "convolution": lambda: tiny.checkpoint("lfm2"),
    "media": lambda: tiny.checkpoint("omni"),
    "pooling": lambda: pooling_kit.encoder("bert"),
    "scores": lambda: pooling_kit.rewarding("Qwen2ForRewardModel", 2),
}
KERNELS = re.compile(r"[\d, ]+: ")  # the beginning of a line of kernels


def launches_of(model, pretend):
    """The launches of the model's steps, by size, and of each tower's items."""
    owners = {id(part): path for path, part in objects_of(model).items()} | {id(model): ""}
    with torch.no_grad(), Launches(owners, "cpu", pretend) as launches:
        if pretend:
            fill(model, launches.tensors, Placement(model.dtype, "cpu"), lambda _: True)
        steps = steps_of(model, CacheLayout(model.cache_specs(), 16), "cpu", launches)
        return [steps, *towers_of(model, launches).values()]


def named(text):
    """(name of a part, line of its kernels) of explain's lines."""
    found, name = set(), ""
    for line in map(str.strip, text):
        if KERNELS.match(line):
            found.add((name, line))
        elif not re.match(r"\w+=", line):  # a line `field=` shows the configuration
            name = line.removeprefix("in ").removesuffix(" instead").partition(":")[0].partition(" (")[0]
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_named_is_what_real_weights_launch(family):
    folder = FAMILIES[family]()
    real = load(folder, load_format="dummy")
    wanted = [kernels_of(steps) for steps in launches_of(real, pretend=False)]
    pretended = build_model(load_model_config(folder), real.dtype)
    assert [kernels_of(steps) for steps in launches_of(pretended, pretend=True)] == wanted
    text = list(explain(EngineConfig(model=str(folder)), "cpu"))
    lines = named(text)
    for path, sizes in ((path, sizes) for found in wanted for path, sizes in found.items()):
        item = ITEM.match(path)
        short = path if item is None else path[item.end() + 1 :]
        of_group = {name for name, _ in lines if item and name.startswith(f"{item['list']}.")}
        names = {path, short, *(of_group if not short else ())} if path else {"by itself"}
        for line in by_size(sizes):
            assert any((name, line) in lines for name in names), (path, line)
    assert len(real.layers) == sum(map(int, re.findall(r"^  layers\S+ \((\d+) alike", "\n".join(text), re.M))) + len(
        re.findall(r"^  layers\.\d+:", "\n".join(text), re.M)
    )


async def test_the_steps_of_an_engine_launch_the_same_kernels_as_often():
    """The kernels of _fast/cpu, which are recorded on the engine's threads too."""
    folder = tiny.checkpoint("qwen3")
    wanted = Counter(one.kernel for one in launches_of(load(folder), pretend=False)[0][1])
    async with running(folder) as engine:
        with Launches({}, "cpu", pretend=False) as launches:
            launches.launched = []
            await answer(engine, text_request([5, 6, 7], 9))
            met = Counter(one.kernel for one in launches.launched)
    times = {met[kernel] / wanted[kernel] for kernel in wanted if kernel.startswith("_fast/")}
    assert len(times) == 1
    assert times.pop() >= 9


def changed(tmp_path, name, **values):
    """The configuration of a tiny checkpoint, without weights, with other values."""
    config = json.loads((tiny.checkpoint(name) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **values}))
    return tmp_path


def test_equal_layers_are_printed_once_with_their_caches(tmp_path):
    folder = changed(tmp_path, "gemma3", num_hidden_layers=12, layer_types=None, sliding_window_pattern=3)
    text = list(explain(EngineConfig(model=str(folder)), "cpu"))
    groups = {line.strip(): text[number + 1] for number, line in enumerate(text) if line.startswith("  layers.")}
    assert list(groups) == [
        "layers.0-1,3-4,6-7,9-10 (8 alike): LlamaLayer",
        "layers.2,5,8,11 (4 alike): LlamaLayer",
    ]
    first, second = groups.values()
    assert "window=8" in first
    assert "of the last 8 tokens" in first
    assert "window=0" in second
    assert "of the last" not in second


def test_codes_are_named_as_the_configuration_stores_them(tmp_path):
    folder = changed(tmp_path, "llama", quantization_config={"quant_method": "awq", "bits": 4, "group_size": 16})
    text = "\n".join(explain(EngineConfig(model=str(folder)), "cpu"))
    assert "stored as INT4 by 16" in text
    assert "held as GroupPanels" in text
    assert "_fast/cpu.coded_linear" in text


def test_sizes_need_no_memory(tmp_path):
    """A model whose float weights would take 900 GB."""
    sizes = {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128}
    text = list(explain(EngineConfig(model=str(changed(tmp_path, "llama", **sizes, head_dim=128))), "cpu"))
    assert any(line.startswith("  layers.0-125 (126 alike)") for line in text)


def run(*words):
    """The command in a separate process, with a card's kernels."""
    words = [sys.executable, "-m", "server", "explain", *map(str, words)]
    root = Path(__file__).parents[3]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, cwd=root)


@pytest.mark.slow
def test_a_card_that_is_not_here_has_kernels_of_its_own(tmp_path):
    folder = changed(tmp_path, "qwen3", hidden_size=1024, head_dim=128)
    done = run(folder / "config.json", "--device-target", "sm_90")
    assert done.returncode == 0, done.stderr
    lines = named(done.stdout.splitlines())
    assert ("attention", "1, 32: rotate.qkv_kernel, attention/decode.decode_kernel") in lines
    assert any(name == "o" and "torch.addmm" in line for name, line in lines)
    assert any(line == "1: gemm/dense_row.dense_row_kernel" for _, line in lines)
    assert "on cuda:0 (sm_90)" in done.stdout


def test_the_flag_s_cards_are_those_that_kernels_know(capsys):
    assert tuple(CARDS) == command.CARDS
    assert cli.main(["explain", "--device-target", "sm_1"]) == 2
    assert capsys.readouterr().err == f"omniloop: --device-target sm_1: must be one of {', '.join(CARDS)}\n"


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "must hold a JSON object, got list"),
        ('{"architectures": ["LlamaForCausalLM"]}', "hidden_size is missing"),
        ('{"architectures": ["LlamaForCausalLM"], "hidden_size": "wide"}', "hidden_size='wide' must be an integer"),
        ('{"architectures": ["NoSuchForCausalLM"]}', "architecture NoSuchForCausalLM is not supported"),
    ],
)
def test_a_malformed_configuration_is_refused_in_one_line(tmp_path, capsys, written, reason):
    (tmp_path / "config.json").write_text(written)
    assert cli.main(["explain", str(tmp_path / "config.json")]) == 1
    said = capsys.readouterr()
    assert not said.out
    assert said.err.startswith("omniloop: ")
    assert said.err.count("\n") == 1
    assert reason in said.err


def test_a_folder_without_weights_and_its_file_are_explained_alike(tmp_path, capsys):
    shutil.copy(tiny.checkpoint("llama") / "config.json", tmp_path)
    assert cli.main(["explain", str(tmp_path)]) == 0
    of_folder = capsys.readouterr().out
    assert cli.main(["explain", "--model", str(tmp_path / "config.json")]) == 0
    assert capsys.readouterr().out == of_folder
    assert of_folder.startswith("LlamaForCausalLM (Llama), by a file here, in float32 on cpu")


@pytest.mark.parametrize(("numbers", "text"), [([0], "0"), ([0, 1, 2, 5], "0-2,5"), ([1, 3, 4], "1,3-4")])
def test_numbers_are_written_as_ranges(numbers, text):
    assert ranges(numbers) == text
