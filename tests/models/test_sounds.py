"""Families that take audio of any length, against transformers: features, rows, an engine's greedy tokens."""

from __future__ import annotations

import asyncio
import functools
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import engine.run.start
from engine.base.errors import ConfigError, RequestError
from engine.base.request import Request, SamplingParams
from engine.models.registry import load_model_config
from mm.item import MediaItem, MediaOptions, Processed
from mm.processors.registry import processor_for
from mm.splice import splice
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import answer, running
from tests.models.harness import load
from tests.tiny_sounds import AUDIO, SOUNDS, Sounds

SAMPLES = (1500, 20000, 31999, 32000, 70001)  # less than a window, a sample less than one, one, and several
PROMPTS = ((20000,), (70001,), (32000, 1500), (31999, 20000, 70001))  # sounds of each prompt
BEFORE, BEHIND, TOKENS = (5, 9, tiny.IDS["<|audio_bos|>"]), (tiny.IDS["<|audio_eos|>"], 40, 7), 24
FAMILY = {family.name: family for family in SOUNDS}
each_family = pytest.mark.parametrize("family", SOUNDS, ids=lambda family: family.name)


def sound(count: int) -> np.ndarray:
    return np.random.default_rng(count).normal(0, 0.1, count).astype(np.float32)


@functools.cache
def processor(family: Sounds):
    config = load_model_config(family.folder)
    return processor_for(config.processor, config.folder, config.raw)


@functools.cache
def processed(family: Sounds, count: int) -> Processed:
    return processor(family).process(MediaItem("audio", sound(count)), count.to_bytes(16, "little"), MediaOptions())


@functools.cache
def theirs(family: Sounds, count: int):
    return family.features(family.folder, sound(count))


def request(family: Sounds, prompt: tuple[int, ...]) -> Request:
    """A request with text before and after every sound."""
    ids, slots = [], []
    for _ in prompt:
        ids += BEFORE
        slots.append(len(ids))
        ids += [AUDIO, *BEHIND]
    made = splice(ids, slots, [processed(family, count) for count in prompt], processor(family))
    assert made.positions is None, "sound counts like text"
    return Request(made.prompt_token_ids, SamplingParams(TOKENS, 0.0, ignore_eos=True), media=made.media)


@functools.cache
def wanted(family: Sounds, prompt: tuple[int, ...]) -> list[int]:
    """Greedy tokens of transformers, with its own features and numbers of rows."""
    given = [theirs(family, count) for count in prompt]
    rows = [number for _, number in given]
    before, behind = (*BEFORE, *family.around[:1]), (*family.around[1:], *BEHIND)
    ids = torch.tensor([[token for number in rows for token in (*before, *[AUDIO] * number, *behind)]])
    with torch.inference_mode():
        if family.alone:
            inputs = {"inputs_embeds": embedded(family, ids, [features for features, _ in given])}
        else:
            inputs = {"input_ids": ids, **joined([features for features, _ in given])}
        made = family.oracle.generate(
            attention_mask=torch.ones_like(ids), **inputs, max_new_tokens=TOKENS, min_new_tokens=TOKENS,
            do_sample=False, eos_token_id=None,
        )  # fmt: skip
    return made[0, -TOKENS:].tolist()


def embedded(family: Sounds, ids: torch.Tensor, features: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """The prompt's embeddings, with the rows of each sound encoded alone."""
    made = family.oracle.get_input_embeddings()(ids)
    made[ids == AUDIO] = torch.cat([family.rows_of(item) for item in features])
    return made


def joined(features: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """transformers' arguments of several sounds, padded at the end to the longest."""

    def padded(key: str) -> list[torch.Tensor]:
        sizes = [max(item[key].shape[axis] for item in features) for axis in range(1, features[0][key].dim())]
        filled = []
        for item in features:
            behind = [(0, size - own) for size, own in zip(sizes, item[key].shape[1:])]
            filled.append(torch.nn.functional.pad(item[key], [edge for pair in behind[::-1] for edge in pair]))
        return filled

    return {key: torch.cat(padded(key)) for key in features[0]}


@each_family
def test_features_and_rows_are_the_published_processors(family):
    for count in SAMPLES:
        features, rows = theirs(family, count)
        part = processed(family, count).parts[0]
        assert part.num_tokens == rows, count
        mine, wanted = part.features["input_features"], features["input_features"].numpy()
        if mine.ndim == 2:  # only the sound's own frames, without padding
            mine, wanted = mine[None], wanted.reshape(1, *wanted.shape[-2:])[..., : mine.shape[1]]
        if family.name == "gemma4-audio":  # frames, followed by zeros that the mask leaves out
            wanted = wanted[:, features["input_features_mask"][0].numpy()]
        if family.name == "ultravox":  # windows, the last one padded
            mine = np.moveaxis(mine, 0, 1).reshape(1, mine.shape[1], -1)[..., : wanted.shape[2]]
        assert mine.shape == wanted.shape, count
        assert np.abs(mine - wanted).max() < 1e-4, count


async def check(family: Sounds, **settings):
    """All prompts at once, twice; the second turn finds the first turn's blocks in the prefix cache."""
    async with running(family.folder, encoder_cache_tokens=512, **settings) as engine:
        for turn in range(2):
            found = await asyncio.gather(*(answer(engine, request(family, prompt)) for prompt in PROMPTS))
            for prompt, (got,) in zip(PROMPTS, found):
                assert got == await asyncio.to_thread(wanted, family, prompt), (turn, prompt)
        return engine.stats


@each_family
async def test_tokens_in_chunks_with_few_blocks_equal_transformers(family):
    assert (await check(family, max_prefill_chunk=21, num_gpu_blocks_override=family.blocks)).preemptions > 0


@each_family
async def test_tokens_of_an_accelerators_steps_equal_transformers(family, monkeypatch):
    monkeypatch.setattr(engine.run.start, "open_accelerator", lambda device: HostAccelerator())
    assert (await check(family)).prefix_hits > 0


@each_family
def test_the_examples_of_the_start_have_at_most_as_many_rows(family):
    model = load(family.folder)
    tower = model.towers["audio"]
    for rows in (3, 40, 77):  # a window has three queries, so at least three rows
        with torch.inference_mode():
            assert 1 <= len(tower.encode(tower.example("audio", rows))) <= rows


@pytest.mark.parametrize(("name", "frames"), [("granite-speech", 1330), ("phi4mm", 8 * 1001 - 3)])
def test_long_sounds_are_encoded_as_by_transformers(name, frames):
    """The sounds have more contexts than an attention call takes, and segments of forty seconds, the last one short."""
    family = FAMILY[name]
    width = {"granite-speech": 64, "phi4mm": 32}[name]
    features = {"input_features": torch.randn(1, frames, width, generator=torch.Generator().manual_seed(1)) * 2}
    with torch.inference_mode():
        mine = load(family.folder).towers["audio"].encode({"input_features": features["input_features"][0]})
        wanted = family.rows_of(features)
    assert mine.shape == wanted.shape
    assert (mine - wanted).abs().max() < 2e-4 * wanted.abs().max()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            {"audio_processor": {"config": {"activation": "relu"}}},
            "activation='relu'; this tower is supported with 'sw",
        ),
        ({"audio_processor": {"config": {"attention_heads": 5}}}, "must be a multiple of attention_heads=5"),
        ({"audio_processor": {"config": {"relative_attention_bias_args": {"type": "alibi"}}}}, "supported is the type"),
    ],
)
def test_a_phi4mm_that_is_built_otherwise_is_refused(overrides, said):
    with pytest.raises(ConfigError, match=said):
        load_model_config(FAMILY["phi4mm"].folder, overrides)


async def test_qwen3_asr_in_qwens_own_layout_is_the_same(tmp_path):
    """Qwen's layout has all keys in a thinker_config, the projector in the tower, and three equal axes of positions."""
    family = FAMILY["qwen3-asr"]
    shutil.copytree(family.folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    thinker = {key: config.pop(key) for key in ("audio_config", "text_config", "audio_token_id")}
    thinker["text_config"]["model_type"] = "qwen3_asr_text"
    thinker["text_config"]["rope_parameters"] |= {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
    (tmp_path / "config.json").write_text(json.dumps({**config, "thinker_config": thinker}))
    names = {"model.language_model.": "thinker.model.", "model.audio_tower.": "thinker.audio_tower."}
    names |= {f"model.multi_modal_projector.linear_{n}.": f"thinker.audio_tower.proj{n}." for n in (1, 2)}
    tensors = load_file(tmp_path / "model.safetensors")
    for old, new in names.items():
        tensors = {name.replace(old, new, 1) if name.startswith(old) else name: t for name, t in tensors.items()}
    assert all(name.startswith("thinker.") for name in tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    async with running(tmp_path) as engine:
        ((got,),) = await asyncio.gather(answer(engine, request(family, PROMPTS[-1])))
    assert got == await asyncio.to_thread(wanted, family, PROMPTS[-1])


@pytest.mark.parametrize(("said", "tied"), [(None, True), (True, True), (False, False)])
def test_glm_asr_ties_its_head_where_the_outer_object_does_not_deny_it(said, tied):
    family = FAMILY["glm-asr"]
    config = load_model_config(family.folder, {"tie_word_embeddings": said})  # None removes the key
    assert config.raw["text_config"]["tie_word_embeddings"] is False
    assert config.text.tie_embeddings is tied


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"encoder_config": {"context_size": 51}}, "context_size=51 is above max_pos_emb=50"),
        ({"downsample_rate": 16}, "window_size=15 and downsample_rate=16 must give a query at least"),
        ({"projector_config": {"encoder_hidden_size": 49}}, "encoder_hidden_size=49 must be the encoder's"),
        ({"projector_config": {"model_type": "bert"}}, "model_type='bert' with hidden_act='gelu'; supported is"),
    ],
)
def test_a_granite_speech_that_contradicts_itself_is_refused(overrides, said):
    family = FAMILY["granite-speech"]
    with pytest.raises(ConfigError, match=said):
        load_model_config(family.folder, overrides)


@pytest.mark.parametrize(
    ("name", "overrides", "said"),
    [
        ("fun-audio", {"audio_config": {"continuous_features_mode": "replace"}}, "supported with 'add'"),
        ("gemma4-audio", {"audio_config": {"attention_context_right": 1}}, "attention_context_right=1; supported are"),
        ("gemma4-audio", {"audio_config": {"subsampling_conv_channels": [30, 4]}}, "the first a multiple of 4"),
        ("fun-audio", {"audio_config": {"pad_token_id": 13}}, "pad_token_id=13 must be an integer from 0 to 12"),
        ("ultravox", {"projector_act": "gelu"}, "projector_act='gelu'; Ultravox is supported with 'swiglu'"),
        ("ultravox", {"text_config": {"model_type": "qwen3"}}, "model_type='qwen3'; Ultravox is supported with"),
    ],
)
def test_what_these_towers_do_not_compute_is_refused(name, overrides, said):
    with pytest.raises(ConfigError, match=said):
        load_model_config(FAMILY[name].folder, overrides)


def test_rows_that_no_windows_have_are_refused():
    tower = load(SOUNDS[0].folder).towers["audio"]
    features = tower.example("audio", 40)
    with pytest.raises(RequestError, match=r"num_rows=60: input_features \[1, 32, 200\] have 25 rows a window"):
        tower.encode({**features, "num_rows": torch.tensor(60)})
