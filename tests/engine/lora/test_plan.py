"""What an adapter's configuration and tensors must be, and what is refused by name before anything is allocated."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.base.config import LoraConfig
from engine.base.errors import AdapterError, ConfigError
from engine.lora.adapter import Adapter
from engine.lora.config import CONFIG, MORE, read_config
from engine.lora.load import Rules, load_adapter
from engine.lora.sites import changed
from engine.lora.source import Source
from engine.lora.targets import targets_of
from engine.models.registry import build_model, load_model_config
from engine.weights.files import ADAPTER
from tests import tiny
from tests.tiny_adapters import adapted

PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}


def rules(name: str = "llama", **settings: Any) -> Rules:
    model = build_model(load_model_config(tiny.checkpoint(name)), torch.float32)
    targets = targets_of(model)
    return Rules(
        targets, targets.by_path, LoraConfig(**{"max_rank": 64, **settings}), torch.float32, "", tiny.VOCAB_SIZE
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """An adapter of q_proj and down_proj, rank 4."""
    folder = tmp_path_factory.mktemp("made")
    adapted("llama", folder, r=4, target_modules=["q_proj", "down_proj"])
    return folder


@pytest.fixture
def folder(made, tmp_path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(made, tmp_path / "x")


def change(folder: Path, **values: Any) -> None:
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def rename(folder: Path, old: str, new: str) -> None:
    tensors = load_file(folder / ADAPTER)
    save_file({name.replace(old, new): tensor for name, tensor in tensors.items()}, folder / ADAPTER)


def load(folder: Path, **settings: Any) -> Adapter:
    return load_adapter(Source(str(folder)), "x", rules(**settings))


def refused(folder: Path, *words: str, **settings: Any) -> AdapterError:
    with pytest.raises(AdapterError) as caught:
        load(folder, **settings)
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert str(folder.parent) not in text, "no path of the machine"
    return caught.value


def values(adapter: Adapter) -> list[torch.Tensor]:
    return [tensor for _, site in sorted(adapter.sites.items()) for tensor in (site.a, *site.b)]


@pytest.mark.parametrize("key", MORE)
def test_keys_that_mean_more_than_two_matrices_are_refused_by_name(key):
    with pytest.raises(AdapterError, match=key):
        read_config(json.dumps({**PLAIN, key: {"a": 1}}).encode())


CONFIGS = {
    "another method": ({"peft_type": "IA3"}, "peft_type"),
    "biases": ({"bias": "all"}, "bias"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
    "olora": ({"init_lora_weights": "olora"}, "olora"),
    "a key that is not known": ({"brand_new": 3}, "brand_new"),
    "rank 0": ({"r": 0}, "r=0"),
    "alpha": ({"lora_alpha": "x"}, "lora_alpha"),
    "a pattern that is no expression": ({"rank_pattern": {"(": 2}}, "rank_pattern"),
    "a pattern that could run for hours": ({"alpha_pattern": {"(a+)+b": 2}}, "alpha_pattern"),
    "a rank that is no number": ({"rank_pattern": {"q_proj": "two"}}, "q_proj"),
}


@pytest.mark.parametrize(("changed", "word"), CONFIGS.values(), ids=list(CONFIGS))
def test_configurations_that_are_refused(changed, word):
    with pytest.raises(AdapterError, match=word):
        read_config(json.dumps({**PLAIN, **changed}).encode())


def test_the_first_pattern_of_a_path_counts():
    patterns = {
        "layers.1.q_proj": 2,
        "(q|k)_proj": 3,
        "q_proj": 9,
        r"layers\.2\..*": 5,
        "mlp.up_proj": 6,
        ".*up_proj": 7,
    }
    config = read_config(json.dumps({**PLAIN, "rank_pattern": patterns}).encode())
    paths = ("layers.1.q_proj", "layers.11.q_proj", "q_proj", "layers.2.v_proj", "x.mlp.up_proj", "up_proj", "v_proj")
    assert [config.rank_of(path) for path in paths] == [2, 3, 3, 5, 6, 7, 4]


def test_ten_thousands_of_modules_find_their_names_among_thousands():
    names = {f"layers.{layer}.experts.{expert}.up_proj": 1 + expert % 8 for layer in range(64) for expert in range(128)}
    config = read_config(json.dumps({**PLAIN, "rank_pattern": names}).encode())
    begin = time.thread_time()
    assert all(config.rank_of(f"model.{name}") == rank for name, rank in names.items())
    assert time.thread_time() - begin < 5, "8,192 names would take 67 million matches one after another"


def test_patterns_that_match_for_long_are_refused(monkeypatch):
    monkeypatch.setattr("engine.lora.patterns.MAX_SECONDS", 0)
    config = read_config(json.dumps({**PLAIN, "rank_pattern": {".*a.*b": 2}}).encode())
    config.rank_of("a" * 200)
    with pytest.raises(AdapterError, match="rank_pattern took more than"):
        config.rank_of("a" * 200)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_configurations_that_are_no_object(data):
    with pytest.raises(AdapterError, match=CONFIG):
        read_config(data)


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal"])
def test_initialisations_that_leave_the_base_as_it_is(init):
    assert read_config(json.dumps({**PLAIN, "init_lora_weights": init, "new_key": None}).encode()).rank == 4


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("base_model.model.", ""),
        ("base_model.model.model.", "base_model.model.model.model."),
        ("base_model.model.model.", "base_model.model.language_model.model."),
        ("base_model.model.model.", "base_model.model.model.language_model."),
        ("base_model.model.model.", "base_model.model."),
    ],
)
def test_spellings_of_one_module_are_one_adapter(folder, old, new):
    want = values(load(folder))
    rename(folder, old, new)
    found = values(load(folder))
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_modules_that_other_releases_join_are_split(tmp_path, made):
    """q, k and v as one matrix, gate and up as one: A of all pieces is the same."""
    torch.manual_seed(3)
    sizes = {"self_attn.qkv_proj": 64 + 2 * 32, "mlp.gate_up_proj": 224}
    tensors = {}
    for module, rows in sizes.items():
        tensors[f"base_model.model.model.layers.1.{module}.lora_A.weight"] = torch.randn(4, 64)
        tensors[f"base_model.model.model.layers.1.{module}.lora_B.weight"] = torch.randn(rows, 4)
    save_file(tensors, tmp_path / ADAPTER)
    shutil.copy(made / CONFIG, tmp_path / CONFIG)
    adapter = load(tmp_path)
    site = adapter.sites["layers.1.mlp.gate_up"]
    a = tensors["base_model.model.model.layers.1.mlp.gate_up_proj.lora_A.weight"]
    b = tensors["base_model.model.model.layers.1.mlp.gate_up_proj.lora_B.weight"] * 4  # alpha 16, rank 4
    assert torch.equal(site.a, torch.cat([a, a]))
    assert torch.equal(torch.cat(site.b), b)
    assert [len(piece) for piece in adapter.sites["layers.1.attention.qkv"].b] == [64, 32, 32]


def test_tensors_without_a_place_are_named(folder):
    rename(folder, "layers.1.self_attn.q_proj", "layers.7.self_attn.q_proj")
    refused(folder, "layers.7.self_attn.q_proj.lora_A", "no place")


def test_ten_names_are_enough(folder):
    rename(folder, "self_attn.q_proj", "self_attn.other")
    tensors = load_file(folder / ADAPTER)
    more = {f"base_model.model.stage{number}x.lora_A.weight": torch.zeros(4, 64) for number in range(30)}
    more |= {name.replace("lora_A", "lora_B"): tensor.clone() for name, tensor in more.items()}
    save_file(tensors | more, folder / ADAPTER)
    assert len(str(refused(folder, "and ", " more"))) < 1024


def test_half_a_module_is_refused(folder):
    tensors = load_file(folder / ADAPTER)
    del tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
    save_file(tensors, folder / ADAPTER)
    refused(folder, "layers.0.self_attn.q_proj.lora_A.weight", "other half")


@pytest.mark.parametrize("name", ["lora_embedding_A", "lora_magnitude_vector.weight", "lora_B.bias"])
def test_tensors_of_other_methods_are_refused(folder, name):
    tensors = load_file(folder / ADAPTER)
    tensors[f"base_model.model.model.layers.0.self_attn.q_proj.{name}"] = torch.zeros(4)
    save_file(tensors, folder / ADAPTER)
    refused(folder, name, "have no place")


def test_two_spellings_in_one_file_are_refused(folder):
    tensors = load_file(folder / ADAPTER)
    again = {name.replace("model.model.model", "model.model"): t.clone() for name, t in tensors.items()}
    save_file(tensors | again, folder / ADAPTER)
    refused(folder, "same place")


def test_other_shapes_are_refused(folder):
    change(folder, r=5)
    refused(folder, "shape [4, 112]", "[5, 112]")


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(folder, wrong):
    tensors = load_file(folder / ADAPTER)
    tensors["base_model.model.model.layers.2.mlp.down_proj.lora_A.weight"][1, 3] = wrong
    save_file(tensors, folder / ADAPTER)
    refused(folder, "layers.2.mlp.down_proj.lora_A.weight", "NaN or infinity")


def test_limits_are_read_before_anything_is_allocated(folder, monkeypatch):
    from engine.lora import load as module

    monkeypatch.setattr(module, "Packing", None)
    refused(folder, "rank 4", "--max-lora-rank", max_rank=3)
    refused(folder, "bytes", "--lora-max-bytes", max_bytes=1000)
    refused(folder, "mlp.down_proj", "--lora-target-modules", targets=("q_proj",))


def test_a_large_file_is_refused_before_it_is_read(folder):
    """A copy of the base's weights is not part of the adapter's size in memory."""
    path = folder / ADAPTER
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    end = len(data) - 8 - length
    header["base_model.model.lm_head.weight"] = {
        "dtype": "F32",
        "shape": [1 << 40],
        "data_offsets": [end, end + (4 << 40)],
    }
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    os.truncate(path, 8 + len(text) + end + (4 << 40))  # four TiB without a byte on the disk
    refused(folder, f"{ADAPTER} has 43980465", "--lora-max-bytes")


def test_an_adapter_of_another_base_is_refused_with_the_bases_name(folder):
    change(folder, base_model_name_or_path="/home/someone/models/Other-7B")
    rename(folder, "q_proj", "qq_proj")
    refused(folder, "no such linear layer; the adapter was trained on 'Other-7B'")


def test_modules_that_the_model_lacks_are_refused_with_those_that_it_has():
    model = build_model(load_model_config(tiny.checkpoint("llama")), torch.float32)
    with pytest.raises(ConfigError, match=r"--lora-target-modules qproj: .* it has down_proj .* q_proj"):
        changed(model, LoraConfig(targets=("qproj", "k_proj")))


def test_layers_without_room_are_refused(folder):
    found = dataclasses.replace(rules(), served={"layers.0.attention.qkv"})
    with pytest.raises(AdapterError, match="are not served"):
        load_adapter(Source(str(folder)), "x", found)


def test_a_copy_of_the_base_passes_and_a_change_is_refused(tmp_path):
    adapted("llama", tmp_path, r=2, target_modules=["q_proj", "lm_head"])  # PEFT saves the head's weights too
    folder = tiny.checkpoint("llama")
    found = dataclasses.replace(rules(), folder=str(folder))
    load_adapter(Source(str(tmp_path)), "x", found)
    tensors = load_file(tmp_path / ADAPTER)
    tensors["base_model.model.lm_head.base_layer.weight"][7, 7] += 1
    save_file(tensors, tmp_path / ADAPTER)
    with pytest.raises(AdapterError, match=r"lm_head.base_layer.weight differs.*modules_to_save"):
        load_adapter(Source(str(tmp_path)), "x", found)


def test_the_hash_is_the_files_and_the_identity_is_the_contents(folder):
    adapter = load(folder)
    digest = hashlib.sha256((folder / ADAPTER).read_bytes()).hexdigest()
    same = load_adapter(Source(str(folder), sha256=digest), "other", rules())
    assert same.sha256 == adapter.sha256
    assert len(adapter.sha256) == 32
    with pytest.raises(AdapterError, match=digest):
        load_adapter(Source(str(folder), sha256="0" * 64), "x", rules())
    change(folder, lora_alpha=3)
    assert load(folder).sha256 != adapter.sha256
    change(folder, lora_alpha=16, task_type="CAUSAL_LM")
    assert load(folder).sha256 == adapter.sha256


def test_files_that_are_not_there(tmp_path, folder):
    assert refused(tmp_path / "none").missing
    os.remove(folder / ADAPTER)
    refused(folder, ADAPTER)
    (folder / "adapter_model.bin").write_bytes(b"x")
    refused(folder, "adapter_model.bin can hold code")
    os.remove(folder / CONFIG)
    assert refused(folder, CONFIG).missing


def test_damaged_files(folder):
    data = (folder / ADAPTER).read_bytes()
    for wrong in (
        b"",
        data[:5],
        data[:-3],
        data + b"x",
        (2**60).to_bytes(8, "little") + data[8:],
        b"version https://git-lfs",
    ):
        (folder / ADAPTER).write_bytes(wrong)
        refused(folder, ADAPTER)
    (folder / CONFIG).write_bytes(b" " * (1 << 21))
    refused(folder, CONFIG)


def test_a_named_adapter_may_lie_in_a_folder_of_its_name(folder, tmp_path):
    shutil.move(folder, tmp_path / "outer" / "x")
    assert load_adapter(Source(str(tmp_path / "outer")), "x", rules()).rank == 4


def test_paths_stay_below_the_folder(folder, tmp_path):
    def load_below(path: str) -> Adapter:
        return load_adapter(Source(path, str(tmp_path)), "x", rules())

    assert load_below("x").rank == load_below(str(tmp_path / "x")).rank == 4
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "link").symlink_to(folder)
    for path in ("..", "../" + tmp_path.name + "/x", "/etc", "inside/link", "", ".", "x\0y", "none"):
        with pytest.raises(AdapterError) as caught:
            load_below(path)
        assert caught.value.missing, path
    shutil.copy(folder / CONFIG, tmp_path / "inside" / CONFIG)
    (tmp_path / "inside" / ADAPTER).symlink_to(folder / ADAPTER)
    with pytest.raises(AdapterError, match="links"):
        load_below("inside")
    os.remove(tmp_path / "inside" / ADAPTER)
    os.mkfifo(tmp_path / "inside" / ADAPTER)
    with pytest.raises(AdapterError, match="no regular file"):
        load_below("inside")


def test_a_file_that_shrinks_while_it_is_read_is_refused(folder, monkeypatch):
    from engine.lora.pack import Packing

    def shrink(packing: Packing, name: str, tensor: torch.Tensor) -> None:
        os.truncate(folder / ADAPTER, 2000)

    monkeypatch.setattr(Packing, "add", shrink)
    refused(folder, "became shorter")


def test_experts_of_one_size_need_the_version(tmp_path):
    """gate and up as one parameter [experts, 2 * width, hidden] whose sizes are equal: peft 0.18 exchanged them."""
    from engine.lora.plan import plan_of
    from engine.lora.targets import ExpertsTarget, StackedSpot
    from engine.weights.files import TensorInfo

    class Square:
        def find(self, module: str) -> StackedSpot:
            return StackedSpot((ExpertsTarget("layers.0.experts.down", "down_proj", 3, 8, (8,), False, "out, in"),))

    info = {"A": TensorInfo((6, 8), "F32", 192, 0), "B": TensorInfo((8, 6), "F32", 192, 192)}
    tensors = {f"base_model.model.model.layers.0.mlp.experts.lora_{half}.weight": info[half] for half in info}

    def swapped(version: Any) -> bool:
        config = dataclasses.replace(read_config(json.dumps({**PLAIN, "r": 2}).encode()), version=version)
        return all(piece.swapped for piece in plan_of(tensors, config, Square()).pieces.values())

    assert [swapped(version) for version in ((0, 18), (0, 19), (1, 0))] == [True, False, False]
    with pytest.raises(AdapterError, match="peft_version"):
        swapped(None)


def test_another_tokenizer_or_template_is_reported_and_more_tokens_are_refused(folder, caplog):
    found = rules()
    found = Rules(
        found.targets, found.served, found.settings, found.dtype, str(tiny.checkpoint("llama")), tiny.VOCAB_SIZE
    )

    def lines() -> str:
        caplog.clear()
        load_adapter(Source(str(folder)), "x", found)
        return caplog.text

    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copy(tiny.checkpoint("llama") / name, folder)
    assert "tokenizer" not in lines() and "template" not in lines()  # noqa: PT018
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert "another chat template" in lines()
    assert "another tokenizer" not in lines(), "the same tokens, written in another way"
    tokenizer["added_tokens"].append({"id": 300, "content": "<more>"})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "another tokenizer" in lines()
    tokenizer["added_tokens"].append({"id": tiny.VOCAB_SIZE, "content": "<many>"})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(AdapterError, match=f"token {tiny.VOCAB_SIZE}"):
        lines()


def test_a_tower_that_serves_no_request_needs_no_place(tmp_path):
    """With --language-model-only the decoder's part of an adapter is served."""
    adapted("paligemma", tmp_path, r=2, target_modules=["q_proj", "linear"])
    config = load_model_config(tiny.checkpoint("paligemma"), without=("image", "video", "audio"))
    targets = targets_of(build_model(config, torch.float32))
    found = dataclasses.replace(rules(), targets=targets, served=targets.by_path)
    adapter = load_adapter(Source(str(tmp_path)), "x", found)
    assert adapter.sites.keys() == {f"layers.{number}.attention.qkv" for number in range(len(config.text.layers))}
    assert not adapter.in_towers
