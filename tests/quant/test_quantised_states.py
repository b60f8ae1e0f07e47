"""Quantised models with states have the logits of a float model, in every dialect of quantised files."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from engine.cache.spec import KeyValueSpec
from engine.quant.base import Quantised
from engine.quant.kv import stored_specs
from engine.weights.files import open_checkpoint
from engine.weights.table import parts_of
from tests import tiny
from tests.models.harness import load
from tests.quant import oracle
from tests.quant.test_quantised_experts import check_logits, rewritten
from tests.quant.written import VARIANTS
from tests.tiny_states import FALCON

SIZES = {"hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 2, "tie_word_embeddings": False}
DELTA = {
    **SIZES, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2], "partial_rotary_factor": 0.25}
SSD = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16}
MADE = {
    "qwen3_5": tiny.causal("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", **DELTA, rope_parameters=AXES),
    "qwen3_next": tiny.causal(
        "Qwen3NextForCausalLM", "Qwen3NextConfig", **DELTA, mlp_only_layers=[0, 1], num_experts=4,
        num_experts_per_tok=2,
    ),
    "qwen3_5_moe": tiny.causal(
        "Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", **DELTA, rope_parameters=AXES, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=320, shared_expert_intermediate_size=320,
    ),
    "nemotron_h": tiny.causal(
        "NemotronHForCausalLM", "NemotronHConfig", **SIZES, head_dim=64, num_attention_heads=4, num_key_value_heads=2,
        layers_block_type=["linear_attention", "mlp"], mamba_num_heads=8, mamba_head_dim=16, n_groups=2,
        ssm_state_size=16, time_step_min=1e-30,
    ),
    "falcon_h1": tiny.causal(
        "FalconH1ForCausalLM", "FalconH1Config", **{**FALCON, **SIZES, **SSD, "mamba_d_ssm": 128},
    ),
    "mamba": tiny.causal(
        "MambaForCausalLM", "MambaConfig", hidden_size=192, num_hidden_layers=2, state_size=16, intermediate_size=256
    ),
}  # fmt: skip
FLOATS = ("in_proj_b", "in_proj_a", "in_proj_ba", "dt_proj")  # modules that releases do not quantise
DIALECTS = (
    "fp8 blocks bf16", "fp8 blocks ue8m0", "fp8 tensor static", "ct float channel", "ct mxfp8", "ct int8 weights",
    "ct w4 32", "ct w8 asymmetric", "ct nvfp4", "ct mxfp4", "modelopt fp8", "modelopt nvfp4", "gptq 32", "gptq act",
    "awq 64", "auto-round gptq", "bnb nf4 nested", "bnb int8",
)  # fmt: skip
OTHERS = (
    *(("qwen3_next", name) for name in ("fp8 blocks bf16", "gptq act", "awq 64")),
    *(("qwen3_5_moe", name) for name in ("fp8 blocks bf16", "ct nvfp4", "awq 64")),
    *(("falcon_h1", name) for name in ("fp8 blocks bf16", "ct nvfp4", "ct mxfp4", "awq 64", "gptq 8 asymmetric")),
    *(("mamba", name) for name in ("fp8 tensor", "bnb nf4 nested")),
)


@pytest.fixture(scope="module")
def floats(tmp_path_factory):
    """A function: family -> its float checkpoint, made once."""
    made = {}

    def of(family):
        if family not in made:
            made[family] = tiny.save(MADE[family](), tmp_path_factory.mktemp("states") / family)
        return made[family]

    return of


def coded(source, folder, *names):
    """Quantises a checkpoint: modules take the variants `names` in turn; the first variant's settings are written."""
    draw, tensors, number = torch.Generator().manual_seed(2), {}, 0
    for key, tensor in load_file(source / "model.safetensors").items():
        module, _, kind = key.rpartition(".")
        last = module.rpartition(".")[2]
        if kind == "weight" and last.endswith(("_proj", "_qkv", "_z", "_qkvz")) and last not in FLOATS:
            write, number = VARIANTS[names[number % len(names)]].write, number + 1
            tensors |= {f"{module}.{each}": made for each, made in write(draw, *tensor.shape).items()}
        else:
            tensors[key] = tensor
    return rewritten(source, folder, tensors, quantization_config=VARIANTS[names[0]].settings)


def check(source, folder, *names):
    """The logits equal the logits of the dequantised weights."""
    made = coded(source, folder / "codes", *names)
    values = {key: torch.from_numpy(value).float() for key, value in oracle.dequantised(made).items()}
    kept = {key: tensor for key, tensor in load_file(source / "model.safetensors").items() if key not in values}
    wide = {**kept, **values}
    for key, tensor in load_file(source / "model.safetensors").items():
        wide[key] = wide[key].view(tensor.shape)
    check_logits(made, rewritten(source, folder / "floats", wide))
    return made


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_a_dialect_has_the_logits_of_a_float_model(floats, family, name, tmp_path):
    check(floats(family), tmp_path, name)


@pytest.mark.parametrize(("family", "name"), OTHERS)
def test_so_has_it_with_experts_and_where_rows_are_grouped_or_multiplied(floats, family, name, tmp_path):
    check(floats(family), tmp_path, name)


def test_what_makes_b_and_a_stays_in_floats_and_pieces_of_one_form_are_one_part(floats, tmp_path):
    model = load(coded(floats("qwen3_5"), tmp_path / "codes", "fp8 blocks bf16"), "float32")
    product = model.layers[0].state.product
    assert [stored and stored.form for stored in product.scheme.pieces] == ["FP8 by 128 x 128"] * 2 + [None] * 2
    assert [len(part.dense()) for part in product.weight.parts] == [192 + 128, 4 + 4]


def test_pieces_of_unlike_forms_are_one_product(floats, tmp_path):
    """NVIDIA's releases mix FP8 and NVFP4."""
    folder = check(floats("qwen3_5"), tmp_path, "modelopt mixed", "modelopt fp8", "modelopt nvfp4")
    model = load(folder, "float32")
    forms = {
        stored.form
        for _, _, part in parts_of(model.weight_table(), model)
        if isinstance(getattr(part, "scheme", None), Quantised)
        for stored in part.scheme.pieces
        if stored is not None
    }
    assert len(forms) > 1


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h", "falcon_h1", "mamba"])
def test_numbers_of_states_are_float32_whatever_the_files_dtype(floats, family, tmp_path):
    """Taps and norms are float32 too; matrices have the file's dtype."""
    source = floats(family)
    narrow = {key: tensor.bfloat16() for key, tensor in load_file(source / "model.safetensors").items()}
    folder = rewritten(source, tmp_path / "narrow", narrow)
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, "dtype": "bfloat16"}))
    state = load(folder).layers[0].state
    held = [*state.numbers.values.values(), state.conv.weight]
    held += [each.weight for each in (getattr(state, "norm", None), *getattr(state, "norms", ())) if each is not None]
    assert len(held) >= 3
    assert all(tensor.dtype == torch.float32 for tensor in held)
    prefix = next(key for key in narrow if key.endswith(".A_log")).removesuffix("A_log")
    for name, values in state.numbers.values.items():
        assert torch.equal(values, narrow[prefix + name].float())


def test_scales_of_nemotrons_cache_and_names_of_its_layers_are_found(tmp_path):
    """ModelOpt's releases store the scales in the module `mixer`, under `backbone`."""
    source = tiny.checkpoint("nemotron_h-states")
    tensors = load_file(source / "model.safetensors")
    layer, kinds = next(key for key in tensors if key.endswith("k_proj.weight")).removesuffix("k_proj.weight"), "kv"
    scales = {f"{layer}{kind}_proj.{kind}_scale": torch.tensor(0.25 + number) for number, kind in enumerate(kinds)}
    said = {**VARIANTS["modelopt fp8"].settings, "ignore": ["lm_head", "backbone.layers.0.mixer.in_proj"]}
    folder = rewritten(source, tmp_path / "scaled", {**tensors, **scales}, quantization_config=said)
    model = load(folder, "float32")
    (spec,) = [
        spec for spec in stored_specs(model, "fp8", (), open_checkpoint(folder)) if isinstance(spec, KeyValueSpec)
    ]
    assert spec.given == ((0.25,) * spec.num_kv_heads, (1.25,) * spec.num_kv_heads)
    random = load(folder, "float32", load_format="dummy")
    assert not isinstance(random.layers[0].state.product.scheme, Quantised)
    assert isinstance(random.layers[0].state.o.scheme, Quantised)
