"""Draft models: answers are those without drafts, and drafts are those of the same model in transformers."""

from __future__ import annotations

import functools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.base.errors import ConfigError
from tests import draft_models, drafters, tiny
from tests.drafters import PROMPTS
from tests.engine.test_drafts import (
    FEW_PATHS,
    FEW_SETTINGS,
    PATHS,
    SETTINGS,
    check,
    collected,
    compare_answers,
    drafts_of,
    on_path,
    requests_of,
)
from tests.engine_kit import answer, running, text_request

__all__ = ["on_path"]
TARGET = "qwen3"
STATES = ("lfm2", "lfm2-biased", "lfm2_moe")
STATE_TARGETS = [
    ("qwen3_next", 8),
    pytest.param("granite_hybrid-states", 16, marks=pytest.mark.full),
    ("falcon_mamba", 8),
]


@functools.cache
def text(number: int, target: str = TARGET) -> tuple[int, ...]:
    """A prompt with the target's answer of 30 tokens."""
    return tuple(drafters.greedy(draft_models.reference(tiny.checkpoint(target)), PROMPTS[number], 30))


def asked(most: int, family: str = "llama", target: str = TARGET, **more: Any) -> dict[str, Any]:
    return {"model": str(draft_models.draft_model(target, family)), "num_speculative_tokens": most, **more}


@functools.cache
def expected(
    number: int, most: int, family: str = "llama", longest: int = 999, target: str = TARGET
) -> tuple[int, int, int]:
    """Steps with drafts, drafts, and right drafts of an answer, by transformers."""
    folder = draft_models.draft_model(target, family)

    def propose(known: list[int], count: int) -> list[int]:
        return draft_models.propose(folder, known, max(0, min(count, longest - len(known))))

    full = list(text(number, target))
    steps = drafters.steps_of(full, len(PROMPTS[number]), most, propose)
    return drafters.summed([step for step in steps if step[1]])


async def counts(own: Any, number: int, target: str = TARGET) -> tuple[int, ...]:
    """The same of an answer of the server, which must be the target's."""
    before = numbers(own)
    (tokens,) = await answer(own, text_request(PROMPTS[number], 30, ignore_eos=True))
    assert tokens == list(text(number, target)[len(PROMPTS[number]) :])
    return tuple(now - then for now, then in zip(numbers(own), before))


def numbers(own: Any) -> tuple[int, int, int]:
    drafts = drafts_of(own)
    return drafts.num_drafts, drafts.num_draft_tokens, drafts.num_accepted_tokens


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("family", "most", "numbers", "settings"),
    [
        pytest.param("llama", 3, (0, 2), {}, marks=pytest.mark.full),
        ("llama", 6, (0, 2), {"max_prefill_chunk": 3}),
        pytest.param("mistral", 2, (0, 2), {}, marks=pytest.mark.full),  # a window
        ("gpt_oss", 2, (0,), {}),  # experts, sinks, windows, an embedding with other padding
        pytest.param("gemma3", 1, (0,), {}, marks=pytest.mark.full),  # layers of two kinds
    ],
)
@pytest.mark.parametrize("on_path", PATHS, indirect=True)
async def test_drafts_are_those_of_the_model_in_transformers(on_path, family, most, numbers, settings):
    async with running(tiny.checkpoint(TARGET), speculative=asked(most, family), **settings) as own:
        for number in numbers:
            wanted = expected(number, most, family)
            assert number or wanted[2] >= 10, "a model that is never right would not show an error"
            assert await counts(own, number) == wanted


@pytest.mark.covering(1)
@pytest.mark.parametrize(("target", "size"), STATE_TARGETS)
@pytest.mark.parametrize("settings", [{}, {"max_prefill_chunk": 7}], ids=["plain", "chunks"])
@pytest.mark.parametrize("on_path", FEW_PATHS, indirect=True)
async def test_a_model_with_keys_drafts_for_one_with_states(on_path, target, size, settings):
    """Tiny states would leave blocks of other sizes half empty."""
    drafts = asked(3, target=target)
    wanted = expected(0, 3, target=target)
    room = {"block_size": size, "num_gpu_blocks_override": 9000}
    async with running(tiny.checkpoint(target), speculative=drafts, **room, **settings) as own:
        assert await counts(own, 0, target) == wanted
        assert await counts(own, 0, target) == wanted  # the prefix is cached
    assert wanted[2] >= 10


SHORT = ("gpt2", "llama4", "qwen3")
NAMES = [pytest.param(name, marks=() if name in SHORT else pytest.mark.full) for name in sorted(tiny.CHECKPOINTS)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("on_path", PATHS[:2], indirect=True)
async def test_a_model_that_drafts_for_itself_is_always_right(on_path, name):
    """Drafts are drawn with the row's own noise, so this holds at every temperature."""
    folder = tiny.checkpoint(name)
    requests = [
        text_request(ids, 24, ignore_eos=True, temperature=0.9 * (number % 2), seed=number)
        for number, ids in enumerate(PROMPTS)
    ]
    drafts = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}
    if name in STATES:
        with pytest.raises(ConfigError, match="cannot draft: it has recurrent layers"):
            async with running(folder, speculative=drafts):
                pass
        return
    async with running(folder, **SETTINGS[1], encoder_cache_tokens=64) as own:
        wanted = await collected(own, requests)
    async with running(folder, speculative=drafts, **SETTINGS[1], encoder_cache_tokens=64) as own:
        check(await collected(own, requests), wanted)
        found = drafts_of(own)
        assert found.num_accepted_tokens == found.num_draft_tokens > 40


@pytest.mark.full
@pytest.mark.parametrize("most", [1, 4])
@pytest.mark.parametrize("settings", FEW_SETTINGS)
@pytest.mark.parametrize("on_path", PATHS, indirect=True)
async def test_answers_are_those_without_drafts(on_path, settings, most):
    requests = [*requests_of(most, 8), *(text_request(ids, 30, ignore_eos=True) for ids in PROMPTS[:2])]
    await compare_answers(tiny.checkpoint(TARGET), asked(most), requests, settings)


@pytest.mark.parametrize("on_path", PATHS[:2], indirect=True)
async def test_a_cached_prefix_changes_neither_hits_nor_drafts(on_path):
    first, more = list(text(0))[:33], list(text(0))[33:]
    request = text_request(first, len(more), ignore_eos=True)
    found = []
    for speculative in ({}, asked(4)):
        async with running(tiny.checkpoint(TARGET), speculative=speculative) as own:
            (once,) = await answer(own, request)
            drafted = numbers(own)
            (again,) = await answer(own, request)
            assert once == again == more
            found.append(own.stats.prefix_hits)
            assert tuple(now - then for now, then in zip(numbers(own), drafted)) == drafted
    assert found[0] == found[1] == 32


@pytest.mark.parametrize("on_path", PATHS[:2], indirect=True)
async def test_no_draft_lies_beyond_the_context_of_the_model(on_path):
    async with running(tiny.checkpoint(TARGET), speculative=asked(3, max_model_len=21)) as own:
        wanted = expected(0, 3, longest=21)
        assert await counts(own, 0) == wanted
        assert 0 < wanted[1] < expected(0, 3)[1]


@pytest.mark.parametrize("on_path", PATHS[:2], indirect=True)
async def test_greedy_drafts_ignore_the_temperature(on_path):
    """The target draws among all tokens and the drafts are its most probable ones: some are wrong."""
    folder = tiny.checkpoint(TARGET)
    for how, wrong in (("greedy", True), ("probabilistic", False)):
        drafts = {"model": str(folder), "num_speculative_tokens": 3, "draft_sample_method": how}
        async with running(folder, speculative=drafts) as own:
            await answer(own, text_request(PROMPTS[0], 16, ignore_eos=True))
            assert drafts_of(own).num_accepted_tokens == drafts_of(own).num_draft_tokens > 0
            await answer(own, text_request(PROMPTS[1], 16, ignore_eos=True, temperature=1.5, seed=1))
            assert (drafts_of(own).num_accepted_tokens < drafts_of(own).num_draft_tokens) == wrong


def copied(folder: Path, **values: Any) -> str:
    """A draft model's folder with other values in config.json."""
    shutil.copytree(draft_models.draft_model(TARGET), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    return str(folder)


@pytest.mark.parametrize(
    ("values", "keys", "words"),
    [
        (
            {"vocab_size": 300},
            {},
            "has shape [320, 48], the configuration asks for [300, 48]",
        ),
        ({"num_hidden_layers": 3}, {}, "9 missing: layers.2."),
        ({"num_hidden_layers": 1}, {}, "9 left over: model.layers.1."),
        ({"architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba"}, {}, "it has recurrent layers"),
        ({"architectures": ["BertModel"], "model_type": "bert"}, {}, "cannot draft; draft models are decoders"),
        ({"architectures": ["NoSuchModel"], "model_type": "none"}, {}, "NoSuchModel"),
        ({}, {"max_model_len": 257}, "holds 256 tokens and"),
        ({}, {"max_model_len": 1}, "max_model_len is 1; give a whole number from 2"),
        ({}, {"num_speculative_tokens": None}, "num_speculative_tokens is missing"),
        ({}, {"draft_sample_method": "best"}, "draft_sample_method is 'best'; give 'greedy' or 'probabilistic'"),
        ({}, {"method": "eagle3"}, "names LlamaForCausalLM; drafters are LlamaForCausalLMEagle3"),
    ],
)
async def test_a_model_that_cannot_draft_is_refused_by_name(tmp_path, values, keys, words):
    drafts = asked(3) | {"model": copied(tmp_path / "small", **values), **keys}
    with pytest.raises(ConfigError, match=re.escape(words)):
        async with running(tiny.checkpoint(TARGET), speculative=drafts):
            pass


async def test_another_vocabulary_is_refused_with_both_names(tmp_path):
    folder, target = Path(copied(tmp_path / "small")), tiny.checkpoint(TARGET)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"].pop("the")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for words in (
        f"{folder}/tokenizer.json has another vocabulary than the target's {target}/tokenizer.json",
        f"the draft model {folder} has 300 tokens (vocab_size), the target {target} has 320",
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            async with running(target, speculative=asked(3) | {"model": str(folder)}):
                pass
        (folder / "tokenizer.json").unlink(missing_ok=True)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
