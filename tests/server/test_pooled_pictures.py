"""Decoders that see or hear, as embedders: a conversation's vector is that of transformers' last token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import engine.runtime
from mm.splice import splice
from tests import pooling_kit as kit
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.server.conftest import config_of, maker, ready
from tests.server.test_seeing import BROKEN, FILM, OTHER, PICTURE, WORDS

pytestmark = pytest.mark.asyncio(loop_scope="session")
POOLS = {"runner": "pooling"}


def said(*parts: dict) -> dict:
    return {"messages": [{"role": "user", "content": list(parts)}], "add_generation_prompt": True}


async def vector(client, path: str = "/v1/embeddings", **body) -> np.ndarray:
    answer = await client.post(path, body)
    assert answer.status == 200, answer.content
    return np.array([one.get("embedding", one.get("data")) for one in answer.json()["data"]], np.float32)


async def of_transformers(state, folder, *parts: dict) -> np.ndarray:
    """The last token's hidden state; our processor's pixels, transformers' positions."""
    prompt = await state.renderer.chat(said(*parts)["messages"], add_generation_prompt=True)
    processed = await state.media.load(prompt.media)
    made = splice(prompt.token_ids, prompt.slots, processed, state.media.processor)
    ids = torch.tensor(made.prompt_token_ids, dtype=torch.long)[None]
    marks = ids == tiny.IDS["<|IMAGE|>"], ids == tiny.IDS["<|VIDEO|>"]
    inputs = {"input_ids": ids, "mm_token_type_ids": marks[0].int() + 2 * marks[1].int()}
    for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        features = [part.features for item in processed for part in item.parts if part.modality == kind]
        if features:
            inputs[pixels] = torch.tensor(np.concatenate([one["pixel_values"] for one in features]))
            inputs[f"{kind}_grid_thw"] = torch.tensor(np.concatenate([one["grid_thw"] for one in features]))
    model = tiny.reference(folder).model
    model.rope_deltas = None
    with torch.no_grad():
        return kit.unit(model(**inputs).last_hidden_state[0, -1].numpy())


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
async def test_conversations_with_pictures_and_films_are_those_of_transformers(pooling, name):
    folder = tiny.checkpoint(name)
    client = await pooling(folder, **POOLS)
    for parts in ((PICTURE, WORDS), (WORDS,), (WORDS, OTHER, FILM, PICTURE)):
        wanted = [await of_transformers(client.state, folder, *parts)]
        for _ in range(2):  # the second time its blocks are cached
            kit.close(await vector(client, **said(*parts)), wanted)
    by_token = await vector(client, "/pooling", task="token_embed", **said(PICTURE, WORDS))
    kit.close(by_token[0][-1:], await vector(client, **said(PICTURE, WORDS)))
    assert (await vector(client, input=["the cat", "x"])).shape[0] == 2


async def test_conversations_that_cannot_be_seen_are_refused(pooling):
    client = await pooling(tiny.checkpoint("qwen3_vl"), **POOLS)
    long = {"type": "text", "text": "the bird " * 2000}
    for body, text in (
        (said(BROKEN, WORDS), "messages[0].content[0]"),
        (said(PICTURE, long), "maximum context length"),
        ({**said(PICTURE, WORDS), "truncate_prompt_tokens": 2}, "placeholder_mismatch"),
    ):
        answer = await client.post("/v1/embeddings", body)
        assert answer.status == 400, answer.content
        assert text in answer.content.decode(), answer.content


async def test_the_device_path_sees_the_same(pooling, monkeypatch):
    folder = tiny.checkpoint("qwen3_vl")
    wanted = await vector(await pooling(folder, **POOLS), **said(WORDS, PICTURE, FILM))
    monkeypatch.setattr(engine.runtime, "open_accelerator", lambda _device: HostAccelerator())
    async with ready(config_of(model={"model": str(folder), "num_threads": 1}, pooling=POOLS)) as state:
        found = (await maker(state)().post("/v1/embeddings", json=said(WORDS, PICTURE, FILM))).json()
        kit.close(np.array([found["data"][0]["embedding"]]), wanted)
