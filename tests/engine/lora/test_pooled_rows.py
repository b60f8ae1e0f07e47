"""Pooled inputs with adapters: the vectors of a checkpoint into which the adapter is merged."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from engine.base.config import LoraConfig
from engine.engine import Engine
from engine.run import start
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.test_pooling_steps import POOLS, answered
from tests.engine.test_pooling_steps import request as pooled
from tests.engine_kit import prompts, running
from tests.lora_kit import adapted, drawn, merged

INPUTS = prompts(12, tiny.FIRST_SPECIAL, seed=3, longest=60)


@pytest.mark.parametrize("backend", ["host", "device"])
async def test_vectors_equal_merged_weights_in_one_batch(backend, monkeypatch, tmp_path):
    folder = tiny.checkpoint("qwen3")
    some = None, drawn(folder, 4, 1, ("q_proj", "down_proj")), drawn(folder, 8, 2, ("v_proj", "up_proj"))

    async def vectors(engine: Engine, number: int, lora: bool) -> list[np.ndarray]:
        asked = pooled(INPUTS[number::3])
        return await answered(engine, adapted(asked, some[number]) if lora else replace(asked, lora=None))

    want = []
    for number, each in enumerate(some):
        of = folder if each is None else merged(folder, each, tmp_path / str(number))
        async with running(of, **POOLS) as engine:
            want.append(await vectors(engine, number, False))
    if backend == "device":
        monkeypatch.setattr(start, "open_accelerator", lambda _device: HostAccelerator())
    async with running(folder, **POOLS, lora=LoraConfig(max_loras=2)) as engine:
        for _ in range(2):
            got = await asyncio.gather(*(vectors(engine, number, True) for number in range(3)))
            for mine, other in zip(got, want):
                np.testing.assert_allclose(np.stack(mine), np.stack(other), atol=1e-4)
            base = await vectors(engine, 0, True)
            np.testing.assert_allclose(np.stack(base), np.stack(want[0]), atol=1e-4)
