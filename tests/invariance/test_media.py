"""Prompts with pictures, sounds and films give the same greedy tokens, whatever the scheduler does with them.

Items go through the real media path (data: URLs, decoders, processor, splice) into a tiny random omni checkpoint.
"""

import asyncio
import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("av")  # a GPU machine may lack it

from engine import Request, SamplingParams
from mm.item import MediaRef
from mm.limits import MediaLimits
from mm.load import MediaLoader
from mm.processors.registry import processor_for
from mm.splice import splice
from tests import tiny
from tests.engine_kit import answer, answer_deltas, quiet, text_request
from tests.invariance.devices import Answer, Device
from tests.mm.made import data_url, film, noise, picture, ramp, sound, tone

TOKENS = 16
POOL = ThreadPoolExecutor(2)
MARKS = {
    "image": ("<|vision_bos|>", "<|IMAGE|>", "<|vision_eos|>"),
    "video": ("<|vision_bos|>", "<|VIDEO|>", "<|vision_eos|>"),
    "audio": ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),
}
ITEMS = {
    "red": ("image", lambda: picture(noise(90, 120, 1), "PNG")),
    "blue": ("image", lambda: picture(noise(200, 130, 2), "PNG")),
    "low": ("audio", lambda: sound(tone(0.7, hertz=220), 16000, "wav")),
    "high": ("audio", lambda: sound(tone(1.9, hertz=880), 16000, "wav")),
    "film": ("video", lambda: film(ramp(20))),
}
MIXES = {
    "image": ("red",),
    "audio": ("high",),
    "video": ("film",),
    "two images": ("red", "blue"),
    "image and audio": ("blue", "low"),
    "all three": ("high", "film", "red"),
}


@functools.cache
def raw_config() -> dict:
    import json

    return json.loads((tiny.checkpoint("omni") / "config.json").read_text())


@functools.cache
def encoded(name: str) -> str:
    return data_url(
        ITEMS[name][1](), {"image": "image/png", "audio": "audio/wav", "video": "video/mp4"}[ITEMS[name][0]]
    )


@functools.lru_cache(maxsize=2)
def loader_of(loop: asyncio.AbstractEventLoop, pixels: bool) -> MediaLoader:
    """One loader per test: equal content gets an equal name only within one loader."""
    picture_bytes = 50_000 if pixels else 0  # "blue" is larger, so the host scales it
    processor = processor_for("qwen_omni:QwenOmni", tiny.checkpoint("omni"), raw_config(), picture_bytes)
    return MediaLoader(MediaLimits(), processor, POOL)


async def make_request(names: tuple[str, ...], n: int = 1, lead: int = 3, pixels: bool = False, **rules) -> Request:
    """A prompt of text, the items between their markers, and text; with `pixels` the engine makes the patches."""
    ids, slots, refs = list(range(10, 10 + lead)), [], []
    for number, name in enumerate(names):
        modality = ITEMS[name][0]
        opening, placeholder, closing = (tiny.IDS[mark] for mark in MARKS[modality])
        slots.append(len(ids) + 1)
        ids += [opening, placeholder, closing, 20 + number, 40]
        refs.append(MediaRef(modality, encoded(name)))
    ids += [7, 8]
    loader = loader_of(asyncio.get_running_loop(), pixels)
    made = splice(ids, slots, await loader.load(refs), loader.processor)
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, **rules)
    return Request(
        made.prompt_token_ids,
        sampling,
        media=made.media,
        positions=made.positions,
        position_delta=made.position_delta,
        n=n,
    )


@functools.cache
def alone(device: Device) -> dict[str, Answer]:
    """The answer of each mix, served one at a time, without a prefix cache."""

    async def run() -> dict[str, Answer]:
        async with device.running(tiny.checkpoint("omni"), enable_prefix_caching=False) as engine:
            return {
                mix: await device.alone(engine, await make_request(names, **device.rules))
                for mix, names in MIXES.items()
            }

    return asyncio.run(run())


async def all_mixes(engine, device: Device, copies: int = 1) -> None:
    wanted = await asyncio.to_thread(alone, device)
    requests = {mix: await make_request(names) for mix, names in MIXES.items()}
    jobs = [(mix, answer(engine, request)) for mix, request in requests.items() for _ in range(copies)]
    texts = [answer(engine, text_request(range(2, 2 + k * 3), TOKENS)) for k in range(1, 20)]
    answers = await asyncio.gather(*[job for _, job in jobs], *texts)
    device.check([got[0] for got in answers[: len(jobs)]], [wanted[mix] for mix, _ in jobs])


async def test_media_changes_the_answer(device):
    wanted = await asyncio.to_thread(alone, device)
    assert len({tuple(each.tokens) for each in wanted.values()}) == len(MIXES)


async def test_answers_are_those_of_the_cpu(device):
    cpu = await asyncio.to_thread(alone, Device("cpu"))
    own = await asyncio.to_thread(alone, device)
    device.check([cpu[mix].tokens for mix in MIXES], [own[mix] for mix in MIXES])


async def test_pixels_give_the_answers_of_patches(device):
    wanted = await asyncio.to_thread(alone, device)
    async with device.running(tiny.checkpoint("omni")) as engine:
        got = [(await answer(engine, await make_request(names, pixels=True)))[0] for names in MIXES.values()]
    device.check(got, list(wanted.values()))


async def test_batched_with_text_and_other_media(device):
    async with device.running(tiny.checkpoint("omni")) as engine:
        await all_mixes(engine, device, copies=2)


@pytest.mark.parametrize("chunk", [1, 7, 64])
async def test_chunked_inside_media(chunk, device):
    async with device.running(tiny.checkpoint("omni"), max_prefill_chunk=chunk) as engine:
        await all_mixes(engine, device)


async def test_prefix_cached_and_towers_not_run_again(device):
    wanted = await asyncio.to_thread(alone, device)
    encodes = 0

    def count(step) -> None:
        nonlocal encodes
        encodes += step.num_encodes

    async with device.running(tiny.checkpoint("omni")) as engine:
        engine.on_step = count
        for turn in range(3):
            got = [(await answer(engine, await make_request(names)))[0] for names in MIXES.values()]
            device.check(got, list(wanted.values()), f"turn {turn}")
        assert engine.stats.prefix_hits > 0
        assert encodes == len({name for names in MIXES.values() for name in names})


async def test_another_picture_of_the_same_size_is_not_a_prefix_hit(device):
    ITEMS.setdefault("other", ("image", lambda: picture(noise(90, 120, 9), "PNG")))
    async with device.running(tiny.checkpoint("omni")) as engine:
        first = await make_request(("red",))
        second = await make_request(("other",))
        assert np.array_equal(first.prompt_token_ids, second.prompt_token_ids)
        fresh = (await answer(engine, first))[0]
        assert (await answer(engine, second))[0] != fresh
        assert (await answer(engine, first))[0] == fresh


@pytest.mark.parametrize("cache", [True, False])
async def test_preempted_in_the_middle(cache, device):
    async with device.running(
        tiny.checkpoint("omni"), num_gpu_blocks_override=26, max_model_len=380, enable_prefix_caching=cache
    ) as engine:
        await all_mixes(engine, device, copies=2)
        assert engine.stats.preemptions > 0


async def test_small_encoder_cache_is_shared_in_turns(device):
    async with device.running(tiny.checkpoint("omni"), encoder_cache_tokens=128, encoder_budget=64) as engine:
        await all_mixes(engine, device, copies=2)
        assert (await quiet(engine))["encoder_in_use"] == 0


async def next_to_a_text(engine, requests) -> list:
    """Answers of requests submitted together with a text request that decodes until all of them are answered."""
    let_go = threading.Event()
    held = asyncio.ensure_future(engine.on_device(lambda runtime: let_go.wait(60)))
    text = asyncio.ensure_future(answer(engine, text_request(range(2, 9), 200)))
    jobs = [asyncio.ensure_future(answer(engine, request)) for request in requests]
    await asyncio.sleep(0)  # all are submitted
    let_go.set()
    got = await asyncio.gather(*jobs)
    assert await held
    assert len((await text)[0]) == 200
    return [each[0] for each in got]


async def test_rows_decode_between_the_pieces_of_a_large_tower(device):
    """The items have more patches than a step encodes; a text request decodes between the parts of their tower runs."""
    wanted = await asyncio.to_thread(alone, device)
    mixes, steps = ("video", "two images"), []
    requests = [await make_request(MIXES[mix], **device.rules) for mix in mixes]
    async with device.running(tiny.checkpoint("omni"), encoder_budget=16) as engine:
        engine.on_step = lambda step: steps.append((step.num_encodes, step.num_rows))
        got = await next_to_a_text(engine, requests)
        assert (await quiet(engine))["encoder_in_use"] == 0
    device.check(got, [wanted[mix] for mix in mixes])
    assert sum(encodes for encodes, _ in steps) > 6, "pieces of 16 patches each"
    assert all(rows for encodes, rows in steps if encodes), "the text's row is in each of these steps"


async def test_poisoned_memory_changes_nothing(device):
    async with device.running(
        tiny.checkpoint("omni"), debug_poison=True, num_gpu_blocks_override=40, max_model_len=380
    ) as engine:
        for _ in range(2):
            await all_mixes(engine, device)
            await quiet(engine)


@pytest.mark.parametrize("settings", [{}, {"max_prefill_chunk": 7}], ids=["company", "chunks"])
async def test_not_a_bit_of_the_log_probabilities_depends_on_circumstances(settings, device):
    """Other requests, chunks inside media, cached prefixes and tower batches; `deterministic` is set where needed."""
    folder = tiny.checkpoint("omni")

    async def collected(engine, mix: str) -> list:
        deltas = (await answer_deltas(engine, await make_request(MIXES[mix], logprobs=5)))[0]
        return [entry for delta in deltas for entry in delta.logprobs or ()]

    async with device.running(folder, enable_prefix_caching=False, **device.exact) as engine:
        wanted = [await collected(engine, mix) for mix in MIXES]
    assert all(len(entries) == TOKENS for entries in wanted)
    async with device.running(folder, **settings, **device.exact) as engine:
        for turn in range(2):
            others = [asyncio.ensure_future(answer(engine, text_request(range(2, 2 + k), TOKENS))) for k in (1, 9, 40)]
            got = await asyncio.gather(*[collected(engine, mix) for mix in MIXES])
            await asyncio.gather(*others)
            assert got == wanted, turn


async def test_several_choices_share_the_media(device):
    wanted = await asyncio.to_thread(alone, device)
    async with device.running(tiny.checkpoint("omni")) as engine:
        request = await make_request(MIXES["image and audio"], n=4)
        device.check(await answer(engine, request), [wanted["image and audio"]] * 4)


async def test_pictures_of_several_requests_share_a_run_of_the_tower(device):
    """Four prompts begin in one step: the tower runs once, and each answer equals that of the prompt alone."""
    sizes = ((60, 60), (90, 60), (60, 120), (56, 84))
    for number, size in enumerate(sizes):
        ITEMS.setdefault(f"shared {number}", ("image", lambda size=size: picture(noise(*size, 3), "PNG")))
    requests = [await make_request((f"shared {number}",), **device.rules) for number in range(len(sizes))]
    async with device.running(tiny.checkpoint("omni"), enable_prefix_caching=False) as engine:
        wanted = [await device.alone(engine, request) for request in requests]
        await quiet(engine)
        assert await engine.reset_encoder_cache()
        before, let_go = engine.stats.encoder.calls, threading.Event()
        held = asyncio.ensure_future(engine.on_device(lambda runtime: let_go.wait(60)))
        jobs = [asyncio.ensure_future(answer(engine, request)) for request in requests]
        await asyncio.sleep(0)  # all are submitted; the device thread receives them together
        let_go.set()
        got = await asyncio.gather(*jobs)
        assert await held
        assert engine.stats.encoder.calls - before == 1
    device.check([each[0] for each in got], wanted)
