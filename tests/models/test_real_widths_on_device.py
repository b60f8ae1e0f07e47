"""Published widths on a real accelerator: heads of 72, 80, 88, 96 and 256, towers of 1,152 and 1,280 columns, experts.

Tiny checkpoints never reach the tiles, remainders and splits of real widths. A text's logits and a tower's rows are
compared with those of the same weights on the CPU, in float32.
"""

import numpy as np
import pytest
import torch

import engine.weights.load
from _fast import cpu
from engine.device.accelerator import Accelerator
from engine.models.registry import build_model, load_model_config
from engine.weights.load import load_weights
from tests.engine.test_on_device import logits_error
from tests.invariance.devices import Device
from tests.models.harness import Harness
from tests.models.harness import load as load_model
from tests.models.real_widths import HEARING, NAMES, SEEING, draw_on_host, folder_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]
CUDA = Device("cuda")
ROWS = 400  # of a picture: enough for attention in whole tiles


@pytest.fixture(autouse=True)
def same_weights(monkeypatch):
    monkeypatch.setattr(engine.weights.load, "draw", draw_on_host)
    threads = torch.get_num_threads(), cpu.num_threads()
    torch.set_num_threads(2)  # other tests run in parallel
    cpu.set_num_threads(2)
    yield
    torch.set_num_threads(threads[0])
    cpu.set_num_threads(threads[1])


@pytest.mark.parametrize("name", NAMES)
async def test_logits_of_a_text_are_those_of_the_cpu(name):
    tokens = np.random.default_rng(3).integers(2, 250, 150).tolist()
    harness = Harness(load_model(folder_of(name), "float32", "dummy"))
    wanted = harness.prefill(harness.add(tokens))
    settings = {"load_format": "dummy", "dtype": "bfloat16", "logprobs_mode": "raw_logits"}
    async with CUDA.running(folder_of(name), **settings) as served:
        found = await logits_error(served, tokens, wanted)
    # bfloat16 on a CPU is as far off: gemma3-vision by 0.1 on average; in minimax_m2 a quarter chooses other experts.
    near = found[:, 0] < 0.35
    assert near.mean() > 0.7, np.sort(found[:, 0])[-9:]
    assert found[near, 0].mean() < 0.15


def filled(features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A blank item whose pixels or frames are replaced by noise."""
    draw, found = torch.Generator().manual_seed(2), {}
    for key, values in features.items():
        host = values.cpu()
        if key == "pixels":
            host = torch.randint(0, 256, host.shape, generator=draw, dtype=torch.uint8)
        elif "pixel" in key or key == "input_features":
            host = torch.randn(host.shape, generator=draw)
        found[key] = host
    return found


@pytest.mark.parametrize("name", [*SEEING, *HEARING])
@torch.inference_mode()
def test_rows_of_a_picture_or_a_sound_are_those_of_the_cpu(name):
    stream = torch.cuda.current_stream()
    accelerator = Accelerator("cuda:0")
    try:
        model = build_model(load_model_config(folder_of(name)), torch.bfloat16, "cuda:0")
        load_weights(model, str(folder_of(name)), "dummy")
        kind = "audio" if name in HEARING else "image"
        tower = load_model(folder_of(name), "float32", "dummy").towers[kind]
        features = filled(tower.example(kind, ROWS))
        want = tower.encode(features)
        got = model.towers[kind].encode(features).float().cpu()
        assert got.shape == want.shape
        assert (got - want).norm() <= 0.05 * want.norm(), float((got - want).norm() / want.norm())
    finally:
        accelerator.close()
        torch.cuda.set_stream(stream)
