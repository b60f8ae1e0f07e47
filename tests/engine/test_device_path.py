"""The device's executor on CPU tensors gives the CPU's tokens, through records, prep and padded steps."""

import asyncio
import gc

import numpy as np
import pytest

import engine.run.start
from engine import Engine
from engine.kernels.moe.sort import sort_pairs_reference
from engine.step.backend.device.upload_ring import ALIGNED, UploadRing
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import answer, answer_deltas, running
from tests.invariance.test_text import PROMPTS, alone, request

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3}
NAMES = ("llama", "mistral-window", "qwen2", "qwen3", "omni")


@pytest.fixture
def on_the_device_path(monkeypatch):
    monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())


@pytest.fixture
def wanted(name):
    """The host's tokens, computed before `on_the_device_path` takes effect."""
    return alone(name)


def counts(engine: Engine) -> dict[str, int]:
    return engine.inspect().runtime.executor.backend.launcher.counts


async def all_at_once(engine: Engine) -> list[list[int]]:
    answers = await asyncio.gather(*[answer(engine, request(prompt)) for prompt in PROMPTS])
    return [choices[0] for choices in answers]


@pytest.mark.covering(1)
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
    # The memory profile runs the towers once on the largest item: here a small one.
    async with running(tiny.checkpoint(name), encoder_cache_tokens=64, **settings) as engine:
        assert await all_at_once(engine) == wanted
        seen = counts(engine)
    # Each step has one prep and one wait, whatever its other launches.
    assert seen["prep"] + seen["step"] == seen["finish"] == seen["wait"]
    if settings.get("enforce_eager"):
        assert seen["forward"] == seen["sample"] == seen["step"] == 0
    elif not settings.get("cudagraph_capture_sizes"):
        assert seen["forward"] + seen["step"] == seen["finish"]
        assert seen["step"] > 20


async def test_no_garbage_is_collected_while_graphs_are_recorded(on_the_device_path, monkeypatch):
    recorded, collects = HostAccelerator.capture, []

    def capture(self, body, met=False):
        collects.append(gc.isenabled())
        return recorded(self, body, met)

    monkeypatch.setattr(HostAccelerator, "capture", capture)
    async with running(tiny.checkpoint("llama")):
        assert gc.isenabled()
    assert collects
    assert not any(collects)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("name", ["qwen3"])
async def test_rows_that_may_bring_home_more_tokens_bring_the_same(wanted, name, on_device, monkeypatch):
    if on_device:
        monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    async with running(tiny.checkpoint(name), speculative=DRAFTS) as served:
        assert await all_at_once(served) == wanted
        backend = served.inspect().runtime.executor.backend
        assert {plan.width for plan in backend.plans} == {5}
        if on_device:  # a verify step's rows are cut into parts, as rows of one query are
            assert [work.most_cut for work in backend.buffers.work.values()] == [4]


@pytest.mark.parametrize("name", ["qwen3_moe"])
async def test_padding_of_a_step_chooses_no_expert(wanted, on_the_device_path, name, monkeypatch):
    seen = []

    def sorted_pairs(chosen, num_experts):
        pairs = sort_pairs_reference(chosen, num_experts)
        seen.append((len(chosen), int(pairs.ends[-1]) // pairs.top_k))
        return pairs

    monkeypatch.setattr("engine.kernels.moe.panels.sort_pairs", sorted_pairs)
    async with running(tiny.checkpoint(name), cudagraph_capture_sizes=(4, 16)) as engine:
        seen.clear()
        assert await all_at_once(engine) == wanted
    assert any(real < padded for padded, real in seen)
    assert all(real > 0 for _, real in seen)


@pytest.mark.parametrize("name", ["qwen3", "omni"])
async def test_a_walk_for_kernels_changes_no_answer(wanted, on_the_device_path, name, monkeypatch):
    walked = []

    def walk_only(walk, threads, bind):
        walk()
        walked.append(threads)

    monkeypatch.setattr("engine.step.backend.device.startup.precompile", walk_only)
    async with running(tiny.checkpoint(name), encoder_cache_tokens=64) as engine:
        assert await all_at_once(engine) == wanted
    (threads,) = walked
    assert threads >= 1


@pytest.fixture
def wanted_of_media():
    """The host's tokens for each mix of media, computed, like `wanted`, before `on_the_device_path` takes effect."""
    pytest.importorskip("av")
    from tests.invariance.devices import Device
    from tests.invariance.test_media import alone as alone_with_media

    return alone_with_media(Device("cpu"))


async def test_media_go_through_the_ring(wanted_of_media, on_the_device_path):
    from tests.invariance.test_media import MIXES, make_request

    # At start the towers run on an item as large as the cache, which has twice as many rows as all items here.
    async with running(tiny.checkpoint("omni"), encoder_cache_tokens=256) as engine:
        for mix, names in MIXES.items():
            for pixels in (True, False):
                got = await answer(engine, await make_request(names, pixels=pixels))
                assert got == [wanted_of_media[mix].tokens], (mix, pixels)
        seen = counts(engine)
    assert seen["forward"] + seen["step"] == seen["finish"]  # these forwards are short enough for graphs


class Marks:
    """Replaces an accelerator; records which blocks are waited for and which copies are marked."""

    def __init__(self) -> None:
        self.device = HostAccelerator().device
        self.pinned = HostAccelerator().pinned
        self.seen: list[tuple[str, int]] = []
        self._count = 0

    def event(self):
        marks, number = self.seen, self._count
        self._count += 1

        class Mark:
            def record(self) -> None:
                marks.append(("copied", number))

            def synchronize(self) -> None:
                marks.append(("waited", number))

        return Mark()


def test_a_block_of_the_ring_is_written_again_only_after_its_copy():
    marks = Marks()
    ring = UploadRing(marks, block_bytes=64, blocks=2)
    draw = np.random.default_rng(0)
    for size in (10, 100, 64, 1, 300):
        sent = {"a": draw.integers(0, 256, (size, 1), np.uint8), "b": draw.standard_normal((2, 3)).astype(np.float32)}
        got = ring.put(sent)
        for name, array in sent.items():
            np.testing.assert_array_equal(got[name].numpy(), array)
            assert got[name].storage_offset() * got[name].element_size() % ALIGNED == 0
    assert {number for _, number in marks.seen} == {0, 1}
    block = 0
    for what, number in marks.seen:
        if what == "waited":  # the next block is begun; all writes before went to the current one
            block = 1 - block
        assert number == block
    assert sum(what == "waited" for what, _ in marks.seen) == (475 + 5 * 24 - 1) // 64


RULES = [
    {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.8, "frequency_penalty": 0.4, "logprobs": 2},
    {"logit_bias": ((5, 3.0), (9, -100.0), (17, 2.5))},
    {"logprobs": 5},
    {"bad_words": ((7,), (11,)), "min_tokens": 6, "stop_token_ids": tuple(range(40))},
    {"allowed_token_ids": tuple(range(3, 60)), "repetition_penalty": 0.8, "logprobs": 20},
    {"bad_words": ((4, 5), (7,)), "frequency_penalty": 0.5},  # this set of rules and the next run in Python
    {"logprobs": 3, "logprob_token_ids": (1, 2)},
]


async def collected(engine: Engine, prompt: np.ndarray, rules: dict) -> tuple[list[int], list]:
    """Tokens of an answer, and the tokens and ranks of its log-probabilities."""
    (deltas,) = await answer_deltas(engine, request(prompt, **rules))
    tokens = [token for delta in deltas for token in delta.token_ids]
    entries = [entry for delta in deltas for entry in delta.logprobs or ()]
    assert len(entries) == (len(tokens) if "logprobs" in rules else 0)
    return tokens, [(entry.token_id, entry.rank, entry.top_ids) for entry in entries]


@pytest.mark.parametrize("settings", [{}, {"num_gpu_blocks_override": 24, "max_model_len": 200}], ids=["", "pressure"])
async def test_rules_and_log_probabilities_are_those_of_the_host(on_the_device_path, monkeypatch, settings):
    """Together with rows without rules; and, with too few blocks, preempted and resumed."""
    sent = [(prompt, RULES[number % len(RULES)]) for number, prompt in enumerate(PROMPTS)]
    folder = tiny.checkpoint("qwen3")
    async with running(folder, **settings) as engine:
        got = await asyncio.gather(*[collected(engine, *each) for each in sent])
        assert (engine.inspect().runtime.scheduler.num_preemptions > 0) is bool(settings)
        assert counts(engine)["step"] > 0
        assert len(engine.inspect().runtime.executor.backend.sampler.lines) == 0
    monkeypatch.undo()
    async with running(folder) as engine:
        assert got == [await collected(engine, *each) for each in sent]


async def test_steps_of_rows_with_rules_are_launched_whole(on_the_device_path):
    async with running(tiny.checkpoint("qwen3")) as engine:
        before = counts(engine)["step"]
        answers = [await collected(engine, PROMPTS[0], rules) for rules in RULES[:7]]
        assert counts(engine)["step"] - before == sum(len(tokens) - 1 for tokens, _ in answers)
