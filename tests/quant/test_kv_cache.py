"""--kv-cache-dtype: which dtype layers store, whose scales they use; tokens are equal in any batch and schedule."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import engine.run.start
from engine.base.config import EngineConfig
from engine.base.errors import ConfigError
from engine.cache.layout import CacheLayout
from engine.cache.tokens import FullSpec, NothingSpec
from engine.cache.window import SlidingSpec
from engine.layers.attention import PagedSelfAttention
from engine.models.registry import build_model, load_model_config
from engine.quant.kv import numbers_line, stored_specs
from engine.weights.files import open_checkpoint
from server.flags.config import CacheConfig, Config, ModelFlags
from server.start.check import lines
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import answer, running
from tests.invariance.test_text import PROMPTS, request
from tests.models import test_whisper
from tests.models.harness import Harness, load

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


def model_of(folder, dtype=torch.float32, device="cpu"):
    return build_model(load_model_config(folder), dtype, device)


def with_scales(tmp_path, scales, **settings):
    """A tiny Llama whose file also has these tensors; `settings` become its quantization_config."""
    source, folder = tiny.checkpoint("llama"), tmp_path / "scaled"
    folder.mkdir()
    for path in source.iterdir():
        if path.name != "model.safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    save_file({**load_file(source / "model.safetensors"), **scales}, folder / "model.safetensors")
    if settings:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return folder


def scales_of(form, layers=3):
    """Scales of all layers by a dialect's names: 0.25, 0.5, ... for keys, and half of each for values."""
    names = {
        "compressed": ("self_attn.k_scale", "self_attn.v_scale"),
        "modelopt": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        "old": ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
        "mistral": ("attention.k_fake_quantizer.qscale_act", "attention.v_fake_quantizer.qscale_act"),
        "both": ("self_attn.kv_scale",),
    }[form]
    prefix = "" if form == "mistral" else "model."
    return {
        f"{prefix}layers.{layer}.{name}": torch.tensor((layer + 1) / 4 / (1 + number)).reshape(() if layer else 1)
        for layer in range(layers)
        for number, name in enumerate(names)
    }


def specs_of(folder, word="fp8", skipped=(), dtype=torch.float32):
    return stored_specs(model_of(folder, dtype), word, skipped, open_checkpoint(folder))


@pytest.mark.parametrize("form", ["compressed", "modelopt", "old", "mistral", "both"])
def test_scales_of_the_files_are_found_by_every_name(tmp_path, form):
    specs = specs_of(with_scales(tmp_path, scales_of(form)))
    heads = specs[0].num_kv_heads
    keys = [((layer + 1) / 4,) * heads for layer in range(3)]
    values = keys if form == "both" else [tuple(scale / 2 for scale in found) for found in keys]
    assert [spec.given for spec in specs] == list(zip(keys, values))
    assert numbers_line(specs, torch.float32) == "fp8_e4m3 with the checkpoint's scales"


def test_scales_may_be_one_per_head_and_a_layer_without_makes_its_own(tmp_path):
    names = {f"model.layers.1.self_attn.{kind}_scale": torch.tensor([0.5, 3.0]).view(2, 1, 1) for kind in "kv"}
    folder = with_scales(tmp_path, names)
    specs = specs_of(folder)
    assert [spec.given for spec in specs] == [None, ((0.5, 3.0), (0.5, 3.0)), None]
    assert numbers_line(specs, torch.float32) == (
        "fp8_e4m3 with a scale per token and head (2 layers), fp8_e4m3 with the checkpoint's scales (1 layers)"
    )
    assert all(spec.given is None for spec in specs_of(folder, "fp8_per_token_head"))
    assert [spec.dtype for spec in specs_of(folder, "fp8_e5m2")] == [torch.float8_e5m2] * 3


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_positive_number_is_refused_by_name(tmp_path, wrong):
    scales = scales_of("compressed")
    scales["model.layers.1.self_attn.v_scale"] = torch.tensor(wrong)
    folder = with_scales(tmp_path, scales)
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.self_attn\.v_scale is (0\.0|-1\.0|nan|inf): .* positive"):
        specs_of(folder)


def test_half_a_layers_scales_and_odd_shapes_are_refused_by_name(tmp_path):
    scales = scales_of("compressed")
    del scales["model.layers.0.self_attn.v_scale"]
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.self_attn\.k_scale: the other scale .* is missing"):
        specs_of(with_scales(tmp_path, scales))
    (tmp_path / "odd").mkdir()
    scales = {**scales_of("compressed"), "model.layers.2.self_attn.k_scale": torch.ones(3)}
    with pytest.raises(ConfigError, match=r"shape \[3\]: allowed are one scale, or one for each of the 2 KV heads"):
        specs_of(with_scales(tmp_path / "odd", scales))


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, E4M3),
        ({"kv_cache_quant_algo": "FP8"}, E4M3),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, torch.float32),
        ({"kv_cache_quant_algo": "NVFP4"}, torch.float32),
        ({}, torch.float32),
    ],
)
def test_auto_is_what_the_checkpoint_was_made_for(settings, kept):
    model = model_of(tiny.checkpoint("llama"))
    model.config.raw["quantization_config"] = settings
    assert {spec.dtype for spec in stored_specs(model, "auto", (), None)} == {kept}
    assert {spec.dtype for spec in stored_specs(model, "bfloat16", (), None)} == {BF16}


@pytest.mark.parametrize("beside", [True, False])
def test_a_checkpoint_may_quantise_its_cache_alone(tmp_path, beside):
    """ModelOpt's settings without an algorithm for weights, in config.json or in hf_quant_config.json."""
    folder = with_scales(tmp_path, scales_of("modelopt"))
    settings = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    if beside:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": settings}))
    else:
        config = json.loads((folder / "config.json").read_text())
        settings = {"quant_method": "modelopt", **settings}
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    for word, dtype in (("auto", E4M3), ("bfloat16", BF16)):
        assert {spec.dtype for spec in specs_of(folder, word)} == {dtype}
    assert all(spec.given is not None for spec in specs_of(folder, "auto"))


def test_layers_that_are_skipped_share_tables_with_the_others_and_waste_nothing():
    specs = specs_of(tiny.checkpoint("llama"), skipped=("1",))
    assert [spec.dtype for spec in specs] == [E4M3, torch.float32, E4M3]
    layout = CacheLayout(specs, 16)
    assert len(layout.groups) == 1
    assert layout.block_bytes == sum(spec.block_bytes(16) for spec in specs)
    shapes = [[view.shape[0] for view in cache] for cache in layout.allocate(5, poison=True)]
    assert shapes == [[5] * 4, [5] * 2, [5] * 4]
    near = specs_of(tiny.checkpoint("qwen2-window"), skipped=("sliding_window",))
    assert [spec.dtype for spec in near] == [torch.float32 if spec.kind.window else E4M3 for spec in near]


def test_a_block_of_codes_is_1_9_times_smaller():
    for spec in (FullSpec(8, 128, BF16), SlidingSpec(8, 128, BF16, 512)):
        codes = type(spec)(8, 128, E4M3, *([512] if spec.kind.window else []))
        assert spec.block_bytes(16) / codes.block_bytes(16) >= 1.9


@pytest.mark.parametrize(
    ("name", "word", "skipped", "said"),
    [
        ("llama", "auto", ("1",), r"--kv-cache-dtype-skip-layers 1: the KV cache has no codes"),
        ("llama", "fp8", ("3",), r"--kv-cache-dtype-skip-layers 3: allowed are sliding_window and numbers .* 0 to 2"),
        ("llama", "fp8", ("first",), r"--kv-cache-dtype-skip-layers first: allowed"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(name, word, skipped, said):
    with pytest.raises(ConfigError, match=said):
        stored_specs(model_of(tiny.checkpoint(name)), word, skipped, None)


def test_a_model_that_keeps_nothing_is_refused_at_start():
    model = model_of(tiny.checkpoint("llama"))
    model.cache_specs = lambda: [NothingSpec()]
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8: LlamaForCausalLM keeps no keys and values; leave"):
        stored_specs(model, "fp8", (), None)
    assert stored_specs(model, "auto", (), None) == [NothingSpec()]


def test_a_model_of_transformers_is_refused_at_start():
    config = EngineConfig(str(tiny.checkpoint("llama")), model_impl="transformers")
    model = build_model(load_model_config(config.model, implementation="transformers"), torch.float32, "cpu")
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8: LlamaForCausalLM runs through transformers"):
        stored_specs(model, "fp8", (), None)


def test_keys_with_biases_and_without_norms_are_warned_of(caplog):
    specs_of(tiny.checkpoint("qwen2"))
    assert "keys of Qwen2ForCausalLM have biases and no norm" in caplog.text
    caplog.clear()
    specs_of(tiny.checkpoint("qwen3"))
    assert not caplog.text


def test_check_names_the_dtypes_of_the_cache():
    flags = ModelFlags(model=str(tiny.checkpoint("llama")), device="cpu")
    cache = CacheConfig(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=("0",))
    said = next(line for line in lines(Config(model=flags, cache=cache)) if line.startswith("KV cache: "))
    assert said.endswith("; fp8_e4m3 with a scale per token and head (2 layers), float32 (1 layers)")


class Rounding(PagedSelfAttention):
    """Attention over floats, rounded as FP8 codes with a scale per token and head would be; an independent version."""

    __slots__ = ()

    def store(self, x, rope, meta, cache):
        queries = super().store(x, rope, meta, cache)
        blocks, places = meta.slot_mapping // 16, meta.slot_mapping % 16
        for numbers in cache:
            heads = numbers[blocks, :, places]
            scale = torch.exp2(torch.log2(heads.abs().amax(-1, keepdim=True) / 448).ceil())
            numbers[blocks, :, places] = (heads / scale).to(E4M3).float() * scale
        return queries


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3"])
def test_logits_are_those_of_floats_that_are_rounded_so(name):
    prompt = PROMPTS[3].tolist()
    model, rounding = load(tiny.checkpoint(name)), load(tiny.checkpoint(name))
    for layer in rounding.layers:
        layer.attention.__class__ = Rounding
    codes, floats = Harness(model), Harness(rounding)
    codes.caches = CacheLayout(stored_specs(model, "fp8", (), None), 16).allocate(len(codes.caches[0][0]), poison=True)
    rows = [harness.add(prompt) for harness in (codes, floats)]
    got, want = (harness.step((row, len(prompt))) for harness, row in zip((codes, floats), rows))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert codes.generate(codes.add(prompt), 20) == floats.generate(floats.add(prompt), 20)
    plain = Harness(load(tiny.checkpoint(name)))
    assert (plain.step((plain.add(prompt), len(prompt))) - want).abs().max() > 1e-3  # rounding changes the logits


async def test_whispers_tokens_do_not_depend_on_company_or_chunks():
    """Whisper's cross-attention reads FP8 codes too."""
    sent = [(number, list(test_whisper.PROMPTS[0])) for number in range(3)]

    async def tokens(apart, **settings):
        flags = {"device": "cpu", "kv_cache_dtype": "fp8", "enable_prefix_caching": False, **settings}
        async with running(test_whisper.whisper(), **flags) as served:
            if apart:
                return [(await answer(served, test_whisper.request(*each)))[0] for each in sent]
            asked = [answer(served, test_whisper.request(*each)) for each in sent]
            return [choices[0] for choices in await asyncio.gather(*asked)]

    wanted = await tokens(True)
    assert await tokens(False) == wanted
    assert await tokens(False, max_prefill_chunk=21, max_num_batched_tokens=50) == wanted


SETTINGS = {
    "batched": {},
    "chunked": {"max_prefill_chunk": 7},
    "small steps": {"max_num_batched_tokens": 40, "max_num_seqs": 8},
    "an accelerator's steps": {"max_prefill_chunk": 7},
    "preempted": {"num_gpu_blocks_override": 24, "max_model_len": 160, "debug_poison": True},
}


@pytest.fixture(scope="module")
def alone():
    """A function of model and kv_cache_dtype: the tokens of each prompt, computed alone."""
    known = {}

    async def of(name, word):
        if (name, word) not in known:
            settings = {"kv_cache_dtype": word, "enable_prefix_caching": False, "dtype": "float32"}
            async with running(tiny.checkpoint(name), device="cpu", **settings) as served:
                known[name, word] = [(await answer(served, request(prompt)))[0] for prompt in PROMPTS[:12]]
        return known[name, word]

    return of


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(("name", "word"), [("mistral-window", "fp8"), ("qwen3", "fp8_e5m2"), ("gemma4-large", "fp8")])
async def test_tokens_do_not_depend_on_circumstances(alone, name, word, settings, monkeypatch):
    wanted = await alone(name, word)
    if settings == "an accelerator's steps":
        monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    flags = {"device": "cpu", "dtype": "float32", "kv_cache_dtype": word, **SETTINGS[settings]}
    async with running(tiny.checkpoint(name), **flags) as served:
        for _ in range(2):  # the second time from the prefix cache
            got = await asyncio.gather(*[answer(served, request(prompt)) for prompt in PROMPTS[:12]])
            assert [choices[0] for choices in got] == wanted
        assert served.stats.prefix_hits > 0 or settings == "preempted"
        assert served.stats.preemptions > 0 or settings != "preempted"
