"""Adapters of a pooling decoder: vectors of PEFT's model, by the adapter's name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from server.app import make_app
from tests import tiny
from tests.server.asgi import Client
from tests.server.conftest import config_of, ready
from tests.tiny_adapters import DENSE, adapted

pytestmark = pytest.mark.asyncio(loop_scope="session")
IDS = [[5, 40, 41, 42, 7], [99, 100, 3]]


def last_hidden(model: Any, ids: list[int]) -> np.ndarray:
    """The normalised hidden state of the last token."""
    with torch.inference_mode():
        states = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0, -1]
    return (states / states.norm()).numpy()


async def test_vectors_are_those_of_peft_by_the_adapters_name(tmp_path):
    model = adapted("qwen3", tmp_path / "tone", r=4, target_modules=DENSE)
    lora = {"enable_lora": True, "lora_modules": (f"tone={tmp_path / 'tone'}",)}
    flags = {"model": {"model": str(tiny.checkpoint("qwen3")), "num_threads": 1}, "pooling": {"runner": "pooling"}}
    async with ready(config_of(**flags, lora=lora)) as state:
        client = Client(make_app(state))

        async def vectors(name: str) -> np.ndarray:
            answer = await client.post("/v1/embeddings", {"input": IDS, "model": name})
            assert answer.status == 200, answer.content
            assert answer.json()["model"] == name
            return np.array([each["embedding"] for each in answer.json()["data"]])

        ours, base = await vectors("tone"), await vectors(state.names[0])
        assert (await client.post("/v1/embeddings", {"input": IDS, "model": "none"})).status == 404
    with torch.inference_mode():
        np.testing.assert_allclose(ours, [last_hidden(model, ids) for ids in IDS], atol=1e-4)
        with model.disable_adapter():
            np.testing.assert_allclose(base, [last_hidden(model, ids) for ids in IDS], atol=1e-4)
    assert np.abs(ours - base).max() > 1e-2
