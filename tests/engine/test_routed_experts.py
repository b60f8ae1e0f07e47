"""The reported experts of each token equal those of transformers, whatever the scheduler did with the row."""

from __future__ import annotations

import asyncio
import functools

import numpy as np
import pytest
import torch

import engine.run.start
from engine import Engine, FinishReason, Request, SamplingParams
from engine.base.errors import ConfigError, RequestError
from engine.cache.layout import CacheLayout
from engine.cache.tokens import FullSpec
from engine.cache.window import SlidingSpec
from engine.models.registry import build_model, load_model_config
from engine.step.parts.routed import RoutedExperts
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import answer_deltas, running, text_request

TIGHT = {"max_model_len": 112, "max_num_seqs": 12, "max_num_batched_tokens": 48}
ON = {"return_routed_experts": True}


def by_layer(model, found: list[torch.Tensor]):
    """A function of tokens -> [tokens, layers, numbers]; hooks of `model` append one layer at a time to `found`."""

    def numbers(tokens: list[int]) -> torch.Tensor:
        found.clear()
        with torch.inference_mode():
            model(input_ids=torch.tensor([tokens]))
        return torch.stack(found, 1)

    return numbers


@functools.cache
def oracle(name: str):
    """A function of tokens -> [tokens, layers, experts]: the logits of transformers' routers."""
    model, found = tiny.reference(tiny.checkpoint(name)), []

    def note(_module, _inputs, outputs):
        logits = next(output for output in outputs if output.is_floating_point())
        found.append(logits.reshape(-1, logits.shape[-1]))

    for layer in model.model.layers:
        router = getattr(layer.mlp, "gate", None) or getattr(layer.mlp, "router", None)
        if router is not None:
            router.register_forward_hook(note)

    return by_layer(model, found)


@functools.cache
def weights_of_modules(name: str):
    """A function of tokens -> [tokens, layers, experts]: weights of the experts that transformers' routers choose."""
    model, found = tiny.reference(tiny.checkpoint(name)), []

    def note(module, inputs):
        hidden, chosen, weights = inputs
        found.append(hidden.new_zeros(len(hidden), module.num_experts).scatter_(1, chosen, weights))

    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts.register_forward_pre_hook(note)

    return by_layer(model, found)


def check(name: str, prompt: np.ndarray, answer: list[int], experts: np.ndarray | None, oracle=oracle) -> float:
    """Checks that each token has the experts with the highest numbers, in order. Returns the share of equal ids."""
    tokens = [*prompt.tolist(), *answer]
    assert experts is not None
    assert len(experts) >= len(tokens)
    logits = oracle(name)(tokens)
    got = torch.from_numpy(experts[: len(tokens)].astype(np.int64))
    want = logits.topk(got.shape[-1], -1).indices
    assert got.shape == want.shape
    torch.testing.assert_close(logits.gather(-1, got), logits.gather(-1, want), rtol=0, atol=1e-4)
    return float((got == want).float().mean())


def requests(count: int) -> list[Request]:
    """Prompts with common beginnings, some with two choices, greedy or sampled."""
    draw = np.random.default_rng(5)
    starts = [draw.integers(2, 90, 40) for _ in range(3)]
    made = []
    for number in range(count):
        prompt = np.concatenate([starts[number % 3][: draw.integers(0, 40)], draw.integers(2, 90, draw.integers(1, 9))])
        rules = {"temperature": 0.0} if number % 2 else {"temperature": 1.0, "seed": number}
        sampling = SamplingParams(max_tokens=int(draw.integers(1, 36)), return_routed_experts=number % 7 != 3, **rules)
        made.append(Request(prompt.astype(np.int32), sampling, n=1 + (number % 5 == 0)))
    return made


async def follow(engine: Engine, number: int, request: Request) -> list[tuple[list[int], np.ndarray | None]]:
    """The tokens and experts of the choices. Some requests are aborted; some choices are ended by the client's side."""
    tokens: list[list[int]] = [[] for _ in range(request.n)]
    experts: list[np.ndarray | None] = [None] * request.n
    concluded = set()
    async with engine.submit(request) as stream:
        async for delta in stream:
            assert delta.finish_reason is not FinishReason.ERROR, delta.error
            tokens[delta.index] += delta.token_ids
            experts[delta.index] = delta.routed_experts
            if number % 11 == 4 and len(tokens[0]) > 2:
                return []
            asked = request.sampling.return_routed_experts
            if asked and number % 6 == 5 and len(tokens[delta.index]) > 4 and delta.index not in concluded:
                concluded.add(delta.index)
                stream.conclude(delta.index)
    return list(zip(tokens, experts))


@pytest.mark.parametrize(
    ("name", "on_device", "count", "blocks"),
    [
        ("qwen3_moe", False, 200, 14),
        ("qwen3_moe", True, 60, 14),
        ("gpt_oss", False, 40, 24),
        ("gpt_oss", True, 20, 24),
        ("deepseek_v3", False, 40, 14),
        ("deepseek_v3", True, 20, 14),
    ],
)
async def test_the_experts_are_those_of_transformers(name, on_device, count, blocks, monkeypatch):
    """With prefix hits, preemption, two choices, aborts, and choices that the client's side ends."""
    if on_device:
        monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    equal, numbers = [], weights_of_modules if name in tiny.THROUGH_TRANSFORMERS else oracle
    async with running(tiny.checkpoint(name), num_gpu_blocks_override=blocks, **TIGHT, **ON) as served:
        asked = requests(count)
        for first in range(0, count, 20):
            batch = list(enumerate(asked[first : first + 20], first))
            told = await asyncio.gather(*(follow(served, number, request) for number, request in batch))
            for (_, request), choices in zip(batch, told):
                for tokens, experts in choices:
                    if request.sampling.return_routed_experts:
                        equal.append(check(name, request.prompt_token_ids, tokens, experts, numbers))
                    else:
                        assert experts is None
        if count == 200:
            assert served.stats.preemptions > 0
            assert served.stats.prefix_hits > 0
        assert served.ledger()["late_extras"] == 0
    assert len(equal) > count // 2
    assert sum(equal) / len(equal) > 0.999


async def test_asking_changes_no_token_and_a_server_that_keeps_experts_answers_the_same():
    prompt = np.arange(2, 40)
    async with running(tiny.checkpoint("qwen3_moe")) as served:
        want = await answer_deltas(served, text_request(prompt, 9, logprobs=2))
        assert served.inspect().runtime.executor.part(RoutedExperts) is None
    async with running(tiny.checkpoint("qwen3_moe"), **ON) as served:
        asked = await answer_deltas(served, text_request(prompt, 9, logprobs=2, return_routed_experts=True))
        plain = await answer_deltas(served, text_request(prompt, 9, logprobs=2))
    for got in (asked, plain):
        for what in ("token_ids", "logprobs"):
            assert [x for d in got[0] for x in getattr(d, what)] == [x for d in want[0] for x in getattr(d, what)]
    assert asked[0][-1].finish_reason == want[0][-1].finish_reason
    assert asked[0][-1].routed_experts.dtype == np.uint8
    assert all(delta.routed_experts is None for delta in [*asked[0][:-1], *plain[0]])


@pytest.mark.parametrize(
    ("name", "settings", "length", "said"),
    [
        ("qwen3_moe", {}, 4, "this server keeps no experts; leave the field out, or start the server with --enable-"),
        ("llama", ON, 4, "this model's layers have no experts"),
        ("qwen3_moe", ON, 128, "the prompt fills the context of 128 tokens"),
    ],
)
async def test_experts_that_cannot_be_reported_are_refused_before_a_slot_is_spent(name, settings, length, said):
    async with running(tiny.checkpoint(name), max_model_len=128, **settings) as served:
        with pytest.raises(RequestError, match=said):
            served.submit(text_request(np.full(length, 5), 1, return_routed_experts=True))
        assert served.ledger()["routes"] == 0


def test_the_cache_counts_the_bytes_of_experts():
    model = build_model(load_model_config(tiny.checkpoint("qwen3_moe")), torch.float32)
    spec = SlidingSpec(2, 8, torch.float32, 9)
    claim = RoutedExperts(model, [spec, FullSpec(2, 8, torch.float32)]).claim()
    assert claim.token_bytes == 2 * 5  # in two layers one byte for each of five experts
    plain, layout = CacheLayout([spec], 16), CacheLayout([spec], 16, extra_per_token=10)
    assert layout.block_bytes == plain.block_bytes + 160
    with pytest.raises(ConfigError, match="every layer of this model has a sliding window"):
        RoutedExperts(model, [spec]).claim()
