"""Expert load of a step: reading the load starts counting the newest step, and the next read reports the counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import engine.run.start
from engine.kernels.moe.expert_load import count_expert_load
from engine.models.registry import load_model_config
from engine.step.parts.expert_load import ExpertLoad
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.stand_in_accelerator import StandInAccelerator
from tests.engine.test_routed_experts import oracle, weights_of_modules
from tests.engine_kit import answer, running, text_request


def test_pairs_of_real_rows_are_counted_by_layer():
    """Layers differ in top_k; the last layer has fewer rows; values after the real rows come from older steps."""
    choices = torch.tensor([[3, 0, 3, 1, 2, 2], [4, 4, 1, 1, 1, 1]], dtype=torch.int32)
    out, one = torch.zeros(2, 3, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    count_expert_load(out, choices, torch.tensor([2, 1], dtype=torch.int32), 2 * one, one, 5)
    assert out.tolist() == [[3, 2, 4], [1, 1, 1]]


@pytest.mark.parametrize("accelerator", [None, HostAccelerator, StandInAccelerator])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
async def test_reading_the_load_reports_what_the_last_reading_counted(name, accelerator, monkeypatch):
    """A prompt of one step: every layer routes all of its tokens, but our last layer only the sampled token."""
    if accelerator is not None:
        monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: accelerator())
    folder, prompt = tiny.checkpoint(name), np.arange(2, 40)
    text = load_model_config(folder).text
    layers = [number for number, layer in enumerate(text.layers) if layer.experts]
    numbers, routing = oracle, text.routings[0]
    if text.module_routings:
        layers, numbers = list(range(len(text.layers) - len(text.routings), len(text.layers))), weights_of_modules
    routers = numbers(name)(prompt.tolist()).topk(routing.top_k, -1).indices  # [tokens, layers, top_k]
    async with running(folder) as served:
        await answer(served, text_request(prompt, 1))
        assert await served.look_at_experts() == []
        found = await settled(served)
        assert [layer.layer for layer in found] == layers
        for place, layer in enumerate(found):
            one = layer.layer == len(text.layers) - 1 and not text.module_routings
            chosen = routers[-1:, place] if one else routers[:, place]
            counts = chosen.flatten().bincount(minlength=routing.num_experts)
            assert layer.touched == int((counts > 0).sum())
            assert layer.largest == pytest.approx(int(counts.max()) / len(chosen))


async def settled(served):
    """The next report that is not empty: a CPU's stream counts concurrently with the calling thread."""
    while not (found := await served.look_at_experts()):
        pass
    return found


async def test_a_model_without_experts_reports_no_load():
    async with running(tiny.checkpoint("llama")) as served:
        assert await served.look_at_experts() == []
        assert served.inspect().runtime.executor.part(ExpertLoad) is None
