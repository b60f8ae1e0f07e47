"""MiDashengLM against its makers' formulas (tests/models/midashenglm.py): features, rows, tokens of a busy engine."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
import torch

import engine.run.start
from engine.base.errors import ConfigError, RequestError
from engine.base.request import Request, SamplingParams
from engine.models.registry import load_model_config
from mm.item import MediaItem, MediaOptions
from mm.processors.registry import processor_for
from mm.splice import splice
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import answer, running
from tests.models import midashenglm as makers
from tests.models.harness import load
from tests.models.test_sounds import sound

PATCH = 640  # samples of a patch; 35 patches are five chunks of seven rows in all
# Less than a row; whole rows; a patch after the sound that is last of a row, alone in a chunk, or outside all rows.
SAMPLES = (1500, 5 * PATCH, 40_001, 10 * PATCH - 160, 35 * PATCH - 1, 36 * PATCH - 1, 15 * PATCH - 1)
PROMPTS = ((40_001,), (6240, 22_399), (1500, 20_000, 30_001))
TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return makers.checkpoint(tmp_path_factory.mktemp("midasheng") / "midashenglm")


@pytest.fixture(scope="module")
def reads(folder):
    config = load_model_config(folder)
    return processor_for(config.processor, config.folder, config.raw)


def processed(reads, count):
    return reads.process(MediaItem("audio", sound(count)), count.to_bytes(16, "little"), MediaOptions())


def features(reads, count):
    return {key: torch.tensor(value) for key, value in processed(reads, count).parts[0].features.items()}


@pytest.mark.parametrize("count", SAMPLES)
def test_rows_are_those_of_the_makers_formulas(folder, reads, count):
    part = processed(reads, count).parts[0]
    wanted = makers.decibels(np.pad(sound(count), (0, max(0, 3200 - count))))
    found = torch.tensor(part.features["input_features"])
    assert (found - wanted[:, : found.shape[1]]).abs().max() < 2e-3  # decibels; the makers' filter sums are float32
    tower = load(folder).towers["audio"]
    rows, want = tower.encode(features(reads, count)), makers.rows(folder, sound(count))
    assert len(rows) == len(want) == part.num_tokens
    assert (rows - want).abs().max() <= 2e-4


@torch.inference_mode()
def test_sounds_of_several_requests_share_a_run(folder, reads):
    tower = load(folder).towers["audio"]
    items = [features(reads, count) for count in SAMPLES]
    for rows, own in zip(tower.encode_together(items), map(tower.encode, items)):
        assert (rows - own).abs().max() < 1e-5
    assert len(tower.encode(tower.example("audio", 9))) == 9
    with pytest.raises(RequestError, match="num_patches=3: 20 bins of patches of 4 frames are needed, at least 5"):
        tower.encode({**items[1], "num_patches": torch.tensor(3)})


def request(reads, prompt):
    ids, slots = [5, 9], []
    for number in range(len(prompt)):
        slots.append(len(ids))
        ids += [makers.AUDIO, 40 + number]
    made = splice(ids, slots, [processed(reads, count) for count in prompt], reads)
    assert made.positions is None, "sound counts like text"
    return Request(made.prompt_token_ids, SamplingParams(TOKENS, 0.0, ignore_eos=True), media=made.media)


@pytest.mark.parametrize("accelerated", [False, True])
async def test_tokens_of_a_busy_engine_are_those_of_the_formulas(folder, reads, monkeypatch, accelerated):
    """Tokens are equal in batches, in chunks, preempted, from the prefix cache, and in an accelerator's steps."""
    if accelerated:
        monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    wanted = {}
    for prompt in PROMPTS:
        ids = [5, 9, *(token for number in range(len(prompt)) for token in (makers.AUDIO, 40 + number))]
        wanted[prompt] = makers.greedy(folder, ids, [sound(count) for count in prompt], TOKENS)
    assert len({tuple(tokens) for tokens in wanted.values()}) == len(wanted)
    settings = {"max_prefill_chunk": 7, "num_gpu_blocks_override": 7, "max_model_len": 64}
    async with running(folder, device="cpu", dtype="float32", **settings) as served:
        for _ in range(2):
            sent = [answer(served, request(reads, prompt)) for prompt in wanted for _ in range(2)]
            got = [choices[0] for choices in await asyncio.gather(*sent)]
            assert got == [wanted[prompt] for prompt in wanted for _ in range(2)]
        assert served.stats.preemptions > 0
        for _ in range(2):
            assert (await answer(served, request(reads, PROMPTS[1])))[0] == wanted[PROMPTS[1]]
        assert served.stats.prefix_hits > 0


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"patch_size": 16}, r"patch_size=16; this tower is supported with \[20, 4\]"),
        ({"init_values": 1e-5}, "init_values=1e-05; this tower is supported with none"),
        ({"num_heads": 5}, "embed_dim=72 must be a multiple of num_heads=5"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, changes, complaint):
    tower = {**makers.TOWER, **changes}
    (tmp_path / "config.json").write_text(json.dumps({**makers.CONFIG, "audio_encoder_config": tower}))
    with pytest.raises(ConfigError, match=complaint):
        load_model_config(tmp_path)


@pytest.mark.parametrize("changes", [{"win_length": 400}, {"center": False}])
def test_another_front_end_is_refused(tmp_path, changes):
    config = {**makers.CONFIG, "audio_encoder_config": {**makers.TOWER, **changes}}
    with pytest.raises(ValueError, match="win_length=n_fft, center=true"):
        processor_for("midashenglm:MiDashengLM", tmp_path, config)
