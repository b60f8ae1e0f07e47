"""After its attention, the last layer is computed only for the tokens that are read, whatever else the step holds.

Rows are counted where every layer's MLP begins. Their results are compared with the computation of all rows, which
prompt log-probabilities still need.
"""

import asyncio

import numpy as np
import pytest
import torch

import engine.run.start
from engine.layers.mlp import GatedMLP
from engine.step.backend.device.startup import Startup
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import answer, answer_deltas, prompts, running, text_request
from tests.invariance.devices import Device

NAMES = ("llama", "mistral-window", "qwen2", "qwen3", "omni")
MANY = prompts(12, tiny.FIRST_SPECIAL, seed=11, longest=90)
LONG = np.random.default_rng(0).integers(2, tiny.FIRST_SPECIAL, 150, dtype=np.int32)
ROWS = 8  # rows per step


@pytest.fixture(params=["host", "eager", "graphs"])
def settings(request, monkeypatch):
    """Settings for the CPU's executor, and for the device's executor on CPU tensors."""
    sizes = {"max_num_batched_tokens": 64, "max_num_seqs": ROWS, "encoder_cache_tokens": 64}
    if request.param == "host":
        return sizes
    monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    return {**sizes, "enforce_eager": request.param == "eager"}


@pytest.fixture
def computed(monkeypatch):
    """(layer's MLP, number of rows) in the order of computation."""
    seen, real = [], GatedMLP.__call__

    def counted(mlp, x):
        seen.append((mlp, len(x.residual)))
        return real(mlp, x)

    monkeypatch.setattr(GatedMLP, "__call__", counted)
    return seen


def first_and_last(served, seen) -> tuple[list[int], list[int]]:
    """Rows of the first layer's MLP and of the last layer's MLP, step by step."""
    layers = served.inspect().runtime.model.layers
    return tuple([rows for mlp, rows in seen if mlp is layers[k].mlp] for k in (0, -1))


@pytest.mark.parametrize("name", NAMES)
async def test_only_rows_that_are_read_pass_the_last_layer(name, settings, computed):
    async with running(tiny.checkpoint(name), **settings) as served:
        if "enforce_eager" in settings:
            assert max(first_and_last(served, computed)[1]) == 64, "the profile has everything computed"
        computed.clear()
        await answer(served, text_request(LONG, 3, ignore_eos=True))
        first, last = first_and_last(served, computed)
    if settings.get("enforce_eager") is False:  # graphs have fixed sizes
        assert (first, last) == ([64, 64, 32, 1, 1], [ROWS, ROWS, ROWS, 1, 1])
    else:
        assert first == [64, 64, 22, 1, 1]
        assert last == [1, 1, 1], "the first two chunks sample nothing"


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", NAMES)
async def test_prompt_log_probabilities_together_with_sampled_rows(name, settings):
    """A step with prompt log-probabilities computes all positions; the other rows' tokens do not change."""

    def sent(number):
        rules = {"prompt_logprobs": 3, "logprobs": 2} if number % 3 == 0 else {}
        return text_request(MANY[number], 12, ignore_eos=True, **rules)

    def collected(deltas):
        prompt = deltas[0].prompt_logprobs
        chosen = [entry for delta in deltas for entry in delta.logprobs or ()]
        return [token for delta in deltas for token in delta.token_ids], prompt, chosen

    async with running(tiny.checkpoint(name), enable_prefix_caching=False, **settings) as served:
        alone = [collected((await answer_deltas(served, sent(number)))[0]) for number in range(len(MANY))]
        got = await asyncio.gather(*[answer_deltas(served, sent(number)) for number in range(len(MANY))])
    assert [collected(choices[0]) for choices in got] == alone
    assert all(len(alone[number][1]) == len(MANY[number]) for number in range(0, len(MANY), 3))


@torch.inference_mode()
def true_logits(folder, ids: list[int]) -> torch.Tensor:
    return tiny.reference(folder)(input_ids=torch.tensor([ids])).logits[0, -1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
@pytest.mark.parametrize("eager", [False, True])
async def test_a_prompt_on_an_accelerator(eager, computed, monkeypatch, tmp_path):
    """2,048 tokens in one step: the last layer has few rows, and the logits equal those of the whole computation."""
    model = tiny.qwen3(
        hidden_size=512, intermediate_size=1408, num_attention_heads=8, num_key_value_heads=2, head_dim=128,
        vocab_size=20011, max_position_embeddings=4096,
    )  # fmt: skip
    folder = tiny.save(model, tmp_path / "wide", dtype="bfloat16")
    ids = np.random.default_rng(0).integers(0, 20011, 2049).tolist()
    real = Startup.capture

    def capture(start):
        computed.clear()  # in the profile every row is computed
        real(start)

    monkeypatch.setattr(Startup, "capture", capture)
    async with Device("cuda").running(
        folder,
        dtype="bfloat16",
        max_num_batched_tokens=2048,
        max_num_seqs=64,
        num_gpu_blocks_override=1024,
        enforce_eager=eager,
        logprobs_mode="raw_logits",
        enable_prefix_caching=False,
    ) as served:
        if eager:
            computed.clear()  # the start ran the largest step once more; with graphs, the capture is counted instead
        deltas = (await answer_deltas(served, text_request(ids[:2048], 1, logprobs=20)))[0]
        first, last = first_and_last(served, computed)
        collected = (await answer_deltas(served, text_request(ids, 1, prompt_logprobs=20)))[0][0].prompt_logprobs[2048]
    assert max(first) == 2048
    assert max(last) == (1 if eager else 64)
    wanted = await asyncio.to_thread(true_logits, folder, ids[:2048])
    for entry in (deltas[0].logprobs[0], collected):
        error = (torch.tensor(entry.top_logprobs) - wanted[torch.tensor(entry.top_ids)]).abs().max() / wanted.std()
        assert error < 0.3
    whole = dict(zip(collected.top_ids, collected.top_logprobs))
    ours = dict(zip(deltas[0].logprobs[0].top_ids, deltas[0].logprobs[0].top_logprobs))
    assert len(whole.keys() & ours.keys()) >= 15
    assert max(abs(ours[token] - whole[token]) for token in whole.keys() & ours.keys()) < 0.1 * wanted.std()
