"""nomic-embed-text-v2-moe over HTTP: the reference's numbers (tests/nomic_kit.py), prompts, both paths, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import engine.kernels.moe.dispatch as dispatch
import engine.layers.plain_moe as plain_moe
import engine.run.start
from engine.base.errors import ConfigError
from engine.kernels.gemm.pack import Placement
from engine.kernels.moe.dense import DenseExperts
from engine.kernels.moe.grouped import Tile, grouped_reference
from engine.models.registry import load_model_config
from tests import nomic_kit
from tests import pooling_kit as kit
from tests.asked_vectors import ids_of, vectors
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.test_pooling_steps import arrays
from tests.engine_kit import running
from tests.pooling_kit import close

pytestmark = pytest.mark.asyncio(loop_scope="session")
TEXTS = [text for text in kit.TEXTS if text]


async def test_vectors_are_those_of_the_written_down_reference(pooling):
    folder = nomic_kit.checkpoint()
    client, hidden = await pooling(folder), nomic_kit.body_of(folder)
    wanted = [nomic_kit.vector(hidden(ids)) for ids in await ids_of(client, TEXTS)]
    close(await vectors(client, TEXTS), wanted)
    for text, one in zip(TEXTS, wanted):
        close(await vectors(client, text), [one])


async def test_prompts_of_queries_and_passages_stand_in_front(pooling):
    folder = nomic_kit.checkpoint()
    client, hidden = await pooling(folder), nomic_kit.body_of(folder)
    for name, prompt in nomic_kit.PROMPTS.items():
        (ids,) = await ids_of(client, [prompt + "the cat"])
        close(await vectors(client, "the cat", prompt_name=name), [nomic_kit.vector(hidden(ids))])


@pytest.mark.parametrize("deterministic", [False, True])
async def test_alone_as_in_a_crowd_and_as_on_the_device_path(monkeypatch, deterministic):
    draw = np.random.default_rng(0)
    inputs = [draw.integers(2, 260, draw.integers(1, 129)).astype(np.int32) for _ in range(60)]
    few = {"max_num_seqs": 8, "max_num_queued_reqs": 4, "max_num_batched_tokens": 192, "num_gpu_blocks_override": 0}
    folder = nomic_kit.checkpoint()
    async with running(folder, **few) as served:
        together = await arrays(served, inputs)
        for at in (0, 7, 59):
            np.testing.assert_array_equal((await arrays(served, [inputs[at]]))[0], together[at])

    def as_on_a_card(matrices, _biases, count, placement: Placement, gated):
        assert len(matrices) == count
        assert not gated
        return DenseExperts(torch.stack(matrices), None, placement.invariant)

    calls = []

    def product(x, weight, bias, pairs, activation, _tile, weights=None, of_tokens=False):
        calls.append(len(x))
        return grouped_reference(x, weight, bias, pairs, activation, weights, of_tokens)

    monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    monkeypatch.setattr(plain_moe, "pack_experts", as_on_a_card)
    by_reference = dispatch.Kernel("reference", lambda _: Tile(16, 32, 32, 2, 4), product)
    monkeypatch.setattr(dispatch, "FLOATS", (by_reference,))
    async with running(folder, deterministic=deterministic, **few) as served:
        for one, other in zip(await arrays(served, inputs[:4]), together):
            np.testing.assert_allclose(one, other, rtol=0, atol=5e-6)
    assert calls, "the products of an accelerator's form"


async def test_which_layers_have_experts_and_what_is_refused():
    folder = nomic_kit.checkpoint()
    found = load_model_config(folder).text
    assert [layer.experts is not None for layer in found.layers] == [False, True, False, True]
    routing = found.layers[1].experts.routing
    assert (routing.num_experts, routing.top_k, routing.norm_topk_prob) == (8, 2, False)
    assert found.layers[0].rope.theta == 10000.0
    for key, value in {
        "expert_choice_router": True, "num_shared_experts": 1, "moe_normalize_expert_weights": True, "moe_top_k": 9,
        "mlp_fc2_bias": False, "activation_function": "geglu",
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=key):
            load_model_config(folder, {key: value})
    with pytest.raises(ConfigError, match="moe_every_n_layers"):
        load_model_config(kit.encoder("nomic"), {"moe_every_n_layers": 2})
