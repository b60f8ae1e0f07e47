"""Ranks with whole experts: the log-probabilities of one rank, for every layout and every form of experts."""

import pytest
import torch

from engine import Engine, EngineConfig
from engine.base.config import RanksConfig
from engine.base.errors import ConfigError
from engine.layers.moe import Experts
from engine.weights.table import addressed, expand
from tests import tiny
from tests.engine.parallel.kit import harness, split
from tests.engine.parallel.test_running import PROMPTS, greedy
from tests.engine.parallel.test_split_models import EXPERTS, LIMIT, tokens
from tests.engine_kit import SMALL, answer, running
from tests.models.harness import Harness
from tests.models.harness import load as load_model
from tests.quant.experts import gpt_oss_folders, in_codes, in_one, sparse_folder

SOON = (  # a family of each layout
    "qwen3_moe", "llama4", "phimoe", "gpt_oss", "glm4_moe", "dbrx", "granite_moe", "qwen3_next-states",
    "nemotron_h-latent",
)  # fmt: skip


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    return sparse_folder(tmp_path_factory.mktemp("sparse"))


def whole_and_parts(folder, ranks, given, **settings):
    """Log-probabilities of one rank, and of ranks with whole experts."""
    model, one = split(folder, ranks, whole_experts=True, **settings), load_model(folder, **settings)
    parts, whole = harness(model), Harness(one)
    found = [each.prefill(each.add(given), 16).log_softmax(-1) for each in (whole, parts)]
    model.close()
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SOON else pytest.mark.full) for name in EXPERTS]
)
@torch.inference_mode()
def test_ranks_with_whole_experts_give_the_logits_of_one(name):
    """Most of these models have numbers of experts that 2 does not divide."""
    want, got = whole_and_parts(tiny.checkpoint(name), 3 if name == "gemma4-moe" else 2, tokens(40))
    assert (got - want).abs().max() <= LIMIT


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Nine experts and eight heads."""
    made = tiny.causal(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        head_dim=16,
        num_attention_heads=8,
        num_experts=9,
        num_hidden_layers=2,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        norm_topk_prob=True,
    )
    return tiny.save(made(), tmp_path_factory.mktemp("wide") / "floats")


@pytest.mark.parametrize("ranks", [4, 8])
@torch.inference_mode()
def test_more_ranks(wide, ranks):
    want, got = whole_and_parts(wide, ranks, tokens(40))
    assert (got - want).abs().max() <= LIMIT


def test_every_expert_is_held_once(wide):
    model = split(wide, 8, whole_experts=True)
    held = []
    for member in model.members:
        (found,) = {
            (part.first, part.num_experts)
            for _, _, part in addressed(member.weight_table(), member)
            if isinstance(part, Experts)
        }
        held.append(found)
    assert held == [(0, 2)] + [(number, 1) for number in range(2, 9)]
    names = [name for member in model.members for name in expand(member.weight_table(), member) if ".experts." in name]
    assert sorted(names) == sorted(
        name for name in expand(model.whole.weight_table(), model.whole) if ".experts." in name
    )
    model.close()


@pytest.mark.parametrize(
    "form",
    [
        "fp8 blocks",
        "ct w4 32",
        "gptq act",
        *(
            pytest.param(each, marks=pytest.mark.full)
            for each in (
                "fp8 tensor",
                "ct int8 weights",
                "ct nvfp4",
                "gptq 32",
                "awq 64",
                "bnb nf4 nested",
                "modelopt mxfp8",
            )
        ),
    ],
)
@torch.inference_mode()
def test_codes_of_each_expert(sparse, form, tmp_path):
    want, got = whole_and_parts(in_codes(sparse, tmp_path / "codes", form), 2, tokens(20), dtype="float32")
    assert (got - want).abs().max() <= LIMIT


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("gpt_oss", "modelopt nvfp4"),
        ("llama4", "modelopt fp8"),
        pytest.param("llama4", "fp8 blocks", marks=pytest.mark.full),
    ],
)
@torch.inference_mode()
def test_codes_of_all_experts_in_one_tensor(name, form, tmp_path):
    source = gpt_oss_folders(tmp_path)[1] if name == "gpt_oss" else None
    (tmp_path / "in-one").mkdir()
    coded, _ = in_one(name, form, tmp_path / "in-one", source)
    want, got = whole_and_parts(coded, 2, tokens(20), dtype="float32")
    assert (got - want).abs().max() <= LIMIT


@torch.inference_mode()
def test_mxfp4(tmp_path):
    want, got = whole_and_parts(gpt_oss_folders(tmp_path)[0], 2, tokens(20), dtype="float32")
    assert (got - want).abs().max() <= LIMIT


@pytest.mark.parametrize("name", ["dbrx", "qwen3_moe"])
@torch.inference_mode()
def test_experts_that_are_quantised_while_they_are_read(name):
    want, got = whole_and_parts(tiny.checkpoint(name), 2, tokens(20), quantization="fp8")
    assert (got - want).abs().max() <= LIMIT


async def test_an_engine_with_whole_experts_gives_the_tokens_of_one_rank():
    found = []
    for settings in ({}, {"tensor_parallel": 2, "ranks": RanksConfig(True)}):
        async with running(tiny.checkpoint("mixtral"), **settings) as engine:
            found.append([await answer(engine, greedy(number)) for number in range(len(PROMPTS))])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("name", "ranks", "said"),
    [
        ("qwen2", 2, "--enable-expert-parallel: Qwen2ForCausalLM has no experts; leave the flag out"),
        ("qwen2", 1, "--enable-expert-parallel: Qwen2ForCausalLM has no experts; leave the flag out"),
        ("mixtral", 8, "5 experts of a layer are fewer than 8 ranks; give --tensor-parallel-size 5 or less"),
    ],
)
async def test_what_has_no_whole_experts_is_refused(name, ranks, said):
    asked = EngineConfig(model=str(tiny.checkpoint(name)), **SMALL, tensor_parallel=ranks, ranks=RanksConfig(True))
    with pytest.raises(ConfigError, match=said):
        await Engine(asked).start()


async def test_one_rank_has_all_experts(caplog):
    with caplog.at_level("INFO", "omniloop.engine"):
        async with running(tiny.checkpoint("mixtral"), ranks=RanksConfig(True)) as engine:
            assert await answer(engine, greedy(0))
    assert "--enable-expert-parallel has no effect: one rank has all experts" in caplog.text
