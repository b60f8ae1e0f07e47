"""Pooled inputs on the engine: on a CPU and on the device path, in chunks, cached, preempted."""

import asyncio
import contextlib
from dataclasses import replace

import numpy as np
import pytest
import torch

import engine.kernels.gemm.pack
import engine.run.start
from engine import Engine, FinishReason, Request, SamplingParams, layers
from engine.base.errors import InvalidLogitsError, RequestError
from engine.base.request import PoolingParams
from engine.kernels.gemm.pack import Placement, pack_unchanged
from tests import pooling_kit as kit
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import quiet, running

DRAW = np.random.default_rng(0)
INPUTS = [DRAW.integers(2, 260, DRAW.integers(1, 100)).astype(np.int32) for _ in range(40)]
POOLS = {"runner": "pooling", "max_model_len": 128, "max_num_seqs": 8, "max_num_queued_reqs": 4}
KINDS = ("LAST", "CLS", "MEAN")


def request(inputs: list[np.ndarray], per_token: bool = False) -> Request:
    starts = np.concatenate([[0], np.cumsum([len(one) for one in inputs])])
    pooling = PoolingParams(starts, per_token=per_token)
    return Request(np.concatenate(inputs), SamplingParams(max_tokens=1), n=len(inputs), pooling=pooling)


async def arrays(served: Engine, inputs: list[np.ndarray], per_token: bool = False) -> list[np.ndarray]:
    return await answered(served, request(inputs, per_token))


async def answered(served: Engine, asked: Request) -> list[np.ndarray]:
    found = {}
    async with served.submit(asked) as stream:
        async for delta in stream:
            assert delta.finish_reason is FinishReason.STOP, delta.error
            assert not delta.token_ids
            found[delta.index] = delta.pooled
    return [found[k] for k in range(asked.n)]


async def made(kind: str, per_token: bool = False, **settings) -> list[np.ndarray]:
    pooler = {"pooling_type": kind}
    async with running(tiny.checkpoint("qwen3"), **{**POOLS, "pooler": pooler, **settings}) as served:
        return await arrays(served, INPUTS, per_token)


@pytest.fixture
def on_the_device_path(monkeypatch):
    def switch() -> None:
        monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())

    return switch


@pytest.mark.parametrize("kind", KINDS)
async def test_the_device_path_makes_the_hosts_arrays(on_the_device_path, kind):
    wanted, tokens = await made(kind), await made(kind, per_token=True)
    on_the_device_path()
    for settings in ({}, {"enforce_eager": True}):
        for one, other in zip(await made(kind, **settings), wanted):
            np.testing.assert_array_equal(one, other)
    for one, other, ids in zip(await made(kind, per_token=True), tokens, INPUTS):
        np.testing.assert_array_equal(one, other)
        assert len(one) == len(ids)


async def test_the_device_path_leaves_out_the_tokens_that_do_not_count(on_the_device_path):
    folder = kit.embedder("qwen3", "mean_tokens", normalize=False, include_prompt=False)
    counted = np.array([len(one) // 2 for one in INPUTS], np.int32)
    asked = request(INPUTS)
    asked = replace(asked, pooling=replace(asked.pooling, pool_starts=counted))

    async def found(**settings) -> np.ndarray:
        async with running(folder, **{**POOLS, **settings}) as served:
            tokens = await arrays(served, INPUTS, per_token=True)
            wanted = np.stack([lines[first:].mean(0) for lines, first in zip(tokens, counted)])
            lines = np.stack(await answered(served, asked))
            np.testing.assert_allclose(lines, wanted, atol=1e-5)
            return lines

    wanted = await found()
    on_the_device_path()
    for settings in ({}, {"enforce_eager": True}):
        np.testing.assert_array_equal(await found(**settings), wanted)


@pytest.mark.parametrize("name", ["bert", "modernbert", "nomic"])
async def test_encoders_in_float16_make_vectors_of_cosine_0_9999(on_the_device_path, monkeypatch, name):
    folder = kit.damped(kit.modernbert(), 0.7) if name == "modernbert" else kit.encoder(name)
    async with running(folder, **POOLS) as served:
        wanted = await arrays(served, INPUTS)
    on_the_device_path()
    monkeypatch.setattr(engine.run.start, "resolve_dtype", lambda *_: torch.float16)

    # Torch's products, which take float16; on a CPU weights would be packed into panels.
    def as_on_a_card(weight, bias):
        whole = torch.cat(weight) if isinstance(weight, tuple) else weight
        return pack_unchanged(whole, bias, Placement(torch.float16, "cpu"))

    for kind in ("pack_panels", "pack_paired"):
        monkeypatch.setattr(engine.kernels.gemm.pack, kind, as_on_a_card)
    async with running(folder, **POOLS) as served:
        assert served.inspect().runtime.model.embed.table.dtype is torch.float16
        found = await arrays(served, INPUTS)
    for one, other in zip(found, wanted):
        assert one @ other / np.linalg.norm(one) / np.linalg.norm(other) >= 0.9999


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
async def test_chunks_cached_prefixes_and_preemption_change_nothing(on_the_device_path, per_token, on_device):
    wanted = await made("LAST", per_token, enable_prefix_caching=False)
    if on_device:
        on_the_device_path()
    chunks = {"max_prefill_chunk": 7, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 12}
    async with running(tiny.checkpoint("qwen3"), **{**POOLS, **chunks}) as served:
        for _ in range(2):  # the second time from the cache
            for one, other in zip(await arrays(served, INPUTS, per_token), wanted):
                np.testing.assert_allclose(one, other, rtol=0, atol=2e-5)


async def test_one_input_that_is_not_a_number_fails_alone(monkeypatch):
    async with running(tiny.checkpoint("qwen3"), **POOLS) as served:
        model = served.inspect().runtime.model
        project = model.pooler.project

        def broken(hidden):
            lines = project(hidden)
            lines[-1] = float("nan")
            return lines

        monkeypatch.setattr(model.pooler, "project", broken)
        ends = {}
        async with served.submit(request(INPUTS[:5])) as stream:
            async for delta in stream:
                ends[delta.index] = delta
        failed = [delta for delta in ends.values() if delta.finish_reason is FinishReason.ERROR]
        assert 1 <= len(failed) < 5
        assert all(isinstance(delta.error, InvalidLogitsError) and delta.pooled is None for delta in failed)


@pytest.mark.parametrize("turns", range(0, 24, 3))
async def test_leaving_at_any_time_frees_everything(turns):
    async with running(tiny.checkpoint("qwen3"), **POOLS) as served:
        stream = served.submit(request(INPUTS * 3))
        for _ in range(turns):
            await asyncio.sleep(0.0005)
        stream.close()
        held = await quiet(served)
        assert held["backlog"] == held["tokenwise"] == 0
        assert len(await arrays(served, INPUTS[:3])) == 3


async def test_requests_of_the_other_kind_are_refused():
    async with running(tiny.checkpoint("qwen3"), **POOLS) as served:
        with pytest.raises(RequestError, match="pools its inputs"):
            served.submit(Request(INPUTS[0], SamplingParams()))
        with pytest.raises(RequestError, match="maximum context length is 128"):
            served.submit(request([np.zeros(129, np.int32)]))
        with pytest.raises(RequestError, match="no tokens"):
            served.submit(request([INPUTS[0], INPUTS[0][:0]]))
        with pytest.raises(RequestError, match="token id 320 is out of range"):
            served.submit(request([np.array([320], np.int32)]))
    async with running(tiny.checkpoint("qwen3")) as served:
        with pytest.raises(RequestError, match="this engine generates"):
            served.submit(request(INPUTS[:1]))


@pytest.mark.parametrize("kind", ["bert", "mpnet", "deberta", "deberta-v1"])
async def test_a_step_whose_kernels_do_not_run_leaves_nothing_behind(kind, monkeypatch):
    """As in the first steps of a GPU's start, in which kernels are only compiled."""
    folder, settings = kit.encoder(kind), {"max_num_seqs": 8, "num_gpu_blocks_override": 0}
    async with running(folder, **settings) as served:
        wanted = await arrays(served, INPUTS[:5])
    with contextlib.ExitStack() as start:
        patch = start.enter_context(monkeypatch.context())
        patch.setattr(layers.norm, "layer_norm", lambda x, *_: torch.ones_like(x))
        patch.setattr(layers.linear.Linear, "__call__", lambda self, x: x.new_ones(len(x), sum(self.out_features)))
        async with running(folder, **settings) as served:
            await arrays(served, INPUTS[:5])
            start.close()
            for one, other in zip(await arrays(served, INPUTS[:5]), wanted):
                np.testing.assert_array_equal(one, other)
