"""Voxtral Realtime against transformers: frames, prompt, rows, and an engine's tokens while audio arrives."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

import engine.run.start
import engine.step.backend.device.forward
from engine.base.errors import ConfigError, RequestError
from engine.base.limits import Limits
from engine.base.limits import check as check_limits
from engine.base.request import MediaInput, Request, SamplingParams
from engine.models.registry import load_model_config
from mm.errors import MediaError
from mm.item import MediaItem, MediaOptions, Processed
from mm.processors.registry import processor_for
from mm.splice import splice
from server.errors import ApiError
from server.jobs.job import job_of
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import answer, running
from tests.models.harness import load
from tests.tiny_realtime import BEFORE, DELAY, folder, inputs, oracle

SAMPLES = (900, 16000, 23041, 70001)  # samples; a token has 1,280 of them, 23,041 are one more than 18 tokens have
PROMPT = 1 + BEFORE + DELAY


def sound(count: int) -> np.ndarray:
    """Noise so loud that the fixed floor of the log-mel clips the quiet part in its middle."""
    made = np.random.default_rng(count).normal(0, 0.2, count).astype(np.float32)
    made[count // 3 : count // 2] *= 1e-4
    return made


@functools.cache
def processor():
    config = load_model_config(folder())
    return processor_for(config.processor, config.folder, config.raw)


@functools.cache
def processed(count: int) -> Processed:
    return processor().process(MediaItem("audio", sound(count)), count.to_bytes(16, "little"), MediaOptions())


@functools.cache
def theirs(count: int):
    return inputs(sound(count))


def request(count: int, tokens: int = 1000, n: int = 1, **sampling) -> Request:
    made = splice([processor().placeholder("audio")], [0], [processed(count)], processor())
    assert made.counts == {"audio": PROMPT}
    given = {"temperature": 0.0, "ignore_eos": True, **sampling}
    return Request(made.prompt_token_ids, SamplingParams(tokens, **given), media=made.media, n=n)


@functools.cache
def wanted(count: int) -> list[int]:
    """Greedy tokens of transformers, one for each token position of the sound."""
    with torch.inference_mode():
        made = oracle().generate(**theirs(count), max_new_tokens=1000, do_sample=False, eos_token_id=None)
    return made[0, PROMPT:].tolist()


@pytest.mark.parametrize("count", SAMPLES)
def test_frames_and_prompt_are_the_published_processors(count):
    part, given = processed(count).parts[0], theirs(count)
    mine, frames = part.features["input_features"], given["input_features"][0].numpy()
    assert mine.shape == frames.shape
    assert np.abs(mine - frames).max() < 1e-4
    assert processor().fill(processed(count)).token_ids.tolist() == given["input_ids"][0].tolist()
    assert given["num_delay_tokens"] == DELAY
    assert part.num_tokens == frames.shape[1] // 8


def test_rows_are_transformers_alone_and_together_with_others():
    items = [
        {"input_features": torch.from_numpy(processed(count).parts[0].features["input_features"])} for count in SAMPLES
    ]
    with torch.inference_mode():
        tower = load(folder()).towers["audio"]
        together = tower.encode_together(items)
        for item, beside in zip(items, together):
            rows = oracle().get_audio_features(item["input_features"][None]).pooler_output[0]
            assert (tower.encode(item) - rows).abs().max() < 1e-4
            assert (beside - rows).abs().max() < 1e-4


async def check(**settings):
    """All sounds at once, twice; the second turn finds the first turn's blocks in the prefix cache."""
    async with running(folder(), **settings) as engine:
        for turn in range(2):
            found = await asyncio.gather(*(answer(engine, request(count)) for count in SAMPLES))
            for count, (got,) in zip(SAMPLES, found):
                assert got == await asyncio.to_thread(wanted, count), (turn, count)
        return engine.stats


async def test_an_answer_has_the_tokens_of_transformers_and_ends_with_the_sound():
    assert (await check()).prefix_hits > 0


async def test_tokens_in_chunks_with_few_blocks_equal_transformers():
    assert (await check(max_prefill_chunk=7, num_gpu_blocks_override=7)).preemptions > 0


async def test_tokens_of_an_accelerators_steps_equal_transformers(monkeypatch):
    monkeypatch.setattr(engine.run.start, "open_accelerator", lambda device: HostAccelerator())
    eager = mock.Mock(side_effect=AssertionError("steps that show sound have graphs"))
    monkeypatch.setattr(engine.step.backend.device.forward.DeviceForward, "_run_eagerly", eager)
    assert (await check(max_num_batched_tokens=64)).prefix_hits > 0


async def test_choices_and_shorter_answers_have_the_same_audio():
    async with running(folder()) as engine:
        expected = await asyncio.to_thread(wanted, 16000)
        assert await answer(engine, request(16000, n=3)) == [expected] * 3
        assert await answer(engine, request(16000, 5)) == [expected[:5]]


@pytest.mark.parametrize("settings", [{}, {"enable_prefix_caching": False}], ids=["cached", "anew"])
async def test_a_growing_sound_continues_after_its_own_tokens(settings):
    """Each request sends the sound and the tokens so far; a second sound grows at the same time."""

    async def grown(engine, count: int, step: int) -> list[int]:
        heard, made = sound(count), splice([processor().placeholder("audio")], [0], [processed(count)], processor())
        tokens: list[int] = []
        for end in [*range(9 * 1280 + step, count, step), None]:
            whole = processed(count) if end is None else processor().process_beginning(heard[:end], bytes([7] * 16))
            (part,) = whole.parts
            rows = part.num_tokens
            media = MediaInput("audio", count.to_bytes(16, "little"), ((0, rows),), rows, part.features)
            ids = np.concatenate([made.prompt_token_ids, np.array(tokens, np.int32)])
            sampling = SamplingParams(1000, temperature=0.0, ignore_eos=True)
            (new,) = await answer(engine, Request(ids, sampling, media=(media,)))
            assert len(ids) + len(new) == rows
            tokens += new
        return tokens

    async with running(folder(), **settings) as engine:
        found = await asyncio.gather(grown(engine, 70001, 3333), grown(engine, 23041, 5000))
        assert found == [await asyncio.to_thread(wanted, count) for count in (70001, 23041)]
        hits = engine.stats.prefix_hits
        assert hits == 0 if settings else hits > 300


async def test_another_token_below_the_same_sound_is_not_found_in_the_cache():
    base = request(16000, 1, logprobs=1)
    for changed in (0, 3):  # the token that names the sound, and a later one
        ids = base.prompt_token_ids.copy()
        ids[changed] = 7
        other = dataclasses.replace(base, prompt_token_ids=ids)
        async with running(folder(), enable_prefix_caching=False) as engine:
            fresh = await answer(engine, other)
        async with running(folder()) as engine:
            await answer(engine, base)
            assert await answer(engine, other) == fresh
            assert engine.stats.prefix_hits == 0


def test_a_sound_without_a_row_for_each_frame_of_a_token_is_refused():
    tower = load(folder()).towers["audio"]
    with pytest.raises(RequestError, match=r"input_features \[32, 12\]: 32 mel bins and 8 frames a row are needed"):
        tower.encode({"input_features": torch.zeros(32, 12)})


def test_media_reach_behind_the_prompt_only_where_the_model_adds_them_and_within_the_context():
    limits = Limits(100, 99, 8, 1024, 1024, 5, 512, ("audio",), adds_media=True)
    check_limits(request(16000), limits)
    with pytest.raises(RequestError, match=r"media span \(0, 42\) is empty, overlaps another or leaves the prompt"):
        check_limits(request(16000), dataclasses.replace(limits, adds_media=False))
    with pytest.raises(RequestError, match="rows for 42 tokens of prompt and answer; this engine's context is 40"):
        check_limits(request(16000, 1), dataclasses.replace(limits, max_model_len=40))


def test_text_behind_a_sound_that_goes_on_is_refused():
    """A template may write such text; a second sound is refused too."""
    with pytest.raises(MediaError, match="takes audio while it answers: nothing may follow it in the prompt") as caught:
        splice([processor().placeholder("audio"), 50], [0], [processed(16000)], processor())
    assert (caught.value.status, caught.value.reason) == (400, "placeholder_mismatch")


def test_beams_are_refused():
    """A beam's tokens would share positions with audio rows, whose hashes in the prefix cache do not cover tokens."""
    spliced = splice([processor().placeholder("audio")], [0], [processed(16000)], processor())
    model = SimpleNamespace(encoder_prefix=0, adds_media=True)
    exchange = SimpleNamespace(state=SimpleNamespace(engine=SimpleNamespace(model=model)))
    with pytest.raises(ApiError, match="use_beam_search: this model takes audio while it answers"):
        job_of(exchange, None, spliced, SimpleNamespace(beam=True), salt="", priority=0, param="messages")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"downsample_factor": 3}, "audio_length_per_tok=8 must be 2 . downsample_factor=3"),
        ({"audio_config": {"hidden_act": "softsign"}}, "hidden_act='softsign'.*supported are"),
        ({"audio_config": {"num_key_value_heads": 2}}, "num_key_value_heads must be num_attention_heads=4"),
    ],
)
def test_a_checkpoint_that_is_built_otherwise_is_refused(overrides, said):
    with pytest.raises(ConfigError, match=said):
        load_model_config(folder(), overrides)


def test_the_decoder_alone_is_a_model_of_text():
    config = load_model_config(folder(), without=("audio", "image", "video"))
    assert not config.adds_media
    assert config.modalities == ("text",)
