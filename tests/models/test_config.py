"""config.json in its many spellings -> one ModelConfig; or a refusal that names the key and the remedy."""

import dataclasses
import json
import logging
import math
from itertools import product

import pytest
import torch

from engine.base.errors import ConfigError
from engine.checkpoint.config import GENERATION_KEYS, resolve_dtype
from engine.layers.rope import frequencies
from engine.models.registry import load_model_config
from mm.processors.registry import processor_for
from tests import pooling_kit as kit
from tests import tiny


@pytest.fixture
def read(tmp_path):
    """A function that changes a tiny checkpoint's configuration (None removes a key) and loads it."""

    def load(name, generation=None, **changes):
        config = json.loads((tiny.checkpoint(name) / "config.json").read_text())
        config = {key: value for key, value in {**config, **changes}.items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(config))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return load_model_config(tmp_path)

    return load


def rope(config):
    return config.text.layers[0].rope


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16, "mscale": 1.0, "mscale_all_dim": 0.5}
SCALED = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn with its own attention factor": {**YARN, "attention_factor": 1.25, "truncate": False},
}


@pytest.mark.parametrize("case", SCALED)
def test_frequencies_equal_transformers_in_both_spellings(read, case):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    kind = case.split(" ")[0]
    settings = {"rope_type": kind, **SCALED[case]}
    common = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32, "max_position_embeddings": 512}
    with tiny.quiet():
        oracle = LlamaRotaryEmbedding(LlamaConfig(**common, rope_parameters={**settings, "rope_theta": 50_000.0}))
    new = read("llama", head_dim=32, rope_parameters={**settings, "rope_theta": 50_000.0})
    old = read("llama", head_dim=32, rope_parameters=None, rope_theta=50_000.0, rope_scaling=settings)
    oldest = {"type": kind, **SCALED[case]}
    assert rope(new) == rope(old)
    assert rope(new) == rope(read("llama", head_dim=32, rope_parameters=None, rope_theta=5e4, rope_scaling=oldest))
    torch.testing.assert_close(frequencies(rope(new), 0), oracle.inv_freq, rtol=1e-6, atol=0)
    assert rope(new).attention_factor == pytest.approx(oracle.attention_scaling)


def test_rope_nested_by_layer_type(read):
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = read("qwen3", rope_parameters=nested, layer_types=kinds, use_sliding_window=True, sliding_window=9)
    assert [layer.rope.kind for layer in config.text.layers] == ["default", "linear", "default"]
    assert [layer.rope.theta for layer in config.text.layers] == [1e4, 1e6, 1e4]
    assert [layer.window for layer in config.text.layers] == [9, 0, 9]


@pytest.mark.parametrize("name", ["mixtral", "phimoe", "gpt_oss"])
def test_rope_of_a_file_that_says_nothing_of_it_is_that_of_transformers(tmp_path, read, name):
    from transformers import AutoConfig

    got = rope(read(name, rope_parameters=None, max_position_embeddings=131_072))
    with tiny.quiet():
        want = AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert (got.kind, got.theta) == (want["rope_type"], want["rope_theta"])
    if got.kind == "yarn":
        assert (got.factor, got.original_max_position) == (32.0, want["original_max_position_embeddings"])
        assert (got.truncate, got.beta_fast, got.beta_slow) == (False, 32.0, 1.0)


def test_experts_of_exaone_are_scaled_where_the_file_is_silent(read):
    assert read("exaone_moe", routed_scaling_factor=None).text.layers[-1].experts.routing.scale == 2.5


def test_layers_with_a_window_have_a_theta_of_their_own_where_nested_settings_have_none(read):
    nested = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}
    config = read("gemma3", rope_parameters=nested, rope_theta=3e5, rope_local_base_freq=2e3)
    assert [layer.rope.theta for layer in config.text.layers] == [2e3, 2e3, 2e3, 3e5]


def test_layers_with_two_kinds_of_rope_compute(tmp_path):
    """Nested settings that are equal give the logits of one setting; different ones change the logits."""
    from tests.models.harness import Harness, load

    def logits(nested):
        config = json.loads((tiny.checkpoint("qwen2-window") / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "rope_parameters": nested}))
        harness = Harness(load(tmp_path, load_format="dummy"))
        return harness.prefill(harness.add(list(range(30))))

    plain = {"rope_type": "default", "rope_theta": 10_000.0}
    flat = logits(plain)
    assert torch.equal(flat, logits({"full_attention": plain, "sliding_attention": plain}))
    other = {**plain, "rope_theta": 100.0}
    assert not torch.equal(flat, logits({"full_attention": plain, "sliding_attention": other}))


def test_yarn_stretches_the_context(read):
    config = read(
        "llama", rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, **YARN}, max_position_embeddings=128
    )
    assert config.max_position == 512


def test_sliding_windows(read):
    def windows(config):
        return [layer.window for layer in config.text.layers]

    assert windows(read("qwen2", sliding_window=8, use_sliding_window=False)) == [0, 0, 0]
    on = {"use_sliding_window": True, "sliding_window": 8, "layer_types": None}
    assert windows(read("qwen2", max_window_layers=2, **on)) == [0, 0, 8]
    assert windows(read("mistral", sliding_window=8)) == [8, 8, 8]
    assert windows(read("mistral", max_position_embeddings=32768)) == [4096] * 3  # no key: that of the first release
    assert windows(read("llama", sliding_window=8)) == [0, 0, 0]


def test_mistral_without_a_window_says_null():
    config = load_model_config(tiny.checkpoint("mistral"))
    assert [layer.window for layer in config.text.layers] == [0, 0, 0]


def test_end_of_sequence_ids(read):
    assert read("llama", generation={"eos_token_id": [5, 6]}, eos_token_id=7).eos_token_ids == (5, 6)
    assert read("llama", generation={"eos_token_id": 5}, eos_token_id=7).eos_token_ids == (5,)
    assert read("llama", generation={}, eos_token_id=[7, 8]).eos_token_ids == (7, 8)
    assert read("llama", generation={}, eos_token_id=None).eos_token_ids == ()


def test_ending_tokens_beyond_the_vocabulary_are_logged_and_left_out(read, caplog):
    assert read("llama", generation={"eos_token_id": [5, 320, 9999]}).eos_token_ids == (5,)
    assert "eos_token_id [320, 9999]: the vocabulary has 320 tokens" in caplog.text


def test_generation_defaults_are_read(read):
    given = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "transformers_version": "5"}
    assert read("llama", generation=given).generation == {k: v for k, v in given.items() if k in GENERATION_KEYS}


def test_full_omni_configuration_nests_the_thinker(read, tmp_path):
    thinker = json.loads((tiny.checkpoint("omni") / "config.json").read_text())
    whole = {"architectures": ["Qwen2_5OmniForConditionalGeneration"], "thinker_config": thinker}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config, alone = load_model_config(tmp_path), load_model_config(tiny.checkpoint("omni"))
    assert (config.text, config.towers) == (alone.text, alone.towers)
    assert config.modalities == ("text", "image", "video", "audio")
    assert config.media_token_ids == alone.media_token_ids
    assert config.axes == 3


def test_omni_text_without_sections_has_the_released_ones(read):
    body = json.loads((tiny.checkpoint("omni") / "config.json").read_text())["text_config"]
    text = {**body, "head_dim": 128, "rope_parameters": None, "rope_theta": 1e6}
    assert rope(read("omni", text_config=text)).mrope_section == (16, 24, 24)


def test_released_omni_spellings(read):
    """The spellings of the released 7B folder: rope_scaling with type mrope, in_chans, torch_dtype."""
    whole = json.loads((tiny.checkpoint("omni") / "config.json").read_text())
    scaling = {"mrope_section": [4, 6, 6], "rope_type": "default", "type": "mrope"}
    text = {**whole["text_config"], "rope_parameters": None, "rope_theta": 1e6, "rope_scaling": scaling}
    vision = {key: value for key, value in whole["vision_config"].items() if key != "in_channels"}
    config = read("omni", text_config=text, vision_config={**vision, "in_chans": 3}, dtype=None, torch_dtype="bfloat16")
    assert rope(config).mrope_section == (4, 6, 6)
    assert config.torch_dtype == torch.bfloat16
    assert config.towers["vision"].in_channels == 3


# config.json of https://github.com/auraecosystem/llama-65b-hf at 7a7b897ab10b3d82d1e7e6fbcd2159d70b4586cf.
FIRST_LLAMA = {
    "architectures": ["LLaMAForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 8192, "intermediate_size": 22016, "initializer_range": 0.02, "max_sequence_length": 2048,
    "model_type": "llama", "num_attention_heads": 64, "num_hidden_layers": 80, "pad_token_id": 0,
    "rms_norm_eps": 1e-05, "torch_dtype": "float16", "transformers_version": "4.28.0.dev0", "use_cache": True,
    "vocab_size": 32000,
}  # fmt: skip


def test_the_first_llamas_are_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FIRST_LLAMA))
    config = load_model_config(tmp_path)
    assert (config.architecture, config.max_position) == ("LlamaForCausalLM", 2048)
    assert (len(config.text.layers), config.text.num_kv_heads, config.text.head_dim) == (80, 64, 128)
    assert rope(config).theta == 10_000.0


OLD = {"rope_parameters": None, "rope_theta": 1e4}
# Keys as in files of transformers 4, where they differ from those of the tiny checkpoint.
OLDER = {
    "gemma": {**OLD, "tie_word_embeddings": None, "hidden_act": "gelu", "head_dim": 20},
    "gemma2": {**OLD, "tie_word_embeddings": None, "layer_types": None, "hidden_act": "gelu"},
    "gemma3": {
        "rope_parameters": None, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "layer_types": None,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 4,
        "final_logit_softcapping": None, "attn_logit_softcapping": None,
    },
    "phi3": {**OLD, "sliding_window": None},
    "glm": {**OLD, "partial_rotary_factor": 0.5},
    "glm4": OLD,
    "olmo2": OLD,
    "cohere": {"rope_parameters": None, "tie_word_embeddings": None, "logit_scale": None},
    "smollm3": {"rope_parameters": None, "rope_theta": 2e6, "layer_types": None, "tie_word_embeddings": None},
    "seed_oss": OLD,
    "stablelm": {**OLD, "partial_rotary_factor": 0.25},
    "nemotron": {**OLD, "partial_rotary_factor": None},
    "hunyuan": {**OLD, "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 50.0, "beta_fast": 32}},
    "gpt_neox": {"rope_parameters": None, "rotary_pct": 0.25, "rotary_emb_base": 10_000},
    "gpt2": {"tie_word_embeddings": None, "n_inner": 4 * 72},
    "opt": {"tie_word_embeddings": None, "word_embed_proj_dim": 72},
}  # fmt: skip


@pytest.mark.parametrize("name", OLDER)
def test_older_files_of_a_family_say_the_same(read, name):
    assert read(name, **OLDER[name]).text == read(name).text


def test_old_names_of_longrope(read):
    """Phi-3's first releases name longrope `su`; Phi-3.5's have the original length outside rope_scaling."""
    factors = {"short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
    common = {"rope_parameters": None, "original_max_position_embeddings": 128}
    first = read("phi3", **common, rope_scaling={"type": "su", **factors})
    assert rope(first).kind == "longrope"
    assert rope(first).original_max_position == 128
    assert rope(first) == rope(read("phi3", **common, rope_scaling={"type": "longrope", **factors}))
    assert rope(first).attention_factor == pytest.approx((1 + math.log(4) / math.log(128)) ** 0.5)
    assert first.max_position == 512


def test_windows_of_families_without_layer_types(read):
    def windows(name, **changes):
        return [layer.window for layer in read(name, layer_types=None, num_hidden_layers=8, **changes).text.layers]

    assert windows("gemma2") == [8, 0] * 4
    assert windows("gemma3") == [8, 8, 8, 8, 8, 0, 8, 8]
    assert windows("olmo3") == windows("cohere2") == windows("exaone4") == [8, 8, 8, 0] * 2
    no_rope = {"no_rope_layers": [1, 1, 0, 1, 1, 1, 0, 1], "use_sliding_window": True, "sliding_window": 8}
    assert windows("smollm3", **no_rope) == [0, 0, 8, 0, 0, 0, 8, 0]
    assert windows("phi3", sliding_window=511) == [511] * 8
    assert windows("phi3", sliding_window=512) == [0] * 8  # the window is as long as the context of 512
    assert windows("exaone4", sliding_window_pattern="LLLG") == [8, 8, 8, 0] * 2
    rotated = [layer.rope.kind for layer in read("exaone4").text.layers]
    assert rotated == ["default", "none", "default"]


def test_only_full_layers_of_olmo3_are_scaled_in_older_files(read):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    config = read("olmo3", rope_parameters=None, rope_theta=5e5, rope_scaling=yarn)
    assert [(layer.rope.kind, layer.rope.theta) for layer in config.text.layers] == [
        ("default", 5e5), ("yarn", 5e5), ("default", 5e5)
    ]  # fmt: skip
    assert config.max_position == 512


REFUSED = [
    ("gemma4", {"use_bidirectional_attention": "all"}, "supported are null and 'vision'"),
    ("gemma4", {"num_kv_shared_layers": 6}, "no layer before the layer 1 makes the keys that layers of type"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=true: this model cannot generate"),
    (
        "gemma2",
        {"hidden_activation": "mish"},
        "hidden_act='mish' of Gemma2ForCausalLM is not supported; .*gelu_pytorch",
    ),
    ("apertus", {"hidden_act": "silu"}, "hidden_act='silu' of Apertus is not supported"),
    ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before=False of OPTForCausalLM is not supported"),
    (
        "opt",
        {"word_embed_proj_dim": 512},
        "word_embed_proj_dim=512 of OPTForCausalLM is not supported; supported is 72",
    ),
    ("granite", {"residual_multiplier": 0.0}, "residual_multiplier=0.0 and logits_scaling=8.0"),
    ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries for 3 layers"),
    (
        "phi3-short",
        {"rope_parameters": {"type": "longrope", "short_factor": [1.0]}},
        "short_factor must be .* positive",
    ),
    (
        "llama",
        {"architectures": ["LlamaForCausalLMEagle3"]},
        "is a drafter, no model of its own: .*--speculative-config",
    ),
    ("llama", {"architectures": ["Qwen9ForCausalLM"]}, "Qwen9ForCausalLM is not supported; the nearest are .*Qwen3For"),
    (
        "llama",
        {"architectures": None},
        "config.json names no architecture .model_type 'llama'.; if its class is among the [0-9]+ that `omniloop",
    ),
    ("llama", {"hidden_size": None}, "LlamaForCausalLM: config.json: hidden_size is missing"),
    ("omni", {"vision_config": 7}, "Qwen2_5OmniThinkerForConditionalGeneration: .*vision_config must be an object"),
    ("llama", {"quantization": {"bits": 4, "group_size": 64}}, "quantized by MLX"),
    ("llama", {"quantization": {"bits": 4}, "quantization_config": {"bits": 4, "group_size": 64}}, "quantized by MLX"),
    ("llama", {"quantization_config": [4]}, "quantization_config must be an object"),
    ("llama", {"hidden_size": "64"}, "hidden_size='64' must be an integer"),
    ("llama", {"num_hidden_layers": -1}, "num_hidden_layers=-1 must be an integer from 1"),
    ("llama", {"num_attention_heads": 0}, "num_attention_heads=0 must be an integer from 1"),
    ("llama", {"num_key_value_heads": 3}, "no multiple of num_key_value_heads=3"),
    ("llama", {"hidden_act": "mish"}, "hidden_act='mish' of LlamaForCausalLM is not supported"),
    ("llama", {"rope_parameters": {"rope_type": "wave"}}, "rope type 'wave' of Llama.* is not supported; .*yarn"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "factor=0.5 must be at least 1 and"),
    ("llama", {"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
    ("llama", {"rope_parameters": [1]}, "rope_parameters must be an object"),
    ("llama", {"quantization_config": {"quant_method": "hqq"}}, "quantized \\(hqq\\); this version reads .*awq.*gptq"),
    ("llama", {"dtype": "float8"}, "dtype 'float8' is not supported"),
    ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings=1 must be true or false"),
    ("llama", {"rms_norm_eps": "small"}, "rms_norm_eps='small' must be a number"),
    ("qwen3", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for num_hidden_layers=3"),
    ("qwen3", {"layer_types": ["linear_attention"] * 3}, "layer type 'linear_attention' is not supported"),
    ("omni", {"text_config": 7}, "text_config must be an object, got int"),
]


@pytest.mark.parametrize(("name", "changes", "words"), REFUSED)
def test_what_cannot_be_served_is_refused_by_name(read, name, changes, words):
    with pytest.raises(ConfigError, match=words) as error:
        read(name, **changes)
    assert "\n" not in str(error.value)


def test_towers_must_fit_the_decoder(read):
    whole = json.loads((tiny.checkpoint("omni") / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"vision_config makes rows of 64 numbers; .*hidden_size=128"):
        read("omni", vision_config={**whole["vision_config"], "out_hidden_size": 64})
    sections = {"rope_type": "default", "mrope_section": [1, 2, 3]}
    with pytest.raises(ConfigError, match="mrope_section"):
        read("omni", text_config={**whole["text_config"], "rope_parameters": sections})


def test_folder_without_configuration(tmp_path):
    with pytest.raises(ConfigError, match="is missing; a folder in Hugging Face or Mistral format"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ConfigError, match=r"config.json is a pointer of Git LFS .*: run git lfs pull"):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("adapter_config.json", "; it holds an adapter: serve its base model with --enable-lora"),
        ("model.gguf", "; name the GGUF file itself: --model .*/model.gguf$"),
        ("snapshots/0abc/config.json", "; there is one in .*/snapshots/0abc$"),
    ],
)
def test_an_error_names_the_files_of_a_folder_without_configuration(tmp_path, name, said):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=rf"config.json is missing; a folder in .*needed{said}"):
        load_model_config(tmp_path)


def test_s33_code_named_by_auto_map_is_logged_and_ignored(read, caplog):
    with caplog.at_level(logging.WARNING):
        config = read("llama", auto_map={"AutoModelForCausalLM": "evil.Model"})
    assert config.architecture == "LlamaForCausalLM"
    assert "auto_map" in caplog.text


def test_dtypes(caplog):
    config = load_model_config(tiny.checkpoint("llama"))
    assert resolve_dtype(config, "auto", "cpu") == torch.float32
    assert resolve_dtype(config, "bfloat16", "cpu") == torch.bfloat16
    assert resolve_dtype(config, "auto", "cuda:0") == torch.bfloat16
    assert resolve_dtype(config, "float32", "cuda:0") == torch.float32
    for device in ("cpu", "cuda:0"):
        with pytest.raises(ConfigError, match="--dtype int8: allowed are auto, float32, bfloat16, float16"):
            resolve_dtype(config, "int8", device)
        with pytest.raises(ConfigError, match="--dtype float16: only unquantised encoders of texts"):
            resolve_dtype(config, "float16", device)
    assert not caplog.records


def test_a_float16_checkpoint_is_served_in_bfloat16_and_says_so(caplog):
    config = dataclasses.replace(load_model_config(tiny.checkpoint("llama")), torch_dtype=torch.float16)
    assert resolve_dtype(config, "auto", "cuda:0") == torch.bfloat16
    assert "--dtype float32 keeps all its digits" in caplog.text
    caplog.clear()
    assert resolve_dtype(config, "auto", "cpu") == torch.float32
    assert not caplog.records


def test_float16_is_of_encoders_that_are_saved_so_or_asked_for_on_an_accelerator(caplog):
    config = load_model_config(kit.encoder("bert"))
    assert resolve_dtype(config, "auto", "cuda:0") == torch.bfloat16
    assert resolve_dtype(config, "float16", "cuda:0") == torch.float16
    saved = dataclasses.replace(config, torch_dtype=torch.float16)
    assert resolve_dtype(saved, "auto", "cuda:0") == torch.float16
    assert resolve_dtype(saved, "bfloat16", "cuda:0") == torch.bfloat16
    assert resolve_dtype(saved, "auto", "cpu") == torch.float32
    quantised = dataclasses.replace(config, raw={**config.raw, "quantization_config": {"quant_method": "fp8"}})
    for device, one in (("cpu", saved), ("cuda:0", quantised)):
        with pytest.raises(ConfigError, match="use auto, float32 or bfloat16, which take float16 checkpoints too"):
            resolve_dtype(one, "float16", device)
    assert not caplog.records


ODD = [None, "x", -1, 0, 1, 3, 2.5, True, [], [1], ["x"], [[1]], {}, {"a": 1}, 1e308, 2**40, "float32", float("nan")]


@pytest.mark.parametrize("name", ["gemma4", "gemma4-large"])
def test_gemma4_sizes_of_layers_have_two_spellings(tmp_path, name):
    """transformers 5.23 writes sizes for each layer; releases write one size for all layers of full attention."""
    config = json.loads((tiny.checkpoint(name) / "config.json").read_text())
    assert config.pop("per_layer_config")
    released = {"global_head_dim": 24, "num_global_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps({**config, **released}))
    assert load_model_config(tmp_path).text == load_model_config(tiny.checkpoint(name)).text


ANYWHERE = ["llama-yarn", "llama-llama3", "qwen2-window", "omni", "gemma4-moe", "dbrx", "gemma3-vision", "hunyuan_vl"]
ANYWHERE += ["llava", "llava_next", "idefics3", "gemma4-vision", "qwen3_vl"]


@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ANYWHERE)
def test_any_odd_value_is_read_or_refused_in_one_line(tmp_path, name, every):
    """Whatever value any key has, the reader raises no other error. `make test` tries every 17th pair of both."""

    def places(value, path=()):
        if isinstance(value, dict):
            for key, item in value.items():
                yield (*path, key)
                yield from places(item, (*path, key))

    text = (tiny.checkpoint(name) / "config.json").read_text()
    refused = []
    for path, odd in list(product(places(json.loads(text)), ODD))[::every]:
        config = json.loads(text)
        owner = config
        for key in path[:-1]:
            owner = owner[key]
        owner[path[-1]] = odd
        (tmp_path / "config.json").write_text(json.dumps(config))
        try:
            config = load_model_config(tmp_path)
            assert torch.isfinite(frequencies(rope(config), 0)).all()
            processor_for(config.processor if len(config.modalities) > 1 else "", tmp_path, config.raw)
        except (ConfigError, ValueError) as error:  # processors raise ValueError, which the server reports
            refused.append(str(error))
    assert len(refused) > 100 // every
    assert not [line for line in refused if "\n" in line]


@pytest.mark.parametrize("ids", ["x", ["x"], [1.5], True, -1, {}])
def test_odd_generation_ids_are_refused(read, ids):
    with pytest.raises(ConfigError, match="must be a token id or a list of them"):
        read("llama", generation={"eos_token_id": ids})
