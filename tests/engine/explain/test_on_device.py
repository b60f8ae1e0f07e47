"""On a GPU, a model launches the kernels that explain names. Needs a device."""

import json

import pytest
import torch

from engine.cache.layout import CacheLayout
from engine.explain.launches import Launches
from engine.explain.parts import objects_of
from engine.explain.runs import fill, steps_of, towers_of
from engine.explain.sections import kernels_of
from engine.kernels.gemm.pack import Placement
from engine.models.registry import build_model, load_model_config
from engine.weights.load import load_weights
from tests import tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]
DEVICE = "cuda:0"
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def kernels(config, placement, pretend):
    """Kernels of the model's steps and of each tower's items, by path and size."""
    with torch.no_grad():
        model = build_model(config, placement.dtype, DEVICE)
        if not pretend:
            load_weights(model, config.folder, "dummy", placement)
        owners = {id(part): path for path, part in objects_of(model).items()} | {id(model): ""}
        with Launches(owners, DEVICE, pretend) as launches:
            if pretend:
                fill(model, launches.tensors, placement, lambda _: True)
            steps = steps_of(model, CacheLayout(model.cache_specs(), 16), DEVICE, launches)
            return [kernels_of(each) for each in (steps, *towers_of(model, launches).values())]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen3", {}),
        ("qwen3", {"quantization_config": FP8, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}),
        ("qwen3_moe", {}),
        ("gpt_oss", {}),
        ("gemma3", {}),
        ("lfm2", {}),
        ("omni", {}),
    ],
    ids=["dense", "codes", "experts", "sinks", "sliding", "convolution", "media"],
)
def test_what_is_named_is_launched_here(tmp_path, name, settings):
    written = json.loads((tiny.checkpoint(name) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**written, **settings}))
    config = load_model_config(tmp_path)
    placement = Placement(torch.bfloat16, DEVICE)
    wanted = kernels(config, placement, pretend=False)
    assert kernels(config, placement, pretend=True) == wanted
    assert any("_kernel" in kernel for sizes in wanted[0].values() for names in sizes.values() for kernel in names)
