"""Layers whose A x the kernel before them has computed: which they are, and that answers are the same."""

import asyncio

import pytest

from engine.base.config import LoraConfig
from engine.kernels.lora import next_low
from engine.layers import placed_device
from engine.lora.sites import changed
from engine.run import start
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import answer, running, text_request
from tests.lora_kit import adapted, drawn

PROMPT = list(range(5, 30))
# Before these no kernel could: the first layer, attention's output, the sampled rows, and experts that a router chose.
APART = ("layers.0.attention.qkv", ".o", "head", ".experts.gate_up")


async def answers(engine, adapters) -> list[list[list[int]]]:
    """Of one row, then of a row of each adapter and of the base in one batch."""
    asked = [adapted(text_request(PROMPT, 4, ignore_eos=True), each) for each in (*adapters, None)]
    alone = [await answer(engine, asked[0])]
    return alone + await asyncio.gather(*(answer(engine, each) for each in asked))


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
async def test_layers_of_few_rows_read_what_the_kernel_before_has_computed(name, monkeypatch):
    monkeypatch.setattr(start, "open_accelerator", lambda _device: HostAccelerator())
    folder, launched, found = tiny.checkpoint(name), set[int](), []
    adapters, kernel = (drawn(folder, 4, 1, scale=0.15), drawn(folder, 3, 2, scale=0.25)), placed_device.shrink

    def noted(x, matrices, shape, rows, *rest, **options):
        if rows.tile == 1 and rows.count <= next_low.MOST_ROWS:
            launched.add(shape.number)
        return kernel(x, matrices, shape, rows, *rest, **options)

    monkeypatch.setattr(placed_device, "shrink", noted)
    for apart in (False, True):
        if apart:
            monkeypatch.setattr(placed_device, "empty_next_low", lambda *_: None)
        async with running(folder, lora=LoraConfig(max_loras=4)) as engine:
            launched.clear()
            found.append(await answers(engine, adapters))
            layers = await engine.on_device(lambda runtime: changed(runtime.model, LoraConfig()))
            paths = {path for number, (path, _) in enumerate(layers) if number in launched}
            assert paths == {path for path, _ in layers if apart or path.endswith(APART)}
    assert found[0] == found[1]
