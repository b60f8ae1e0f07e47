"""Models with states on ranks: transformers' tokens in every circumstance, on simulated ranks and on the device path.

Most tiny states leave blocks of 16 tokens half empty, so blocks have 8.
"""

import asyncio
import functools
from dataclasses import replace

import pytest
import torch

import engine.parallel.pieces
import engine.run.start
from engine.base.config import EngineConfig, RanksConfig, StateConfig
from engine.cache.layout import CacheLayout
from engine.layers.mamba import Mamba1
from engine.layers.states import set_states
from engine.parallel.host import HostExchange
from engine.parallel.pieces import is_summed
from engine.run.bounds import sizes_of
from engine.run.built import needs_of
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.parallel.kit import harness, split
from tests.engine.parallel.test_split_models import LIMIT, in_full, tokens
from tests.engine.stand_in_accelerator import StandInAccelerator
from tests.engine_kit import answer, running, text_request
from tests.invariance.test_states import PROMPTS
from tests.models.harness import Harness, load
from tests.models.test_hybrid_engine import check, check_seen
from tests.models.test_hybrids import greedy
from tests.quant.test_quantised_states import MADE, coded
from tests.tiny_states import AXES, DELTA, EXPERTS, FALCON, LINEAR, MIXED, NEMOTRON

FULL = "full_attention"
EIGHT = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 3}
SSD = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_d_conv": 4}
WIDE = {
    "key heads that several ranks have": tiny.causal(
        "Qwen3_5ForCausalLM", "Qwen3_5TextConfig", rope_parameters=AXES,
        **{**MIXED, **DELTA, **EIGHT, "linear_num_key_heads": 2, "linear_num_value_heads": 8},
    ),
    "rows by key head": tiny.causal(
        "Qwen3NextForCausalLM", "Qwen3NextConfig", mlp_only_layers=[1],
        **{**MIXED, **DELTA, **EIGHT, **EXPERTS, "linear_num_key_heads": 8, "linear_num_value_heads": 16,
           "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    ),
    "a norm over all channels": tiny.causal(
        "BambaForCausalLM", "BambaConfig", attn_layer_indices=[1], mamba_n_groups=1, mamba_proj_bias=True, **EIGHT,
        **SSD,
    ),
    "a norm before the gate": tiny.causal(
        "FalconH1ForCausalLM", "FalconH1Config", mamba_rms_norm=True, attention_bias=True, projectors_bias=True,
        **{**FALCON, **EIGHT, **SSD, "mamba_d_ssm": 128},
    ),
    "channels": tiny.causal(
        "JambaForCausalLM", "JambaConfig", attn_layer_period=3, attn_layer_offset=1, num_experts=5, pad_token_id=0,
        mamba_proj_bias=True, **EIGHT,
    ),
    "convolutions": tiny.causal(
        "Lfm2ForCausalLM", "Lfm2Config", layer_types=["conv", FULL, "conv"], block_multiple_of=8, conv_bias=True,
        **EIGHT,
    ),
    "experts with a width of their own": tiny.causal(
        "NemotronHForCausalLM", "NemotronHConfig", head_dim=20, layers_block_type=[LINEAR, "moe", FULL], mlp_bias=True,
        moe_latent_size=28, mamba_num_heads=8, mamba_head_dim=16, n_groups=2, ssm_state_size=16, time_step_min=1e-30,
        **NEMOTRON, **EIGHT,
    ),
}  # fmt: skip
RANKS = {"bamba-states": 6}  # else 2


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """A function: kind -> (folder, log-probabilities of one rank), made once."""

    @functools.cache
    def made(kind):
        folder = tiny.save(WIDE[kind](), tmp_path_factory.mktemp("wide") / "floats")
        whole = Harness(load(folder))
        return folder, whole.prefill(whole.add(tokens(40)), 16).log_softmax(-1)

    return made


@pytest.mark.parametrize("ranks", [4, in_full(8)])
@pytest.mark.parametrize("kind", WIDE)
@torch.inference_mode()
def test_four_and_eight_ranks(one_rank, kind, ranks):
    folder, want = one_rank(kind)
    for whole_experts in (False, True) if kind == "experts with a width of their own" else (False,):
        model = split(folder, ranks, whole_experts=whole_experts)
        parts = harness(model)
        got = parts.prefill(parts.add(tokens(40)), 16).log_softmax(-1)
        model.close()
        assert (got - want).abs().max() <= LIMIT


@pytest.mark.parametrize("kind", WIDE)
@torch.inference_mode()
def test_devices_have_room_for_every_exchange(one_rank, kind, monkeypatch):
    """What ranks exchange in a step is what the start allocates rooms for."""
    folder, _ = one_rank(kind)
    found = set()

    def recorded(method):
        def call(link, *given):
            found.add((given[-1].dtype, given[-1].shape[1]))  # total(partial), add_to(residual, partial)
            return method(link, *given)

        return call

    for name in ("total", "add_to"):
        monkeypatch.setattr(HostExchange, name, recorded(getattr(HostExchange, name)))
    model = split(folder, 4)
    parts = harness(model)
    parts.prefill(parts.add(tokens(9)))
    sizes = sizes_of(EngineConfig(str(folder)), model.config, "cpu")
    assert found == set(needs_of(model.config, sizes, model.dtype, 4).kinds)
    model.close()


class Alone:
    """An exchange that sums nothing."""

    def total(self, partial):
        return partial


def no_latent_out(place):
    return is_summed(place) and not getattr(place.part, "of_summands", False)


def leave_alone(state):
    """Takes away the exchange inside a layer."""
    if isinstance(state, Mamba1):
        state.exchange = Alone()
    elif state.dealt_norm is not None:
        state.dealt_norm = replace(state.dealt_norm, exchange=Alone())


@pytest.mark.parametrize(
    "kind",
    ["a norm over all channels", "a norm before the gate", "channels", "experts with a width of their own"],
)
@torch.inference_mode()
def test_a_sum_of_one_rank_and_a_bias_on_every_rank_are_found(one_rank, kind, monkeypatch):
    monkeypatch.setattr(engine.parallel.pieces, "is_summed", no_latent_out)
    folder, want = one_rank(kind)
    model = split(folder, 4)
    parts = harness(model)
    layers = [] if "experts" in kind else [layer for member in model.members for layer in member.layers]
    for layer in layers:  # of the model with experts the mistake is the bias
        if layer.state is not None:
            leave_alone(layer.state)
    got = parts.prefill(parts.add(tokens(40)), 16).log_softmax(-1)
    model.close()
    assert (got - want).abs().max() > 10 * LIMIT


@pytest.mark.parametrize(
    ("family", "form", "ranks"),
    [
        ("qwen3_5", "fp8 blocks bf16", 4),
        ("qwen3_5", "awq 64", 2),
        ("qwen3_5_moe", "fp8 blocks bf16", 2),
        ("nemotron_h", "ct nvfp4", 4),
        ("falcon_h1", "gptq 8 asymmetric", 2),
        ("falcon_h1", "fp8 blocks bf16", 2),
        ("mamba", "bnb nf4 nested", 2),
        pytest.param("qwen3_next", "gptq act", 2, marks=pytest.mark.full),
    ],
)
@torch.inference_mode()
def test_codes(family, form, ranks, tmp_path):
    folder = coded(tiny.save(MADE[family](), tmp_path / "floats"), tmp_path / "codes", form)
    model, whole = split(folder, ranks, dtype="float32"), Harness(load(folder, "float32"))
    parts = harness(model)
    got, want = (each.prefill(each.add(tokens(20))).log_softmax(-1) for each in (parts, whole))
    model.close()
    assert (got - want).abs().max() <= LIMIT


@pytest.fixture(params=["host", "device"])
def on_path(request, monkeypatch):
    if request.param == "device":
        monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_5_text-states",
        "bamba-states",
        *map(in_full, ("qwen3_next-states", "jamba-states", "nemotron_h-states", "falcon_h1", "falcon_mamba")),
    ],
)
async def test_a_busy_engine_gives_the_tokens_of_transformers(on_path, name):
    """In chunks, mixed, alone, and behind states of the prefix cache."""
    await check(name, tensor_parallel=RANKS.get(name, 2), block_size=16 if name == "falcon_h1" else 8)


@pytest.mark.parametrize("name", ["qwen3_5_moe", in_full("qwen3_5")])
async def test_tokens_behind_pictures_are_those_of_transformers(on_path, name):
    settings = {"ranks": RanksConfig(name == "qwen3_5_moe"), "encoder_cache_tokens": 64, "block_size": 8}
    await check_seen(name, ("picture", "picture, film, picture"), tensor_parallel=2, **settings)


def room_for_three(name, ranks, on_host):
    """Settings of an engine with memory for the states of three rows and a few tokens."""
    model = split(tiny.checkpoint(name), ranks)
    for member in model.members:
        set_states(member, StateConfig(), on_host)
    runs = CacheLayout(model.cache_specs(), 8).runs
    model.close()
    return {
        "num_gpu_blocks_override": 3 * runs.row_blocks + 24,
        "max_model_len": 160,
        "debug_poison": True,
        "block_size": 8,
    }


@pytest.mark.parametrize("name", ["qwen3_5_text-states", in_full("nemotron_h-states")])
async def test_rows_that_were_preempted(on_path, name, request):
    """Short prompts, long answers: three rows' tokens outgrow the memory that their states leave."""
    settings = room_for_three(name, 2, on_host="host" in request.node.name)
    async with running(tiny.checkpoint(name), dtype="float32", tensor_parallel=2, **settings) as served:
        asked = [text_request(prompt[:40], 60, ignore_eos=True) for prompt in PROMPTS[:5]]
        got = await asyncio.gather(*(answer(served, each) for each in asked))
        assert served.stats.preemptions > 0
    want = [await asyncio.to_thread(greedy, name, prompt[:40].tolist(), 60) for prompt in PROMPTS[:5]]
    assert [each[0] for each in got] == want


async def test_the_steady_loop_launches_states_on_every_rank(monkeypatch):
    opened = []

    def open_accelerator(_device):
        opened.append(StandInAccelerator(opened[0] if opened else None))
        return opened[-1]

    monkeypatch.setattr(engine.run.start, "open_accelerator", open_accelerator)
    name, prompt = "qwen3_5_text-states", PROMPTS[3]
    async with running(tiny.checkpoint(name), tensor_parallel=2, block_size=8) as served:
        assert served.inspect().runtime.executor.backend.can.steady_loop
        got = await answer(served, text_request(prompt, 40, ignore_eos=True, n=2))
    assert got == [await asyncio.to_thread(greedy, name, prompt.tolist(), 40)] * 2
    assert [each.errors for each in opened] == [[]] * 2
