"""The configuration of a GGUF file with config.json's keys. In: the file's header. Out: plain objects. Thread: any."""

from __future__ import annotations

import math
from typing import Any

import torch

from engine.base.errors import ConfigError
from engine.weights.gguf import FLOATS, FREQUENCIES, Gguf

# general.architecture -> transformers' architecture and model_type.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
# Settings of Llama 3.1 and 3.2, whose files hold only the divisors of the frequencies.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def config_of(file: Gguf) -> dict[str, Any]:
    """The equivalent config.json; ConfigError if the file cannot be served."""
    if file.architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{file.path}: general.architecture={file.architecture!r}; of GGUF files {', '.join(ARCHITECTURES)} are "
            "served: take the model in Hugging Face's format"
        )
    if file.fact("expert_count", 0):
        raise ConfigError(f"{file.path}: experts of GGUF files are not read: take the model in Hugging Face's format")
    architecture, model_type = ARCHITECTURES[file.architecture]
    heads = file.count("attention.head_count")
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": file.fact("embedding_length"),
        "intermediate_size": file.fact("feed_forward_length"),
        "num_hidden_layers": file.fact("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.fact("attention.head_count_kv", heads),
        "head_dim": file.head_dim,
        "vocab_size": file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else 0,
        "rms_norm_eps": file.fact("attention.layer_norm_rms_epsilon"),
        "rope_theta": file.fact("rope.freq_base", 10_000.0),
        "max_position_embeddings": file.fact("context_length"),
        "tie_word_embeddings": _is_tied(file),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "gguf"},
    }
    if (scaling := _scaling(file)) is not None:
        config["rope_scaling"] = scaling
    return config


def generation_of(file: Gguf) -> dict[str, Any]:
    """The equivalent generation_config.json: the tokens that end an answer."""
    ends = [file.facts.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return {"eos_token_id": sorted({end for end in ends if end is not None})}


def _is_tied(file: Gguf) -> bool:
    """Whether embedding and head share one float tensor; shared codes are loaded twice, under both names
    (weights/gguf)."""
    stored = file.tensors.get("token_embd.weight")
    return "output.weight" not in file.tensors and stored is not None and stored.type in FLOATS


def _scaling(file: Gguf) -> dict[str, Any] | None:
    if FREQUENCIES in file.tensors:
        return _llama3(file)
    kind = file.fact("rope.scaling.type", "none")
    if kind == "none":
        return None
    factor = file.fact("rope.scaling.factor", 1.0)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = file.fact("rope.scaling.original_context_length", file.fact("context_length"))
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise ConfigError(f"{file.path}: rope.scaling.type={kind!r}; none, linear and yarn are served")


def _llama3(file: Gguf) -> dict[str, Any]:
    """Llama 3's rope settings if they reproduce the file's divisors; the factor is the largest divisor."""
    found = file.floats(FREQUENCIES).double()
    factor, count = float(found.max()), len(found)
    theta = float(file.fact("rope.freq_base", 10_000.0))
    waves = 2 * math.pi * theta ** (torch.arange(count, dtype=torch.float64) / count)
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    turns = LLAMA3["original_max_position_embeddings"] / waves
    share = ((turns - low) / (high - low)).clamp(0, 1)
    wanted = 1 / ((1 - share) / factor + share)
    if not torch.allclose(found, wanted, rtol=1e-3):
        raise ConfigError(
            f"{file.path}: the frequencies in {FREQUENCIES} are not Llama 3's rule with factor {factor:g}: take the "
            "model in Hugging Face's format"
        )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}
