"""Translates Mistral's params.json to the keys of config.json.

In: the file's object. Out: the values of transformers' configuration of the same model. A consolidated checkpoint has
params.json, consolidated*.safetensors (engine/weights/consolidated.py) and Mistral's own tokenizer; the special
ids 1 and 2 are the same in every release. A `moe` section means Mixtral. Mixtral's files name neither theta nor
context length: theta is in Mistral's code (mistral_inference/transformer.py), the config.json files have both.
Thread: any.
"""

from __future__ import annotations

from typing import Any

from engine.base.errors import ConfigError
from engine.checkpoint.section import Section

MAX_POSITION = 128_000  # context length for files that name none
MIXTRAL_POSITIONS, MIXTRAL_THETA = {4096: 32_768, 6144: 65_536}, 1e6  # context length by hidden size: 8x7B, 8x22B
MOE = ("num_experts", "num_experts_per_tok")  # the keys of a Mixtral's `moe` section; later models have more keys
# Features that some files name and this version does not support.
UNSUPPORTED = {
    "multimodal": "towers for other modalities",
    "q_lora_rank": "latent attention",
    "lora": "adapters inside",
}
TOWERS = ("multimodal",)
SIZES = (  # sizes of a tower; transformers uses the same keys
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_channels",
    "patch_size",
    "image_size",
)
NORM = "add_pre_mm_projector_layer_norm"
WHOLE = ("eos_token_id", "dtype", "quantization_config", "tie_word_embeddings")  # keys outside the decoder's section


def as_config(params: Section, text_only: bool) -> dict[str, Any]:
    """The equivalent config.json; `text_only`: without towers."""
    for key, what in UNSUPPORTED.items():
        if params.values.get(key) is not None and not (text_only and key in TOWERS):
            instead = "; --language-model-only serves the decoder" if key in TOWERS else ""
            raise ConfigError(
                f"{params.path}: {key} asks for {what}, which this version does not serve in this format{instead}"
            )
    experts = _experts(params) if params.values.get("moe") is not None else {}
    heads = params.size("n_heads")
    length, theta = MAX_POSITION, 10_000.0
    if experts:
        length, theta = MIXTRAL_POSITIONS.get(params.size("dim"), 32_768), MIXTRAL_THETA
    limit = params.size("max_position_embeddings", params.size("max_seq_len", length))
    config: dict[str, Any] = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": params.size("dim"),
        "intermediate_size": params.size("hidden_dim"),
        "num_hidden_layers": params.size("n_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": params.size("n_kv_heads", heads),
        "head_dim": params.size("head_dim", params.size("dim") // heads),
        "vocab_size": params.size("vocab_size"),
        "rms_norm_eps": params.number("norm_eps"),
        "rope_theta": params.number("rope_theta", theta),
        "max_position_embeddings": limit,
        "sliding_window": _window(params),
        "tie_word_embeddings": params.boolean("tied_embeddings", False),
        "eos_token_id": 2,
        "dtype": params.values.get("dtype") or "bfloat16",
        **experts,
    }
    if params.values.get("quantization") is not None:
        config["quantization_config"] = _quantisation(params.section("quantization"))
    if params.values.get("yarn") is not None:
        config["rope_scaling"] = _yarn(params.section("yarn"), limit)
    if params.values.get("llama_4_scaling") is not None:
        config |= _ministral3(params.section("llama_4_scaling"), config)
    if params.values.get("vision_encoder") is not None and not text_only:
        return _seeing(params.section("vision_encoder"), config)
    return config


def _experts(params: Section) -> dict[str, Any]:
    """The config.json keys of a Mixtral's experts."""
    moe = params.section("moe")
    unread = [key for key, value in moe.values.items() if key not in MOE and value is not None]
    if unread or params.values.get("llama_4_scaling") is not None:
        raise ConfigError(
            f"{moe.path}: {', '.join(unread) or 'llama_4_scaling beside it'} is not supported; in this format experts "
            f"are supported as Mixtral has them: {' and '.join(MOE)}"
        )
    count, chosen = (moe.size(key) for key in MOE)
    named = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    return {**named, "num_local_experts": count, "num_experts_per_tok": chosen}


def _seeing(vision: Section, decoder: dict[str, Any]) -> dict[str, Any]:
    """The config of a decoder with Pixtral's tower: Mistral 3 if neighbouring patches are merged, else LLaVA."""
    joined, normed = vision.values.get("mm_projector_id") or "", vision.boolean(NORM, False)
    if (joined, normed) not in (("", False), ("patch_merge", True)):
        raise ConfigError(
            f"{vision.path}: mm_projector_id={joined!r} with {NORM}={str(normed).lower()}; supported are none of both, "
            f"and 'patch_merge' with {NORM}=true"
        )
    named, kind = ("Mistral3", "mistral3") if joined else ("Llava", "llava")
    text = {key: value for key, value in decoder.items() if key not in WHOLE}
    return {
        **{key: decoder[key] for key in WHOLE if key in decoder},
        "architectures": [f"{named}ForConditionalGeneration"],
        "model_type": kind,
        "text_config": text,
        "vision_config": {
            "model_type": "pixtral",
            **{key: vision.size(key) for key in SIZES},
            "max_image_size": vision.size("max_image_size", vision.size("image_size")),
            "rope_theta": vision.number("rope_theta", 10_000.0),
            "hidden_act": "silu",
        },
        "image_token_id": vision.integer("image_token_id", 10),
        "multimodal_projector_bias": vision.boolean("adapter_bias", True),
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "spatial_merge_size": vision.size("spatial_merge_size") if joined else 1,
    }


def _quantisation(found: Section) -> dict[str, Any]:
    """The quantization_config: FP8 with a scale per matrix, and a scale for the matrix's input if the scheme is TENSOR;
    or the settings of compressed-tensors."""
    if str(found.values.get("quant_method")).replace("_", "-") == "compressed-tensors":
        return {**found.values, "quant_method": "compressed-tensors"}
    form = found.values.get("qformat_weight")
    if form != "fp8_e4m3":
        raise ConfigError(
            f"{found.path}: qformat_weight={form!r}; fp8_e4m3 is read, and quant_method='compressed-tensors': use the "
            "checkpoint in another format"
        )
    static = found.values.get("qscheme_act") == "TENSOR"
    return {"quant_method": "fp8", "activation_scheme": "static" if static else "dynamic"}


def _ministral3(scaling: Section, config: dict[str, Any]) -> dict[str, Any]:
    """The config of Ministral 3, whose queries are scaled by log(1 + position // original) beyond YaRN's context."""
    yarn = config.get("rope_scaling", {})
    original = scaling.size("original_max_position_embeddings")
    if yarn.get("original_max_position_embeddings") != original:
        raise ConfigError(
            f"{scaling.path}: original_max_position_embeddings={original} must be that of yarn, "
            f"{yarn.get('original_max_position_embeddings')}"
        )
    rope = {**yarn, "rope_theta": config["rope_theta"], "llama_4_scaling_beta": scaling.number("beta")}
    return {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", "rope_parameters": rope}


def _window(params: Section) -> int | None:
    """One window for all layers; the list form (some layers without) is another architecture."""
    value = params.values.get("sliding_window", params.values.get("_sliding_window"))
    if isinstance(value, list):
        raise ConfigError(
            f"{params.path}: sliding_window={value} differs between layers, which this architecture has not"
        )
    return None if value is None else params.size("sliding_window", value)


def _yarn(yarn: Section, limit: int) -> dict[str, Any]:
    """`beta` and `alpha` are the fast and the slow bound; without `apply_scale` attention is not scaled."""
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": yarn.number("factor"),
        "original_max_position_embeddings": yarn.size("original_max_position_embeddings", limit),
        "beta_fast": yarn.number("beta", 32.0),
        "beta_slow": yarn.number("alpha", 1.0),
    }
    if not yarn.boolean("apply_scale", True):
        scaling["attention_factor"] = 1.0
    return scaling
