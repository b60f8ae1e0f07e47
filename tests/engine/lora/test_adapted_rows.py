"""Rows with adapters get the tokens of a checkpoint into which the adapter is merged, whatever else is in the batch."""

import asyncio
import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from _fast.layout import GraphKind
from _fast.steady import SPECIAL_PROMPT, SPECIAL_VARIANT_SHIFT
from engine.base.config import LoraConfig
from engine.run import start
from engine.step.backend.device.forward import WHOLE_ROWS
from engine.step.parts.adapters import Adapters
from tests import tiny, tiny_states
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.stand_in_accelerator import StandInAccelerator
from tests.engine_kit import answer, answer_deltas, prompts, running, text_request
from tests.lora_kit import Drawn, adapted, drawn, merged

NAMES = ("qwen3", "gemma2", "cohere")
TOKENS = 12
PROMPTS = prompts(12, tiny.FIRST_SPECIAL, seed=5, longest=40)
LORA = LoraConfig(max_loras=3)


class Answer(NamedTuple):
    """The tokens of one choice, and their log-probabilities."""

    tokens: list[int]
    logprobs: list[float]


@pytest.fixture(params=["host", "device", "steady"])
def backend(request, monkeypatch) -> str:
    """Both backends; the device has graphs that are plain calls, and "steady" has the real launcher and its loop."""
    if request.param != "host":
        made = HostAccelerator if request.param == "device" else StandInAccelerator
        monkeypatch.setattr(start, "open_accelerator", lambda _device: made())
    return request.param


@functools.cache
def adapters(name: str) -> tuple[Drawn | None, ...]:
    """The base, an adapter of all layers, and two of some layers with other ranks."""
    folder = tiny.checkpoint(name)
    some = drawn(folder, 3, 2, ("q_proj", "v_proj", "down_proj"))
    return None, drawn(folder, 8, 1), some, drawn(folder, 16, 3, ("o_proj", "up_proj"))


@functools.cache
def folders(name: str, room: Path) -> list[Path]:
    """The checkpoint, and the checkpoint with each adapter merged in."""
    folder = tiny.checkpoint(name)
    return [
        folder if each is None else merged(folder, each, room / f"{name}-{number}")
        for number, each in enumerate(adapters(name))
    ]


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("merged")


@functools.cache
def wanted(name: str, room: Path) -> list[Answer]:
    """The answer to prompt k from the checkpoint of adapter k % 4, served alone."""

    async def run() -> list[Answer]:
        found: dict[int, Answer] = {}
        for number, folder in enumerate(folders(name, room)):
            async with running(folder) as engine:
                for k in range(number, len(PROMPTS), 4):
                    found[k] = await answered(engine, request(k))
        return [found[k] for k in range(len(PROMPTS))]

    return asyncio.run(run())


def request(k: int):
    return text_request(PROMPTS[k], TOKENS, ignore_eos=True, logprobs=0)


async def answered(engine, asked) -> Answer:
    (deltas,) = await answer_deltas(engine, asked)
    logprobs = [each.logprob for delta in deltas for each in delta.logprobs]
    return Answer([token for delta in deltas for token in delta.token_ids], logprobs)


async def served(engine, name: str) -> list[Answer]:
    """All prompts at once, prompt k with adapter k % 4."""
    asked = [adapted(request(k), adapters(name)[k % 4]) for k in range(len(PROMPTS))]
    return list(await asyncio.gather(*(answered(engine, each) for each in asked)))


def check(got: list[Answer], want: list[Answer]) -> None:
    assert [each.tokens for each in got] == [each.tokens for each in want]
    for mine, other in zip(got, want):
        np.testing.assert_allclose(mine.logprobs, other.logprobs, atol=1e-4)


def test_merged_checkpoints_answer_as_transformers_does(room):
    folder = folders("qwen3", room)[1]
    model = tiny.reference(folder)
    model.generation_config.eos_token_id = None
    ids = torch.from_numpy(PROMPTS[1])[None].long()
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
    assert out[0, len(PROMPTS[1]) :].tolist() == wanted("qwen3", room)[1].tokens


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", NAMES)
async def test_a_batch_of_the_base_and_three_adapters_equals_merged_weights(name, backend, room):
    answers = await asyncio.to_thread(wanted, name, room)
    async with running(tiny.checkpoint(name), lora=LORA) as engine:
        base = [await answered(engine, request(k)) for k in range(4)]
        check(base[:1], answers[:1])
        for number in (1, 2, 3):
            assert not np.allclose(base[number].logprobs, answers[number].logprobs, atol=1e-2)
        check(await served(engine, name), answers)
        check(await served(engine, name), answers)  # prefixes are cached now


async def test_log_probabilities_of_prompts_and_of_sampled_rows_read_the_adapter_of_each_row(backend, room):
    """Steps that run eagerly, or that sample apart from the forward; gemma2's head is tied to its embedding."""
    rules = {"ignore_eos": True, "logprobs": 3, "prompt_logprobs": 2, "bad_words": ((7, 8),)}
    asked = [text_request(PROMPTS[k], 4, **rules) for k in range(4)]

    async def values(engine, k: int, number: int) -> list[float]:
        (deltas,) = await answer_deltas(engine, adapted(asked[k], adapters("gemma2")[number]))
        entries = [each for delta in deltas for each in delta.logprobs]
        prompt = next(delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None)
        return [each.logprob for each in [*prompt[1:], *entries]]

    want = []
    for k, folder in enumerate(folders("gemma2", room)):
        async with running(folder) as engine:
            want.append(await values(engine, k, 0))
    async with running(tiny.checkpoint("gemma2"), lora=LORA) as engine:
        got = await asyncio.gather(*(values(engine, k, k) for k in range(4)))
    for mine, other in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-4)


@pytest.mark.covering(1)
@pytest.mark.parametrize("settings", [{"max_num_batched_tokens": 17}, {"num_gpu_blocks_override": 14}])
async def test_chunks_and_preemption_change_nothing(settings, backend, room):
    answers = await asyncio.to_thread(wanted, "qwen3", room)
    async with running(tiny.checkpoint("qwen3"), lora=LORA, **settings) as engine:
        check(await served(engine, "qwen3"), answers)


async def test_gil_free_steps_learn_which_graphs_a_row_needs(monkeypatch):
    """The bits of `special` name the variant with adapters, and steps without adapted rows replay the base's graphs."""
    accelerator = HostAccelerator()
    monkeypatch.setattr(start, "open_accelerator", lambda _device: accelerator)

    def bits(runtime) -> dict[bool, int]:
        rows = runtime.admission.rows.items()
        return {row.request.lora is not None: int(runtime.executor.special[slot]) for slot, row in rows}

    async with running(tiny.checkpoint("qwen3"), lora=LORA) as engine:
        await answer(engine, adapted(request(1), adapters("qwen3")[1]))
        engine.pause()
        asked = [adapted(request(0), each) for each in adapters("qwen3")[:2]]
        pending = [asyncio.ensure_future(answer(engine, each)) for each in asked]
        await asyncio.sleep(0)
        found = await engine.on_device(bits)
        part = await engine.on_device(lambda runtime: runtime.executor.part(Adapters))
        engine.resume()
        await asyncio.gather(*pending)
    assert part.variant
    assert found == {False: SPECIAL_PROMPT, True: SPECIAL_PROMPT | part.variant << SPECIAL_VARIANT_SHIFT}


@pytest.mark.parametrize("made", [HostAccelerator, StandInAccelerator])
async def test_steps_of_many_rows_with_adapters_run_in_parts(made, monkeypatch, room):
    """Forward and sampling are graphs of their own; steps of few rows, and those without adapters, are one graph."""
    monkeypatch.setattr(start, "open_accelerator", lambda _device: made())
    answers = await asyncio.to_thread(wanted, "qwen3", room)
    async with running(tiny.checkpoint("qwen3"), lora=LORA, max_num_seqs=len(PROMPTS)) as engine:
        check(await served(engine, "qwen3"), answers)
        variant = await engine.on_device(lambda runtime: runtime.executor.part(Adapters).variant)
        launcher = await engine.on_device(lambda runtime: runtime.executor.backend.launcher)
    rows = (WHOLE_ROWS, WHOLE_ROWS + 1)
    assert [launcher.pick(GraphKind.STEP, count, variant) for count in rows] == [WHOLE_ROWS, 0]
    assert [launcher.pick(GraphKind.STEP, count) for count in rows] == [WHOLE_ROWS, len(PROMPTS)]
    assert [launcher.pick(GraphKind.DECODE, count, variant) for count in rows] == [WHOLE_ROWS, len(PROMPTS)]


async def test_four_adapters_share_two_places(backend, room):
    answers = await asyncio.to_thread(wanted, "qwen3", room)
    async with running(tiny.checkpoint("qwen3"), lora=LoraConfig(max_loras=2)) as engine:
        for _ in range(3):
            check(await served(engine, "qwen3"), answers)


async def test_the_prefix_cache_has_other_entries_for_each_adapter(room):
    """One prompt with each adapter in turn, twice; then the choices of one request share its blocks."""
    prompt = np.concatenate(PROMPTS)[:70]
    async with running(tiny.checkpoint("qwen3"), lora=LORA) as engine:
        rounds = []
        for _ in range(2):
            rounds.append([await answer(engine, adapted(text_request(prompt, 8), each)) for each in adapters("qwen3")])
        assert rounds[0] == rounds[1]
        assert len({tuple(tokens) for (tokens,) in rounds[0]}) == 4
        deltas = await answer_deltas(engine, adapted(text_request(prompt, 8), adapters("qwen3")[1]))
        assert deltas[0][0].cached_tokens == 64
        three = await answer(engine, adapted(text_request(prompt, 8, n=3), adapters("qwen3")[1]))
        assert three == [rounds[0][1][0]] * 3


async def test_steps_without_adapters_have_the_bits_of_an_engine_without_places(backend):
    async def answers(**settings) -> list[Answer]:
        async with running(tiny.checkpoint("qwen3"), **settings) as engine:
            return list(await asyncio.gather(*(answered(engine, request(k)) for k in range(6))))

    assert await answers(lora=LORA) == await answers()


# PEFT's adapters of gpt2's transposed matrices have fan_in_fan_out, which is refused.
@pytest.mark.full
@pytest.mark.parametrize(
    "name", sorted({*tiny.CHECKPOINTS, *tiny_states.CHECKPOINTS} - {*NAMES, "omni", "qwen2_5_vl", "gpt2"})
)
async def test_every_family_answers_as_with_merged_weights(name, tmp_path):
    """Every linear layer that may have an adapter has one; without its effect the log-probabilities differ."""
    folder = tiny.checkpoint(name)
    one = drawn(folder, 4, 1, scale=0.15, with_experts=False)
    whole = merged(folder, one, tmp_path / name)
    asked = [text_request(PROMPTS[k], 6, ignore_eos=True, logprobs=0) for k in range(3)]
    async with running(whole) as engine:
        want = [await answered(engine, each) for each in asked]
    async with running(folder, lora=LORA) as engine:
        base, *got = await asyncio.gather(
            answered(engine, asked[0]), *(answered(engine, adapted(each, one)) for each in asked)
        )
    check(got, want)
    assert not np.allclose(base.logprobs, want[0].logprobs, atol=1e-2)
