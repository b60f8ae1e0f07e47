"""Models on 2 to 8 simulated ranks against the same model on one rank and against transformers."""

import functools
import random
from dataclasses import replace

import pytest
import torch

from engine.base.errors import ConfigError
from engine.models.text.llama import Llama
from engine.parallel.mixers import counts_of
from engine.parallel.pieces import axes_of, cut, is_of_one_unit, parts_of_first, places_on
from engine.weights import load as loading
from engine.weights.table import expand
from tests import tiny, tiny_hearing
from tests.engine.parallel.kit import harness, split
from tests.models.harness import Harness
from tests.models.harness import load as load_model
from tests.models.seeing import prepare
from tests.models.test_through_seeing import prepare as through_seeing

NAMES = [
    "llama", "llama-gelu", "mistral-window", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "granite", "glm",
    "glm4", "cohere-norms", "cohere2", "smollm3", "exaone4", "seed_oss", "starcoder2", "nemotron", "apertus", "arcee",
    "hunyuan", "gpt_neox", "gpt_neox-sequential", "gpt2", "opt", "ministral3", "olmo2", "olmo3", "stablelm",
    "stablelm-parallel", "gemma4", "gemma4-large",
]  # fmt: skip
EXPERTS = [
    "qwen3_moe", "qwen2_moe", "llama4", "phimoe", "mixtral", "gpt_oss", "glm4_moe", "minimax_m2", "olmoe_clipped",
    "dbrx", "granite_moe", "ernie4_5_moe", "hunyuan_moe", "exaone_moe", "gemma4-moe", "ernie4_5_vl_moe",
    "qwen3_5_moe_text", "qwen3_next-states", "nemotron_h-states", "nemotron_h-latent", "jamba-states",
    "granite_hybrid-states", "lfm2_moe",
]  # fmt: skip
STATES = ["qwen3_5_text-states", "bamba-states", "falcon_h1-normed", "mamba2", "mamba", "falcon_mamba", "lfm2-biased"]
SEEING = [
    "internvl", "llava_onevision", "llava", "mistral3", "idefics3", "hunyuan_vl", "gemma3-vision", "paligemma",
    "internvl-gpt_oss", "llama4-vision", "gemma4-small-vision", "gemma4-vision", "qwen3_5_moe", "lfm2_vl",
]  # fmt: skip
HELD = {  # numbers of ranks
    "qwen2": (2, 4), "gemma": (2,), "gpt2": (3,), "phi3": (2,), "gpt_oss": (2,), "olmo2": (6,),
    "qwen3_5_text-states": (2, 6), "qwen3_next-states": (2,), "bamba-states": (6,), "falcon_h1-normed": (2,),
    "nemotron_h-latent": (2,), "jamba-states": (2,), "mamba2": (6,), "lfm2-biased": (2,),
    "stablelm-parallel": (6,), "gemma4": (2,), "ernie4_5_vl_moe": (2,),
}  # fmt: skip
LIMIT = 1e-4
load = functools.cache(load_model)


def works(name):
    """The numbers of ranks above 1 that a refusal names."""
    with pytest.raises(ConfigError, match="possible: 1, ") as refused:
        split(tiny.checkpoint(name), 7)
    return [int(number) for number in str(refused.value).rpartition("possible: 1, ")[2].split(", ")]


def tokens(length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(tiny.VOCAB_SIZE) for _ in range(length)]


def in_full(name):
    return pytest.param(name, marks=pytest.mark.full)


def tried(names):
    """Every model on its smallest number of ranks; the others, which divide more, are marked `full`."""
    counts = {
        "glm4": (4, 2, 8), "llama": (2, 4), "gemma": (2, 3, 6), "gpt2": (3, 2, 6), "minimax_m2": (6, 2),
        "qwen3_5_text-states": (2, 6), "bamba-states": (6, 2), "falcon_h1-normed": (6, 2), "mamba": (4, 8),
        "stablelm-parallel": (6, 2), "gemma4-large": (3, 6), "gemma4-moe": (3,),
    }  # fmt: skip
    for name in names:
        for place, ranks in enumerate(counts.get(name, (2,))):
            more = place and (name, ranks) != ("glm4", 8)
            yield pytest.param(name, ranks, marks=pytest.mark.full if more else ())


@pytest.mark.parametrize(("name", "ranks"), [*tried(NAMES + EXPERTS + STATES)])
@torch.inference_mode()
def test_ranks_give_the_logits_of_one(name, ranks):
    model, given = split(tiny.checkpoint(name), ranks), tokens(40)
    try:
        parts = harness(model)
        got = parts.prefill(parts.add(given), 16)
        whole = Harness(load(tiny.checkpoint(name)))
        want = whole.prefill(whole.add(given), 16)
        assert got.shape == want.shape
        assert (got.log_softmax(-1) - want.log_softmax(-1)).abs().max() <= LIMIT
    finally:
        model.close()


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "glm4v", "ernie4_5_vl_moe", "qwen3_5", *map(in_full, SEEING)])
@torch.inference_mode()
def test_rank_0_encodes_pictures_for_all(name):
    model, whole = split(tiny.checkpoint(name), 2), Harness(load(tiny.checkpoint(name)))
    rows = [(each, prepare(name, "picture", each)) for each in (harness(model), whole)]
    got, want = (each.prefill(row).log_softmax(-1) for each, row in rows)
    assert (got - want).abs().max() <= LIMIT
    tower = parts_of_first(model.members[1])
    assert tower
    assert all(place.part not in tower for place in places_on(model.members[1], 1).values())
    model.close()


@pytest.mark.parametrize("name", ["vipllava", in_full("lighton_ocr")])
@torch.inference_mode()
def test_rank_0_has_the_towers_of_transformers(name):
    """Their decoders are ours."""
    model, whole = split(tiny.checkpoint(name), 2), Harness(load(tiny.checkpoint(name)))
    rows = [(each, through_seeing(name, "picture", each)) for each in (harness(model), whole)]
    got, want = (each.prefill(row).log_softmax(-1) for each, row in rows)
    assert (got - want).abs().max() <= LIMIT
    model.close()


@torch.inference_mode()
def test_mixed_rows_equal_rows_alone():
    model = split(tiny.checkpoint("qwen2"), 4)
    mixed, alone = harness(model), Harness(load(tiny.checkpoint("qwen2")))
    rows = [mixed.add(tokens(length, length)) for length in (30, 9)]
    mixed.step((rows[0], 29))
    got = mixed.step((rows[0], 1), (rows[1], 9))
    want = [alone.prefill(alone.add(tokens(length, length)))[-1] for length in (30, 9)]
    assert (got[[0, -1]] - torch.stack(want)).abs().max() <= LIMIT
    model.close()


@pytest.mark.parametrize(
    ("name", "ranks"),
    [(name, ranks) for name, counts in HELD.items() for ranks in counts],
)
def test_a_weight_is_held_once_or_by_every_rank(name, ranks):
    """Counts by value how many ranks have it; only a key-value head, a key head of a delta rule and a group of B and C
    may have a count between."""
    model = split(tiny.checkpoint(name), ranks)
    members = [expand(member.weight_table(), member) for member in model.members]
    copies = max(1, ranks // model.config.text.num_kv_heads)
    copied = {ranks // count.units for layer in model.config.text.layers for count in counts_of(layer.mixer)}
    for full, place in expand(model.whole.weight_table(), model.whole).items():
        if is_of_one_unit(place):
            assert sum(full in places for places in members) == (copies if "k_layernorm" in full else 1)
            continue
        numbers = torch.arange(torch.Size(place.wanted.shape).numel()).view(place.wanted.shape)
        parts = [cut(numbers, axes_of(place), rank, ranks) for rank in range(ranks)]
        assert [part.shape for part in parts] == [places[full].wanted.shape for places in members]
        counts = set(torch.cat([part.flatten() for part in parts]).bincount(minlength=numbers.numel()).tolist())
        if not any(axes_of(place)):
            assert counts == {ranks}
        elif any(word in full for word in ("in_proj_qkv", "in_proj.weight", "in_proj.bias", "conv1d")):
            assert counts <= {1, *copied} - {0}
        elif copies > 1 and any(word in full for word in ("k_proj", "v_proj", "qkv", "k_norm")):
            assert counts <= {1, copies}
        else:
            assert counts == {1}
    model.close()


def test_each_byte_is_read_once(monkeypatch):
    folder, read = tiny.checkpoint("llama"), []
    monkeypatch.setattr(loading, "_counted", lambda progress, total: lambda count: read.append((count, total)))
    model = split(folder, 4)
    assert sum(count for count, _ in read) == read[0][1]
    model.close()


@torch.inference_mode()
def test_random_weights_do_not_depend_on_the_number_of_ranks():
    folder = tiny.checkpoint("llama")
    model = split(folder, 2, "dummy")
    parts, whole = harness(model), Harness(load_model(folder, load_format="dummy"))
    got, want = (each.prefill(each.add(tokens(8))) for each in (parts, whole))
    assert (got - want).abs().max() <= LIMIT
    model.close()


@torch.inference_mode()
def test_a_rank_that_fails_ends_the_forward_of_all_and_the_next_forward_runs():
    model = split(tiny.checkpoint("llama"), 4)
    given = tokens(8)

    def prefill():
        parts = harness(model)
        return parts.prefill(parts.add(given))

    want = prefill()
    for rank in (0, 2, 3):
        layer = model.members[rank].layers[1]
        mlp, layer.mlp = layer.mlp, None
        with pytest.raises(AssertionError):
            prefill()
        layer.mlp = mlp
        assert torch.equal(prefill(), want)
    model.close()


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (tiny_hearing.whisper, "WhisperForConditionalGeneration attends to an encoder's rows"),
        (lambda: tiny.checkpoint("kimi_vl"), "KimiVLForConditionalGeneration runs through transformers' modules"),
    ],
)
def test_models_that_are_not_dealt_out_are_refused_by_name(made, said):
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size 2: {said}.*; leave the flag out"):
        split(made(), 2)


def test_a_refusal_names_the_numbers_that_work():
    assert works("llama") == [2, 4]
    assert works("gemma2") == [2, 6]
    assert works("glm4") == [2, 4, 8]
    assert works("mamba") == [2, 3, 4, 6, 8]
    assert works("mamba2") == [2, 6]
    assert works("qwen3_next-states") == [2]  # a copy of a key head would be a part of a row of heads


def test_a_refusal_counts_heads_groups_and_channels():
    for name, said in (
        ("falcon_h1", "6 heads, 2 key-value heads, 6 heads of states and 2 groups of B and C"),
        ("qwen3_5_text-states", "6 heads, 1 key-value heads, 6 value heads and 2 key heads"),
        ("mamba", "144 channels"),
    ):
        with pytest.raises(ConfigError, match=f"--tensor-parallel-size 7: {said} cannot be dealt out so; possible: 1"):
            split(tiny.checkpoint(name), 7)


def test_a_table_that_contradicts_the_layers_is_refused(monkeypatch):
    rows = tuple(replace(row, split=None) if row.target.endswith("down") else row for row in Llama.WEIGHTS.rows)
    monkeypatch.setattr(Llama, "WEIGHTS", replace(Llama.WEIGHTS, rows=rows))
    with pytest.raises(ConfigError, match=r"its table says None of layers.0.mlp.down_proj, the layer columns"):
        split(tiny.checkpoint("llama"), 2)
