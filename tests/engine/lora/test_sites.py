"""Models that cannot have adapters by name are refused at start, and --lora-target-modules narrows the layers."""

from dataclasses import replace

import pytest
import torch

from engine.base.config import LoraConfig
from engine.base.errors import ConfigError
from engine.lora.sites import changed, give_host_sites
from engine.models.registry import build_model, load_model_config
from engine.weights.gguf import GGUF
from tests import pooling_kit, tiny


def test_a_gguf_file_is_refused(tmp_path):
    (tmp_path / GGUF).touch()
    config = replace(load_model_config(tiny.checkpoint("qwen3")), folder=str(tmp_path))
    with pytest.raises(ConfigError, match="GGUF"):
        give_host_sites(build_model(config, torch.float32), LoraConfig())


def test_a_pooled_decoder_has_no_head_to_change():
    folder = pooling_kit.embedder("qwen3")
    sites = give_host_sites(build_model(load_model_config(folder), torch.float32), LoraConfig())
    assert "layers.0.attention.qkv" in sites
    assert "head" not in sites


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        (("q_proj",), {"attention.qkv"}),
        (("o_proj", "up_proj"), {"o", "experts.gate_up", "experts.down"}),
        (("gate_up_proj",), {"experts.gate_up", "experts.down"}),
    ],
)
def test_targets_name_modules_of_the_checkpoint(targets, found):
    """Experts have both products, or none."""
    model = build_model(load_model_config(tiny.checkpoint("qwen3_moe")), torch.float32)
    paths = [path for path, _ in changed(model, LoraConfig(targets=targets))]
    assert {path.split(".", 2)[2] for path in paths if path.startswith("layers.0.")} == found
