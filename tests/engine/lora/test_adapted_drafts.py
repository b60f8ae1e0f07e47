"""Rows with adapters and drafts: each place of a verify step is computed with the row's adapter, the head included."""

import functools
import gc
from collections.abc import Iterator

import numpy as np
import pytest

from engine.base.config import LoraConfig
from engine.run import start
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.stand_in_accelerator import StandInAccelerator
from tests.engine.test_drafts import FEW_PATHS, check_twice, collected, drafts_of, ngram
from tests.engine_kit import running, text_request
from tests.lora_kit import Drawn, adapted, drawn

LORA = LoraConfig(max_loras=2)
RULES = [
    {},
    {"logprobs": 2},
    {"temperature": 0.7, "seed": 3},
    {"repetition_penalty": 1.2, "logprobs": 1},
    {"prompt_logprobs": 1},
    {"logprobs": 1, "logprob_token_ids": (5, 9)},  # without drafts
]


@pytest.fixture(params=FEW_PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Both backends, and the device's with the real launcher and its loop."""
    made: list[StandInAccelerator] = []

    def opened(_device):
        accelerator = HostAccelerator() if request.param == "device" else StandInAccelerator()
        made.append(accelerator)
        return accelerator

    if request.param != "host":
        monkeypatch.setattr(start, "open_accelerator", opened)
    yield request.param
    assert all(not getattr(each, "errors", []) for each in made)
    made.clear()
    gc.collect()


@functools.cache
def adapters(name: str) -> tuple[Drawn | None, ...]:
    """The base; adapters of all layers, of the head alone if it may have one, and of some layers."""
    folder, words = tiny.checkpoint(name), ("lm_head", "embed_tokens")
    found = [drawn(folder, 6, 1, scale=0.12), drawn(folder, 3, 2, ("o_proj", "down_proj"), 0.2)]
    head = drawn(folder, 4, 3, words, 0.15)
    return None, *found, head if head.deltas else drawn(folder, 9, 3, ("v_proj", "up_proj"), 0.2)


def requests(name: str) -> list:
    """Texts that repeat themselves; request k has adapter k % 4."""
    draw = np.random.default_rng(8)
    asked = []
    for k in range(20):
        ids = np.tile(draw.integers(2, tiny.FIRST_SPECIAL, 3 + k % 7), 5)[: 9 + 2 * k].astype(np.int32)
        one = text_request(ids, 12 + k, ignore_eos=True, **RULES[k % len(RULES)])
        asked.append(adapted(one, adapters(name)[k % 4]))
    return asked


@pytest.mark.covering(1)
@pytest.mark.parametrize("settings", [{}, {"max_prefill_chunk": 9, "max_num_batched_tokens": 40}], ids=["", "chunks"])
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
async def test_answers_of_adapters_are_those_without_drafts(name, settings, path):
    """gemma2's head is tied to its embedding, and has adapters."""
    asked = requests(name)
    async with running(tiny.checkpoint(name), lora=LORA, **settings) as own:
        wanted = await collected(own, asked)
    assert len({tuple(tokens) for choices in wanted for tokens, _, _ in choices}) > 15
    async with running(tiny.checkpoint(name), lora=LORA, speculative=ngram(4), **settings) as own:
        await check_twice(own, asked, wanted)
        assert drafts_of(own).num_accepted_tokens > 40
