"""Adapters of the start: what `check` reports, and faults that stop a start with one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.base.errors import ConfigError
from engine.lora.config import CONFIG
from server import cli
from tests import tiny
from tests.server.conftest import config_of, ready
from tests.tiny_adapters import DENSE, adapted

MODEL = str(tiny.checkpoint("qwen3"))


@pytest.fixture(scope="module")
def tone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("start") / "tone"
    adapted("qwen3", folder, r=3, target_modules=DENSE)
    return folder


@pytest.fixture(scope="module")
def broken(tone) -> Path:
    folder = tone.parent / "broken"
    folder.mkdir()
    for path in tone.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / CONFIG).write_text(json.dumps(json.loads((tone / CONFIG).read_text()) | {"use_dora": True}))
    return folder


def test_check_says_whether_an_adapter_fits(capsys, tone, broken):
    words = ["check", MODEL, "--enable-lora", "--lora-modules"]
    assert cli.main([*words, f"tone={tone}"]) == 0
    assert "adapter tone: fits; rank 3, 12 layers, " in capsys.readouterr().out
    assert cli.main([*words, f"tone={tone}", f"other={broken}"]) == 1
    said = capsys.readouterr().out
    assert "adapter tone: fits" in said
    assert "refused: --lora-modules other: adapter_config.json: use_dora=True" in said
    assert cli.main([*words, f"tone={tone}", "--max-lora-rank", "2"]) == 1
    assert "raise --max-lora-rank" in capsys.readouterr().out


@pytest.mark.parametrize(("which", "said"), [("broken", "use_dora"), ("none", "there is no such folder")])
async def test_a_fault_of_an_adapter_stops_the_start(tone, broken, which, said):
    lora = {"enable_lora": True, "lora_modules": (f"x={tone.parent / which}",)}
    with pytest.raises(ConfigError, match=f"--lora-modules x: .*{said}") as caught:
        async with ready(config_of(model={"model": MODEL, "num_threads": 1}, lora=lora)):
            raise AssertionError("the server started")
    assert "\n" not in str(caught.value)


async def test_a_folder_of_adapters_that_is_not_there_stops_the_start():
    lora = {"enable_lora": True, "lora_dir": "/none/such"}
    with pytest.raises(ConfigError, match="--lora-dir /none/such: there is no such folder"):
        async with ready(config_of(model={"model": MODEL, "num_threads": 1}, lora=lora)):
            raise AssertionError("the server started")


def test_bases_without_adapters_are_refused(capsys, tmp_path):
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF")
    assert cli.main(["check", str(file), "--enable-lora"]) == 1
    assert "--enable-lora" in capsys.readouterr().out
    assert cli.main(["check", MODEL, "--enable-lora", "--model-impl", "transformers"]) == 1
    assert "--enable-lora" in capsys.readouterr().out
