"""Adapters named ORG/NAME[@revision][/subfolder]: the two files are fetched, and every failure is one line."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.base.errors import ConfigError
from engine.weights.files import ADAPTER
from server.flags.config import Config
from server.flags.lora_flags import LoraFlags, Module
from server.start.adapter_hub import fetch_adapter, is_hub_adapter
from server.start.adapters import at_run_time, source_of
from server.start.hub import Hub
from tests.server.fake_hub import FakeHub, asked_in_place_of_the_real

HUB = Hub(flag="--lora-modules")
MOST = 1 << 20


@pytest.fixture
def fake(monkeypatch, tmp_path) -> Iterator[FakeHub]:
    """The hub that huggingface_hub uses; its cache is empty."""
    with FakeHub({}) as hub:
        asked_in_place_of_the_real(hub, monkeypatch, tmp_path / "cache")
        yield hub


@pytest.fixture
def offline(monkeypatch) -> Callable[[], None]:
    from huggingface_hub import constants

    return lambda: monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def repository(fake, tmp_path) -> Path:
    """org/tone, with an adapter at its root and one in a subfolder, and files that are not fetched."""
    root = tmp_path / "tone"
    for folder, size in ((root, 2), (root / "small" / "v2", 3)):
        folder.mkdir(parents=True)
        save_file({"base_model.model.layers.0.o_proj.lora_A.weight": torch.ones(size, 3)}, folder / ADAPTER)
        (folder / "adapter_config.json").write_text('{"r": 2}')
        (folder / "adapter_model.bin").write_bytes(b"pickle")
        (folder / "optimizer.pt").write_bytes(b"pickle")
    (root / "README.md").write_text("not for us")
    fake.repositories["org/tone"] = root
    return root


@pytest.mark.parametrize(
    ("path", "within"), [("org/tone", ""), ("org/tone/small/v2", "small/v2"), ("org/tone@main", "")]
)
def test_only_the_two_files_are_fetched(repository, path, within):
    folder = fetch_adapter(path, HUB, MOST)
    assert {each.name for each in folder.iterdir() if each.is_file()} == {"adapter_config.json", ADAPTER}
    assert (folder / ADAPTER).read_bytes() == (repository / within / ADAPTER).read_bytes()


def test_a_complete_copy_serves_without_the_hub(repository, offline):
    folder = fetch_adapter("org/tone", HUB, MOST)
    offline()
    assert fetch_adapter("org/tone", HUB, MOST) == folder
    with pytest.raises(ConfigError, match="no complete copy of the adapter"):
        fetch_adapter("org/tone/small/v2", HUB, MOST)


FAULTS = {
    "org/none": "--lora-modules org/none: .* has no such repository",
    "org/tone@other": "other",
    "org/tone/large": "the repository has no large/adapter_config.json and no large/adapter_model.safetensors",
}


@pytest.mark.parametrize(("path", "said"), FAULTS.items())
def test_faults_are_one_line(repository, path, said):
    with pytest.raises(ConfigError, match=said) as caught:
        fetch_adapter(path, HUB, MOST)
    assert "\n" not in str(caught.value)


def test_a_repository_without_access_and_a_broken_connection(fake, repository):
    fake.broken[ADAPTER] = 10
    with pytest.raises(ConfigError, match=r"interrupted|failed"):
        fetch_adapter("org/tone", HUB, MOST)
    fake.private.add("org/tone")
    with pytest.raises(ConfigError, match="no such repository or does not show it"):
        fetch_adapter("org/tone", HUB, MOST)


def test_a_file_beyond_the_limit_is_not_fetched(fake, repository):
    with pytest.raises(ConfigError, match="lora-max-bytes"):
        fetch_adapter("org/tone", HUB, 1)
    assert ADAPTER not in fake.fetched()


def test_names_of_folders_come_before_names_of_the_hub(repository, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_adapter("org/tone")
    (tmp_path / "org" / "tone").mkdir(parents=True)
    assert not is_hub_adapter("org/tone")
    assert not any(map(is_hub_adapter, ("tone", "/org/tone", "../tone", "org/../tone", "org/tone/../x")))
    config = Config(lora=LoraFlags(enable_lora=True, lora_dir=str(tmp_path)))
    assert at_run_time(config, "org/tone") is None, "a folder below --lora-dir"
    assert at_run_time(config, "tone") is None
    source = source_of(config, Module("x", "org/tone@main", "0" * 64))
    assert (source.root, source.sha256) == ("org/tone@main", "0" * 64)
    assert hashlib.sha256(Path(source.folder, ADAPTER).read_bytes())
