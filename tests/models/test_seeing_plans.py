"""Vision families before loading and with random weights: what `check` prints, and how much memory they take."""

import pytest
import torch

from engine.base.config import EngineConfig
from engine.run.estimate import estimate
from engine.weights.files import open_checkpoint
from server import cli
from tests import tiny
from tests.models.harness import load
from tests.tiny_seeing import CHECKPOINTS


@pytest.mark.parametrize("name", CHECKPOINTS)
@torch.inference_mode()
def test_random_weights_see(name):
    model = load(tiny.checkpoint(name), load_format="dummy")
    tower = model.towers["image"]
    rows = tower.encode(tower.example("image", 64))
    assert rows.isfinite().all()
    assert rows.shape[1] == model.config.text.hidden_size * model.config.row_parts


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_estimate_counts_towers(name):
    folder = tiny.checkpoint(name)
    shards = open_checkpoint(folder)
    whole = estimate(EngineConfig(str(folder)), shards)
    blind = estimate(EngineConfig(str(folder), without_media=("image", "video", "audio")), shards)
    assert whole.tensors.read > blind.tensors.read
    assert whole.weight_bytes > blind.weight_bytes
    assert whole.kv_bytes == blind.kv_bytes


def test_check_names_what_is_read(capsys):
    assert cli.main(["check", str(tiny.checkpoint("mistral3"))]) == 0
    assert "as Mistral3ForConditionalGeneration (Mistral 3); takes text, image" in capsys.readouterr().out
    assert cli.main(["check", str(tiny.checkpoint("mistral3")), "--limit-mm-per-prompt", "image=0"]) == 0
    assert "takes text\n" in capsys.readouterr().out
