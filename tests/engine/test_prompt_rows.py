"""Prompt embeddings: rows that equal the embeddings of some tokens give the same results as these tokens."""

import numpy as np
import pytest
import torch
from safetensors import safe_open

import engine.run.start
from engine import SamplingParams
from engine.base.errors import ConfigError, RequestError
from engine.base.request import ROWS, MediaInput, Request
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import answer, running, text_request

IDS = np.random.default_rng(3).integers(3, 200, 50).astype(np.int32)


def embeddings(name: str, scale: float = 1.0) -> np.ndarray:
    """The checkpoint's embedding table, as the first layer reads it; float32 [vocab, hidden]."""
    with safe_open(tiny.checkpoint(name) / "model.safetensors", "pt") as file:
        found = next(key for key in file.keys() if key.endswith("embed_tokens.weight"))  # noqa: SIM118
        return file.get_tensor(found).float().numpy() * np.float32(scale)


def of_rows(table: np.ndarray, start: int, end: int, max_tokens: int = 8) -> Request:
    """The prompt IDS, with embedding rows in place of the tokens `start` to `end`."""
    ids = IDS.copy()
    ids[start:end] = 0
    rows = table[IDS[start:end]]
    item = MediaInput("prompt", rows.tobytes()[:16].ljust(16), ((start, end - start),), end - start, {ROWS: rows})
    return Request(ids, SamplingParams(max_tokens=max_tokens, temperature=0.0), media=(item,))


@pytest.mark.parametrize("device", ["host", "device", "device without graphs"])
@pytest.mark.parametrize("name", ["qwen3", "omni", "qwen3_vl", "gemma3"])
async def test_rows_are_worth_their_tokens(monkeypatch, name, device):
    if device != "host":
        monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    scale = 1.0
    if name == "gemma3":
        width = embeddings(name).shape[1]
        scale = float(torch.tensor(width**0.5))
    table = embeddings(name, scale)
    settings = {"encoder_cache_tokens": 64, "enforce_eager": device.endswith("graphs"), "max_prefill_chunk": 16}
    async with running(tiny.checkpoint(name), enable_prompt_embeds=True, **settings) as own:
        wanted = await answer(own, text_request(IDS, 8))
        for start, end in ((0, 50), (7, 30), (49, 50)):
            assert await answer(own, of_rows(table, start, end)) == wanted, (start, end)


async def test_rows_of_another_shape_never_reach_the_device():
    table = embeddings("qwen3")
    async with running(tiny.checkpoint("qwen3"), enable_prompt_embeds=True) as own:
        for rows in (table[:, :-1], table.astype(np.float64)):
            with pytest.raises(RequestError, match="float32 \\[50, "):
                own.submit(of_rows(rows, 0, 50))
    async with running(tiny.checkpoint("qwen3")) as plain:
        with pytest.raises(RequestError, match="text only, not prompt"):
            plain.submit(of_rows(table, 0, 50))


@pytest.mark.parametrize("name", ["gpt2", "cwm"])
async def test_models_that_read_tokens_only_say_so_at_the_start(name):
    with pytest.raises(ConfigError, match="--enable-prompt-embeds"):
        async with running(tiny.checkpoint(name), enable_prompt_embeds=True):
            pass
