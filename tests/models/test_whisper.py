"""Whisper against transformers: its encoder, and an engine's tokens: batched, chunked, preempted, cached, in graphs."""

from __future__ import annotations

import asyncio
import functools
import threading

import numpy as np
import pytest
import torch

import engine.run.start
from engine.base.errors import ConfigError, RequestError
from engine.base.request import MediaInput, Request, SamplingParams, TimestampRules
from engine.models.registry import load_model_config
from mm.item import MediaItem, MediaOptions
from mm.processors.whisper import Whisper
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import answer, running
from tests.models.harness import load
from tests.tiny_hearing import CONTEXT, IDS, MELS, POSITIONS, SUPPRESSED, oracle, whisper

PROMPTS = [
    [IDS["<|startoftranscript|>"], IDS["<|en|>"], IDS["<|transcribe|>"], IDS["<|notimestamps|>"]],
    [IDS["<|startofprev|>"], *range(30, 50), IDS["<|startoftranscript|>"], IDS["<|de|>"], IDS["<|translate|>"]],
    [IDS["<|startoftranscript|>"]],
]
TOKENS = 12


@functools.cache
def processor() -> Whisper:
    config = load_model_config(whisper())
    return Whisper(whisper(), config.raw)


def sound(number: int) -> np.ndarray:
    draw = np.random.default_rng(number)
    return draw.normal(0, 0.1, 12000 + 7000 * number).astype(np.float32)


@functools.cache
def processed(number: int):
    return processor().process(MediaItem("audio", sound(number)), bytes([number]) * 16, MediaOptions())


def features(number: int) -> torch.Tensor:
    return torch.from_numpy(processed(number).parts[0].features["input_features"])


def request(number: int, tokens: list[int], **sampling) -> Request:
    """A window of sound, followed by text tokens."""
    item = processed(number)
    filling, part = processor().fill(item), item.parts[0]
    media = MediaInput("audio", part.hash, filling.runs[0], part.num_tokens, part.features)
    ids = np.concatenate([filling.token_ids, np.asarray(tokens, np.int32)])
    given = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, **sampling}
    return Request(ids, SamplingParams(**given), media=(media,))


@functools.cache
def wanted(number: int, prompt: int) -> list[int]:
    """Greedy tokens of transformers for a window and a prompt."""
    model, ids = oracle(), torch.tensor([PROMPTS[prompt]])
    with torch.inference_mode():
        rows = model.model.encoder(features(number)[None]).last_hidden_state
        for _ in range(TOKENS):
            logits = model(encoder_outputs=(rows,), decoder_input_ids=ids).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    return ids[0, len(PROMPTS[prompt]) :].tolist()


def test_features_are_those_of_the_published_extractor():
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor.from_pretrained(whisper())
    for number in range(3):
        theirs = extractor(sound(number), sampling_rate=16000, return_tensors="np").input_features[0]
        assert np.abs(theirs - features(number).numpy()).max() < 1e-4


def test_the_encoder_makes_transformers_rows_and_blank_ones_behind_them():
    with torch.inference_mode():
        rows = load(whisper()).audio.encode({"input_features": features(1)})
        theirs = oracle().model.encoder(features(1)[None]).last_hidden_state[0]
    assert rows.shape == (128, 64)
    assert (rows[:POSITIONS] - theirs).abs().max() < 1e-4
    assert not rows[POSITIONS:].any()


def test_windows_of_another_length_are_refused():
    with pytest.raises(RequestError, match="windows of 80 mel bins and 200 frames"):
        load(whisper()).audio.encode({"input_features": torch.zeros(MELS, 100)})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"block_size": 48}, "--block-size 48: this model's 128 rows of sound need 16 or 32"),
        ({"max_model_len": 128}, "--max-model-len 128: the sound of a prompt takes 128 tokens"),
        ({"without_media": ("audio",)}, "Whisper only transcribes audio"),
    ],
)
async def test_flags_that_do_not_fit_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        async with running(whisper(), **settings):
            raise AssertionError("it started")


TIMES = TimestampRules(IDS["<|0.00|>"], IDS["<|endoftext|>"], 50)


@functools.cache
def wanted_with_times(number: int) -> list[int]:
    """Greedy tokens of transformers under its own timestamp rules."""
    from transformers import SuppressTokensLogitsProcessor, WhisperTimeStampLogitsProcessor

    model, start = oracle(), PROMPTS[0][:3]
    ids = torch.tensor([start])
    rules = [
        SuppressTokensLogitsProcessor(SUPPRESSED),
        WhisperTimeStampLogitsProcessor(model.generation_config, begin_index=len(start)),
    ]
    with torch.inference_mode():
        rows = model.model.encoder(features(number)[None]).last_hidden_state
        for _ in range(30):
            scores = model(encoder_outputs=(rows,), decoder_input_ids=ids).logits[:, -1]
            for rule in rules:
                scores = rule(ids, scores)
            ids = torch.cat([ids, scores.argmax(-1)[None]], 1)
            if ids[0, -1] == IDS["<|endoftext|>"]:
                break
    return ids[0, len(start) :].tolist()


async def check_times():
    given = {"max_tokens": 30, "bad_words": tuple((token,) for token in SUPPRESSED), "timestamps": TIMES}
    ending = {"ignore_eos": False, "eos_token_ids": (IDS["<|endoftext|>"],)}
    async with running(whisper()) as engine:
        plain = answer(engine, request(0, PROMPTS[0]))
        sent = [answer(engine, request(number, PROMPTS[0][:3], **given, **ending)) for number in range(3)]
        *found, untimed = await asyncio.gather(*sent, plain)
    for number, (got,) in enumerate(found):
        want = await asyncio.to_thread(wanted_with_times, number)
        assert got == want, number
        assert any(token >= TIMES.first for token in want[1:]), "no time but the first"
    assert untimed[0] == await asyncio.to_thread(wanted, 0, 0)


async def test_times_are_written_by_transformers_rules():
    await check_times()


async def test_times_are_written_so_by_an_accelerators_steps(monkeypatch):
    monkeypatch.setattr(engine.run.start, "open_accelerator", lambda device: HostAccelerator())
    await check_times()


HEADS = ((1, 0), (2, 3), (1, 2))


@pytest.mark.parametrize("accelerated", [False, True])
async def test_attention_to_sound_is_transformers(accelerated, monkeypatch):
    if accelerated:
        monkeypatch.setattr(engine.run.start, "open_accelerator", lambda device: HostAccelerator())
    ids = [*PROMPTS[0], 40, 41, 60, 44]
    with torch.inference_mode():
        made = oracle()(features(1)[None], decoder_input_ids=torch.tensor([ids]), output_attentions=True)
    theirs = torch.stack([made.cross_attentions[layer][0, head] for layer, head in HEADS]).numpy()
    async with running(whisper()) as served:
        given = processed(1).parts[0].features
        beside = asyncio.gather(*(answer(served, request(number, PROMPTS[0])) for number in range(3)))
        found = await served.sound_attention(given, ids, HEADS)
        assert found.shape == theirs.shape
        assert np.abs(found - theirs).max() < 1e-5
        assert [got for (got,) in await beside] == [await asyncio.to_thread(wanted, number, 0) for number in range(3)]
        with pytest.raises(RequestError, match=r"alignment_heads=\[\(3, 0\)\].*one of 3 layers and one of 4 heads"):
            await served.sound_attention(given, ids, [(3, 0)])


async def check(folder=None, **settings):
    """Several windows at once, twice; the second turn finds the first turn's blocks in the prefix cache."""
    cases = [(number, prompt) for number in range(3) for prompt in range(3)]
    async with running(folder or whisper(), **settings) as engine:
        assert engine.max_model_len == 128 + CONTEXT
        for turn in range(2):
            sent = [answer(engine, request(number, PROMPTS[prompt])) for number, prompt in cases]
            for case, (got,) in zip(cases, await asyncio.gather(*sent)):
                assert got == await asyncio.to_thread(wanted, *case), (turn, case)
        return engine.stats


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_prefill_chunk": 21, "max_num_batched_tokens": 50}, {"num_gpu_blocks_override": 26, "max_num_seqs": 4}],
    ids=["batched", "chunked", "preempted"],
)
async def test_tokens_of_a_busy_engine_equal_transformers(settings):
    stats = await check(**settings)
    assert stats.prefix_hits > 0


async def test_so_do_tokens_of_an_accelerators_steps(monkeypatch):
    """Tokens are equal in an accelerator's padded steps and recorded graphs, on CPU tensors."""
    monkeypatch.setattr(engine.run.start, "open_accelerator", lambda device: HostAccelerator())
    await check()


async def test_windows_of_several_requests_share_a_run_of_the_encoder():
    """Three prompts that begin in one step share one run and get transformers' tokens."""
    async with running(whisper(), max_num_batched_tokens=512) as engine:
        let_go = threading.Event()
        held = asyncio.ensure_future(engine.on_device(lambda runtime: let_go.wait(60)))
        jobs = [asyncio.ensure_future(answer(engine, request(number, PROMPTS[0]))) for number in range(3)]
        await asyncio.sleep(0)  # all are submitted; the device thread finds them together
        let_go.set()
        got = await asyncio.gather(*jobs)
        assert await held
        assert engine.stats.encoder.calls == 1
    assert [tokens for tokens, *_ in got] == [wanted(number, 0) for number in range(3)]
