"""After "ready" a GPU engine compiles and loads no kernel, captures no graph and takes no memory.

A step waits for the device only at its one event: torch's own guard is set to raise. Each load leaves as many bytes
allocated as before.
"""

import asyncio
import gc
import random
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from engine import Engine
from tests import tiny
from tests.bench.shapes import FORMS, few_layers, write_folder
from tests.engine.circumstances import drawn
from tests.engine.kinds import every_kind
from tests.engine_kit import answer, answer_deltas, prompts, quiet, text_request
from tests.invariance.devices import Device

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]
CUDA = Device("cuda")
PROMPTS = prompts(60, tiny.FIRST_SPECIAL, seed=3, longest=200)


def memory() -> dict[str, int]:
    """Memory taken from the driver so far: device memory, and pinned memory if torch counts it."""
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    taken = {
        name: stats.get(name, 0) for name in ("num_device_alloc", "num_alloc_retries", "reserved_bytes.all.current")
    }
    pinned = torch.cuda.host_memory_stats() if hasattr(torch.cuda, "host_memory_stats") else {}
    return taken | {f"host {name}": pinned.get(name, 0) for name in ("num_host_alloc", "segment.current")}


@contextmanager
def nothing_new(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails if code in this block compiles or loads a kernel, captures a graph or takes memory from the driver."""
    import triton

    seen: Counter[str] = Counter()

    def met(*_: object, **facts: object) -> None:
        seen[f"kernel {facts.get('repr')}"] += 1

    begin = torch.cuda.CUDAGraph.capture_begin

    def capture(*args: object, **kwargs: object) -> None:
        seen["graph captured"] += 1
        begin(*args, **kwargs)

    before = memory()
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "jit_post_compile_hook", met)
        patch.setattr(torch.cuda.CUDAGraph, "capture_begin", capture)
        yield
    assert not seen
    assert memory() == before


@contextmanager
def no_waiting() -> Iterator[None]:
    """Makes calls that wait for the device raise."""
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns that this mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


async def plain_load(engine: Engine, count: int = 60) -> None:
    """Greedy and seeded rows of all lengths that arrive, end and are aborted."""
    draw = random.Random(count)

    async def one(number: int) -> None:
        await asyncio.sleep(draw.random() * 0.2)
        rules = {} if number % 2 else {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": number}
        sent = text_request(PROMPTS[number % 60], draw.randint(1, 40), ignore_eos=True, **rules)
        if number % 7:
            await answer(engine, sent)
            return
        async with engine.submit(sent) as stream:  # leaves before the end
            async for _ in stream:
                return

    await asyncio.gather(*[one(number) for number in range(count)])
    await quiet(engine)


async def special_load(engine: Engine) -> None:
    """Rows with rules, penalties and log-probabilities, together with plain rows."""
    rules = (
        {"logit_bias": ((5, 3.0),), "min_tokens": 4},
        {"allowed_token_ids": tuple(range(20, 60))},
        {"bad_words": ((7,), (30, 31))},
        {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2, "temperature": 0.7},
        {"logprobs": 5},
        {"prompt_logprobs": 3, "logprobs": 20},
        {"min_p": 0.05, "temperature": 1.2},
        {"top_n_sigma": 1.0, "xtc_probability": 0.5, "temperature": 1.2, "dry_multiplier": 0.8},
        {},
    )
    sent = [text_request(ids, 20, ignore_eos=True, **rules[k % len(rules)]) for k, ids in enumerate(PROMPTS)]
    await asyncio.gather(*[answer(engine, each) for each in sent])
    await quiet(engine)


def device_row(engine) -> dict[str, int]:
    """The ledger's bytes of the device and of pinned memory."""
    gc.collect()  # engines of earlier tests are in reference cycles
    return {name: engine.ledger()[name] for name in ("device_bytes", "device_reserved_bytes", "pinned_bytes")}


SETTINGS = {
    "room": {},
    "pressure": {"num_gpu_blocks_override": 40},
    "bfloat16": {"dtype": "bfloat16"},
    "deterministic": {"dtype": "bfloat16", "deterministic": True},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("name", ["qwen3", "omni", "mistral-window"])
async def test_text_compiles_and_allocates_nothing_new(name, settings, monkeypatch):
    async with CUDA.running(tiny.checkpoint(name), **settings) as engine:
        warm = device_row(engine)
        assert min(warm.values()) > 0
        with nothing_new(monkeypatch):
            for _ in range(3):
                await plain_load(engine)
        assert device_row(engine) == warm


async def test_the_first_request_compiles_and_allocates_nothing_new(monkeypatch):
    async with CUDA.running(tiny.checkpoint("qwen3")) as engine:
        with nothing_new(monkeypatch):
            await answer(engine, text_request(PROMPTS[0], 8, ignore_eos=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_rules_and_log_probabilities_compile_and_allocate_nothing_new(dtype, monkeypatch):
    async with CUDA.running(tiny.checkpoint("qwen3"), dtype=dtype) as engine:
        gc.collect()  # otherwise garbage of an earlier test would be freed in this block
        allocated = torch.cuda.memory_allocated()
        with nothing_new(monkeypatch):
            for _ in range(3):
                await special_load(engine)
        assert torch.cuda.memory_allocated() == allocated


REAL = {"load_format": "dummy", "dtype": "bfloat16", "num_gpu_blocks_override": 4096, "max_logprobs": -1}
LONG = {**REAL, "max_num_seqs": 0, "max_num_batched_tokens": 4096}
FULL = {
    "8b": {**REAL, "max_num_seqs": 0, "max_num_batched_tokens": 0},
    "8b in long steps": {**LONG, "logprobs_mode": "processed_logprobs"},
    "0.6b with the same bits": {**LONG, "deterministic": True},
    "0.6b without graphs": {**LONG, "enforce_eager": True},
    "vl-7b of few sizes": {**LONG, "cudagraph_capture_sizes": (4, 16)},
    "8b fp8 with an FP8 cache": {**REAL, "kv_cache_dtype": "fp8"},
    "8b fp8-blocks": REAL,
    "8b w4 in long steps": LONG,
    "30b-a3b": REAL,
    "30b-a3b fp8-blocks": REAL,
    "gpt-oss-20b in long steps": LONG,
}


def folder_of(case: str, path: Path) -> Path:
    """A folder with few layers of the case's shape, in the form of weights that the case may name."""
    shape, *rest = case.split()
    return write_folder(path, few_layers(shape), rest[0] if rest and rest[0] in FORMS else "")


@pytest.mark.parametrize("case", FULL)
async def test_every_kind_of_request_compiles_and_allocates_nothing_new(case, monkeypatch, tmp_path):
    """Real shapes: products use other kernels for other rows, and logits exceed memory that small tensors freed."""
    async with CUDA.running(folder_of(case, tmp_path), max_model_len=16384, **FULL[case]) as engine:
        warm = device_row(engine)
        with nothing_new(monkeypatch):
            await every_kind(engine)
        assert device_row(engine) == warm


@pytest.mark.parametrize("case", ["30b-a3b", "30b-a3b fp8-blocks", "gpt-oss-20b"])
async def test_the_first_batch_that_uses_every_expert_compiles_and_allocates_nothing_new(case, monkeypatch, tmp_path):
    """Prompts of random tokens from the whole vocabulary; the answers report which experts their layers chose."""
    settings = {**REAL, "max_num_seqs": 0, "max_num_batched_tokens": 0, "return_routed_experts": True}
    config = few_layers(case.split()[0])
    async with CUDA.running(folder_of(case, tmp_path), max_model_len=16384, **settings) as engine:
        warm = device_row(engine)
        sent = drawn(40, config["vocab_size"], (1, 700), 8, seed=3, return_routed_experts=True)
        with nothing_new(monkeypatch):
            answers = await asyncio.gather(*[answer_deltas(engine, request) for request in sent])
            await quiet(engine)
        assert device_row(engine) == warm
    experts = np.concatenate([choices[0][-1].routed_experts for choices in answers])
    count = config.get("num_experts") or config["num_local_experts"]
    touched = [len(np.unique(experts[:, layer])) for layer in range(experts.shape[1])]
    assert touched == [count] * config["num_hidden_layers"]


async def test_media_compile_and_allocate_nothing_new(monkeypatch):
    pytest.importorskip("av")
    from tests.invariance.test_media import MIXES, make_request

    async with CUDA.running(tiny.checkpoint("omni"), enable_prefix_caching=False) as engine:
        requests = [await make_request(names, pixels=pixels) for names in MIXES.values() for pixels in (True, False)]
        pinned = device_row(engine)["pinned_bytes"]
        with nothing_new(monkeypatch):
            for _ in range(2):
                await asyncio.gather(*[answer(engine, request) for request in requests])
                assert await engine.reset_encoder_cache()
        await quiet(engine)
        assert device_row(engine)["pinned_bytes"] == pinned


@pytest.mark.parametrize("name", ["qwen3", "omni"])
async def test_plain_steps_wait_at_their_event_only(name):
    async with CUDA.running(tiny.checkpoint(name)) as engine:
        with no_waiting():
            await plain_load(engine)


async def test_special_steps_wait_at_their_event_only():
    async with CUDA.running(tiny.checkpoint("qwen3")) as engine:
        with no_waiting():
            await special_load(engine)


async def test_steps_are_predictable_and_counted():
    """StepStats of decode steps: rows, tokens, and host times of less than a second."""
    async with CUDA.running(tiny.checkpoint("qwen3")) as engine:
        seen = []
        engine.on_step = seen.append
        await asyncio.gather(*[answer(engine, text_request(ids, 40, ignore_eos=True)) for ids in PROMPTS[:16]])
    assert sum(stats.num_sampled for stats in seen) == 16 * 40
    full = [stats for stats in seen if stats.num_rows == stats.num_tokens == 16]
    assert len(full) >= 20
    assert all(0 <= stats.schedule_s + stats.launch_s + stats.commit_s < 1 for stats in full)


async def test_what_steps_take_is_known_also_where_they_ran_without_the_lock():
    async with CUDA.running(tiny.checkpoint("qwen3")) as engine:
        await asyncio.gather(*[answer(engine, text_request(ids, 200, ignore_eos=True)) for ids in PROMPTS[:16]])
        pace = engine.inspect().pace
        for _ in range(100):  # answers arrive before the GIL-free loop has ended and reported its times
            if pace._decode:
                break
            await asyncio.sleep(0.01)
        assert pace._decode  # without these times prompts would join decoding rows without a limit
        assert all(0 < seconds < 1 for seconds in pace._decode.values())


async def test_memory_comes_back_when_the_engine_stops():
    """Engines started one after the other hold no memory afterwards, except what torch caches for reuse."""
    left = []
    for _ in range(3):
        async with CUDA.running(tiny.checkpoint("qwen3")) as engine:
            await plain_load(engine, 10)
        del engine
        await asyncio.sleep(0.1)  # the loop releases its last callbacks
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # torch caches one workspace per stream
        left.append(torch.cuda.memory_allocated())
    assert left[1:] == left[:1] * 2
