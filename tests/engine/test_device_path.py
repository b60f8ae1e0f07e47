"""The accelerator's executor on CPU tensors: the same tokens as the CPU's, through records, prep and padded steps."""

import asyncio

import pytest

import engine.runtime
from engine import Engine
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import answer, running
from tests.invariance.test_text import PROMPTS, alone, request

NAMES = ("llama", "mistral-window", "qwen2", "qwen3", "omni")


@pytest.fixture
def on_the_device_path(monkeypatch):
    monkeypatch.setattr(engine.runtime, "open_accelerator", lambda config, device: HostAccelerator())


@pytest.fixture
def wanted(name):
    """The host's tokens; made before `on_the_device_path` takes effect."""
    return alone(name)


def counts(engine: Engine) -> dict[str, int]:
    return engine._device._runtime.executor._launcher.counts


async def all_at_once(engine: Engine) -> list[list[int]]:
    answers = await asyncio.gather(*[answer(engine, request(prompt)) for prompt in PROMPTS])
    return [choices[0] for choices in answers]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_prefill_chunk": 7},
        {"num_gpu_blocks_override": 40, "max_model_len": 512},
        {"enforce_eager": True},
        {"max_num_batched_tokens": 64},
        {"cudagraph_capture_sizes": (4, 16)},
    ],
    ids=["graphs", "chunks", "pressure", "eager", "small-budget", "few-sizes"],
)
@pytest.mark.parametrize("name", NAMES)
async def test_greedy_tokens_are_those_of_the_host(wanted, on_the_device_path, name, settings):
    # The profile runs the towers once on the largest item: a small one here.
    async with running(tiny.checkpoint(name), encoder_cache_tokens=64, **settings) as engine:
        assert await all_at_once(engine) == wanted
        seen = counts(engine)
    # One copy up, one prep, one copy down and one wait per step, whatever else it takes.
    assert seen["upload"] == seen["prep"] == seen["download"] == seen["wait"]
    if settings.get("enforce_eager"):
        assert seen["forward"] == seen["sample"] == 0
    elif not settings.get("cudagraph_capture_sizes"):
        assert seen["forward"] == seen["upload"]
