"""Each vision family gives the same greedy tokens alone, batched, in chunks, from the cache and after preemption."""

import asyncio
import functools
import threading

import pytest

from engine import Request, SamplingParams
from tests import tiny
from tests.engine_kit import answer, quiet, text_request
from tests.invariance.devices import Answer, Device
from tests.models.seeing import spliced

TOKENS = 12
FILMS = ("qwen2_vl", "qwen3_vl", "glm4v", "internvl", "llava_onevision", "ernie4_5_vl_moe")
FRAMES = ("gemma4-vision", "gemma4-small-vision")  # models with the small cache of SHORT that also take films
AHEAD = (
    "gemma3-vision",
    "gemma4-vision",
    "paligemma",
    "paligemma2",
)  # bidirectional attention within a picture of 16 tokens
SHORT = (
    *AHEAD,
    "internvl-gpt_oss",
    "gemma4-small-vision",
    "llama4-vision",
    "lfm2_vl",
    "chatglm-vision",
)  # caches of several groups, or a picture must fit into one chunk
FAMILIES = (*FILMS, "llava", "mistral3", "idefics3", "hunyuan_vl", "dots_ocr", "kimi_vl", "minicpmv", *SHORT)


def mixes(name: str) -> tuple[str, ...]:
    last = {**dict.fromkeys(FILMS, "picture, film, picture"), **dict.fromkeys(FRAMES, "film")}.get(name, "two pictures")
    return ("picture", "large picture", last)


def request(name: str, prompt: str, **rules) -> Request:
    made, _ = spliced(name, prompt)
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, **rules)
    return Request(
        made.prompt_token_ids, sampling, media=made.media, positions=made.positions, position_delta=made.position_delta
    )


@functools.cache
def alone(device: Device, name: str) -> dict[str, Answer]:
    async def run() -> dict[str, Answer]:
        async with device.running(tiny.checkpoint(name), enable_prefix_caching=False) as engine:
            return {mix: await device.alone(engine, request(name, mix, **device.rules)) for mix in mixes(name)}

    return asyncio.run(run())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_prefill_chunk": 7}, {"num_gpu_blocks_override": 36, "max_model_len": 540}],
    ids=["company", "chunks", "preempted"],
)
async def test_answers_do_not_depend_on_circumstances(name, settings, device):
    wanted = await asyncio.to_thread(alone, device, name)
    assert len({tuple(each.tokens) for each in wanted.values()}) == len(wanted), "pictures change the answer"
    encodes = 0
    if name in SHORT and settings:
        fewer = {"num_gpu_blocks_override": 19, "max_model_len": 80}
        settings = {"max_prefill_chunk": 17} if "max_prefill_chunk" in settings else fewer

    def count(step) -> None:
        nonlocal encodes
        encodes += step.num_encodes

    async with device.running(tiny.checkpoint(name), **settings) as engine:
        engine.on_step = count
        for turn in range(2):
            jobs = [(mix, answer(engine, request(name, mix))) for mix in wanted for _ in range(2)]
            texts = [answer(engine, text_request(range(2, 2 + k * 3), TOKENS)) for k in range(1, 6)]
            got = await asyncio.gather(*[job for _, job in jobs], *texts)
            device.check([each[0] for each in got[: len(jobs)]], [wanted[mix] for mix, _ in jobs], f"turn {turn}")
        if "num_gpu_blocks_override" not in settings:
            assert encodes == len({item.hash for mix in wanted for item in request(name, mix).media})


@pytest.mark.parametrize("name", ["internvl", "mistral3", "glm4v", "gemma4-vision", "hunyuan_vl"])
async def test_pictures_of_several_requests_share_a_run_of_the_tower(name, device):
    """Three prompts with four pictures begin in one step: one tower run, and the answers of each prompt alone."""
    wanted = await asyncio.to_thread(alone, device, name)
    mixes = ("picture", "large picture", "two pictures")
    async with device.running(tiny.checkpoint(name), enable_prefix_caching=False) as engine:
        before, let_go = engine.stats.encoder.calls, threading.Event()
        held = asyncio.ensure_future(engine.on_device(lambda runtime: let_go.wait(60)))
        jobs = [asyncio.ensure_future(answer(engine, request(name, mix, **device.rules))) for mix in mixes]
        await asyncio.sleep(0)  # all are submitted; the device thread receives them together
        let_go.set()
        got = await asyncio.gather(*jobs)
        assert await held
        await quiet(engine)
        assert engine.stats.encoder.calls - before == 1
    shared = [(found[0], wanted[mix]) for found, mix in zip(got, mixes) if mix in wanted]
    device.check([found for found, _ in shared], [each for _, each in shared])
