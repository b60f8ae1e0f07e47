"""A checkpoint whose decoder and tower are in other repositories: joined into one folder, served and checked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.base.errors import ConfigError
from engine.models.registry import load_model_config
from server.flags.config import Config, ModelFlags
from server.start.check import lines
from server.start.folders import fetched
from server.start.joined import is_split
from tests.models.harness import load
from tests.server.fake_hub import FakeHub, asked_in_place_of_the_real
from tests.tiny_sounds import SOUNDS

PARTS = {"audio_tower.": "org/hearing", "multi_modal_projector.": "org/model", "": "org/decoder"}
(ULTRAVOX,) = (family for family in SOUNDS if family.name == "ultravox")


def split(folder: Path, tower_apart: bool) -> dict[str, Path]:
    """Splits the checkpoint into two repositories, or into three with `tower_apart`; returns their folders by name."""
    config = json.loads((ULTRAVOX.folder / "config.json").read_text())
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(ULTRAVOX.folder / "model.safetensors").items():
        prefix = next(prefix for prefix in PARTS if name.startswith(prefix))
        own = prefix == "audio_tower." and not tower_apart
        renamed = name if own or prefix != "audio_tower." else f"model.encoder.{name.removeprefix(prefix)}"
        tensors.setdefault("org/model" if own else PARTS[prefix], {})[renamed] = tensor
    if tower_apart:  # a whole Whisper, with its decoder
        tensors["org/hearing"] |= {"model.decoder.layer_norm.weight": torch.ones(8), "proj_out.weight": torch.ones(8)}
    sections = {"org/decoder": config.pop("text_config"), "org/hearing": config["audio_config"], "org/model": config}
    config["text_model_id"] = "org/decoder"
    if tower_apart:
        config["audio_model_id"] = "org/hearing"
        config = {key: value for key, value in config.items() if key != "audio_config"}
    made = {}
    for name, held in tensors.items():
        made[name] = folder / name.replace("/", "-")
        made[name].mkdir()
        save_file(held, made[name] / "model.safetensors", {"format": "pt"})
        (made[name] / "config.json").write_text(json.dumps(config if name == "org/model" else sections[name]))
    for path in ULTRAVOX.folder.glob("*.json"):
        if path.name not in ("config.json", "preprocessor_config.json"):
            shutil.copy(path, made["org/model"])
    shutil.copy(ULTRAVOX.folder / "preprocessor_config.json", made["org/hearing" if tower_apart else "org/model"])
    return made


def flags(name: str, tmp_path: Path) -> Config:
    return Config(model=ModelFlags(model=name, download_dir=str(tmp_path / "kept")))


@pytest.mark.parametrize("tower_apart", [False, True])
def test_parts_on_the_hub_are_joined_and_encode_audio_like_the_whole(tmp_path, monkeypatch, tower_apart):
    with FakeHub(split(tmp_path, tower_apart)) as hub:
        asked_in_place_of_the_real(hub, monkeypatch, tmp_path / "cache")
        config = flags("org/model", tmp_path)
        checked = "\n".join(lines(config))
        assert "as UltravoxModel (Ultravox); takes" in checked
        assert not any(path.name == "model.safetensors" for path in (tmp_path / "kept").rglob("*"))
        folder, tokenizer, _ = fetched(config, None)
        assert tokenizer == folder
        assert (Path(folder) / "tokenizer.json").is_file()
        assert fetched(config, None)[0] == folder
    assert not is_split(folder)
    features = ULTRAVOX.features(ULTRAVOX.folder, torch.randn(9000).numpy())[0]["input_features"]
    given = {"input_features": features, "num_frames": torch.tensor(features.shape[-1])}
    with torch.inference_mode():
        found = load(folder).towers["audio"].encode(given)
        assert torch.equal(found, load(ULTRAVOX.folder).towers["audio"].encode(given))


def test_parts_in_folders_are_joined_and_one_that_is_missing_is_named(tmp_path):
    made = split(tmp_path, tower_apart=False)
    own = made["org/model"]
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps({**config, "text_model_id": str(made["org/decoder"])}))
    folder, *_ = fetched(flags(str(own), tmp_path), None)
    assert load(folder).config.architecture == "UltravoxModel"
    with pytest.raises(ConfigError, match="names the decoder, whose configuration is not here"):
        load_model_config(own)
    (own / "config.json").write_text(json.dumps({**config, "text_model_id": str(tmp_path / "gone")}))
    with pytest.raises(ConfigError, match="gone"):
        fetched(flags(str(own), tmp_path), None)
