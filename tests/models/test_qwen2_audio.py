"""Qwen2-Audio against transformers: an engine's greedy tokens for sounds of several lengths, and refused settings."""

from __future__ import annotations

import asyncio
import functools

import numpy as np
import pytest
import torch

import engine.run.start
from engine.base.request import MediaInput, Request, SamplingParams
from engine.models.registry import load_model_config
from mm.errors import MediaError
from mm.item import MediaItem, MediaOptions
from mm.processors.qwen2_audio import Qwen2Audio
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import answer, running
from tests.tiny_hearing import qwen2_audio

SAMPLES = (400, 8000, 16160, 30000)
TOKENS = 10
BEFORE, AFTER = [5, 9, tiny.IDS["<|audio_bos|>"]], [tiny.IDS["<|audio_eos|>"], 40, 7]


def processor() -> Qwen2Audio:
    return Qwen2Audio(qwen2_audio(), load_model_config(qwen2_audio()).raw)


def sound(count: int) -> np.ndarray:
    return np.random.default_rng(count).normal(0, 0.1, count).astype(np.float32)


def request(count: int) -> Request:
    made = processor().process(MediaItem("audio", sound(count)), count.to_bytes(16, "little"), MediaOptions())
    part, filling = made.parts[0], processor().fill(made)
    ids = [*BEFORE, *filling.token_ids, *AFTER]
    media = MediaInput("audio", part.hash, ((len(BEFORE), part.num_tokens),), part.num_tokens, part.features)
    return Request(np.asarray(ids, np.int32), SamplingParams(TOKENS, 0.0, ignore_eos=True), media=(media,))


@functools.cache
def wanted(count: int) -> list[int]:
    """Greedy tokens of transformers, with its own features and numbers of rows."""
    from transformers import Qwen2AudioForConditionalGeneration, WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor.from_pretrained(qwen2_audio())
    made = extractor(
        np.pad(sound(count), (0, max(0, 480 - count))),
        sampling_rate=16000,
        return_tensors="pt",
        padding="max_length",
        return_attention_mask=True,
    )
    rows = ((int(made.attention_mask.sum()) - 1) // 2 + 1 - 2) // 2 + 1
    with tiny.quiet():
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        model = Qwen2AudioForConditionalGeneration.from_pretrained(qwen2_audio(), **options).eval()
    ids = torch.tensor([[*BEFORE, *[tiny.IDS["<|AUDIO|>"]] * rows, *AFTER]])
    with torch.inference_mode():
        for _ in range(TOKENS):
            mask = {"attention_mask": torch.ones_like(ids), "feature_attention_mask": made.attention_mask}
            logits = model(input_ids=ids, input_features=made.input_features, **mask).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    return ids[0, -TOKENS:].tolist()


async def check(**settings):
    async with running(qwen2_audio(), **settings) as engine:
        found = await asyncio.gather(*(answer(engine, request(count)) for count in SAMPLES))
    for count, (got,) in zip(SAMPLES, found):
        assert got == await asyncio.to_thread(wanted, count), count


@pytest.mark.parametrize("chunk", [0, 13])
async def test_tokens_equal_transformers(chunk):
    await check(max_prefill_chunk=chunk)


async def test_so_do_tokens_of_an_accelerators_steps(monkeypatch):
    monkeypatch.setattr(engine.run.start, "open_accelerator", lambda device: HostAccelerator())
    await check()


def test_a_sound_longer_than_the_window_is_refused_with_the_way_out():
    long = MediaItem("audio", np.zeros(480001, np.float32))
    with pytest.raises(MediaError, match=r"30 seconds that this model takes at a time.*/v1/audio/transcriptions"):
        processor().process(long, bytes(16), MediaOptions())
