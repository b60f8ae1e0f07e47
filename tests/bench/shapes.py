"""Checkpoint folders of given shapes without weights, for `--load-format dummy`: config and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.bench.shapes_hearing import HEARING
from tests.bench.shapes_seeing import GEMMA3_SEEING, OURS, SEEING
from tests.bench.shapes_states import STATES

QWEN3_CPU = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "attention_bias": False,
    "eos_token_id": 1,
}
TINY = {  # for trying out a benchmark
    **QWEN3_CPU,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "vocab_size": 2048,
    "max_position_embeddings": 1024,
}
QWEN3_8B = {
    **QWEN3_CPU,
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}
QWEN3_06B = {
    **QWEN3_8B,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "intermediate_size": 3072,
    "tie_word_embeddings": True,
}
QWEN3_30B_A3B = {
    **QWEN3_8B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
TINY_SPARSE = {  # with experts
    **QWEN3_30B_A3B,
    **TINY,
    "architectures": QWEN3_30B_A3B["architectures"],
    "model_type": QWEN3_30B_A3B["model_type"],
    "num_experts": 12,
    "moe_intermediate_size": 64,
}
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_hidden_layers": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "sliding_window": 128,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 200002,
    "quantization_config": {"quant_method": "mxfp4"},
}
LLAMA31_8B = {
    **QWEN3_8B,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "eos_token_id": 128009,
}
QWEN3_32B = {
    **QWEN3_8B,
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "intermediate_size": 25600,
}
LLAMA33_70B = {
    **LLAMA31_8B,
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "intermediate_size": 28672,
}
GPT_OSS_120B = {
    **GPT_OSS_20B,
    "num_hidden_layers": 36,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "num_local_experts": 128,
}
QWEN3_235B_A22B = {
    **QWEN3_30B_A3B,
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
}
MIXTRAL_8X22B = {
    **QWEN3_8B,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 6144,
    "num_hidden_layers": 56,
    "num_attention_heads": 48,
    "intermediate_size": 16384,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32768,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "eos_token_id": 2,
}
GEMMA3_12B = {  # the decoder alone: five layers with a window of 1,024, then one with full attention
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 3840,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "intermediate_size": 15360,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "torch_dtype": "bfloat16",
    "eos_token_id": 106,
}


SHAPES = {
    "tiny": TINY,
    "tiny-sparse": TINY_SPARSE,
    "8b": QWEN3_8B,
    "0.6b": QWEN3_06B,
    "30b-a3b": QWEN3_30B_A3B,
    "gpt-oss-20b": GPT_OSS_20B,
    "gpt-oss-120b": GPT_OSS_120B,
    "llama-8b": LLAMA31_8B,
    "llama-70b": LLAMA33_70B,
    "32b": QWEN3_32B,
    "235b": QWEN3_235B_A22B,
    "mixtral-8x22b": MIXTRAL_8X22B,
    "gemma-12b": GEMMA3_12B,
    "gemma-12b-vl": {**GEMMA3_SEEING, "text_config": GEMMA3_12B},
    **SEEING,
    **HEARING,
    **STATES,
}
BGE_BASE = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "pad_token_id": 0,
    "torch_dtype": "float32",
}
XLM_R_LARGE = {
    **BGE_BASE,
    "architectures": ["XLMRobertaModel"],
    "model_type": "xlm-roberta",
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "vocab_size": 250002,
    "max_position_embeddings": 8194,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
}
RANKER = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
POOLED = {  # used by gpu_pooling
    "bge-base": BGE_BASE,
    "xlm-r-large": XLM_R_LARGE,
    "0.6b-embedding": {**QWEN3_06B, "architectures": ["Qwen3Model"]},
    "8b-embedding": {**QWEN3_8B, "architectures": ["Qwen3Model"]},
    "0.6b-reranker": {**QWEN3_06B, **RANKER},
    "tiny-embedding": {
        **BGE_BASE,
        "num_hidden_layers": 2,
        "hidden_size": 48,
        "intermediate_size": 96,
        "vocab_size": 2048,
    },
    "tiny-reranker": {**TINY, **RANKER},
}


def few_layers(name: str) -> dict[str, Any]:
    """A shape with layers of every kind, but as few as possible: for the set of its kernels, not for their times."""
    config = SHAPES[name]
    parts = {part: fewer(config[part]) for part in ("text_config", "vision_config", "audio_config") if part in config}
    return {**config, **parts} if parts else fewer(config)


def fewer(part: dict[str, Any]) -> dict[str, Any]:
    """A decoder or a tower with few layers."""
    if "depth" in part:  # in such a tower some layer numbers have another kind
        fed = {"deepstack_visual_indexes": [3, 5]} if "deepstack_visual_indexes" in part else {}
        return {**part, "depth": 8, **fed}
    if "encoder_layers" in part:
        return {**part, "encoder_layers": 2}
    count = part.get("sliding_window_pattern", 3)
    kinds = {"layer_types": part["layer_types"][:count]} if "layer_types" in part else {}
    return {**part, "num_hidden_layers": count, **kinds}


LETTERS = "abcdefghijklmnopqrstuvwxyz"


def byte_tokenizer(vocab: int, special: dict[str, int] | None = None) -> dict:
    """A byte-level BPE tokenizer.json: 256 bytes, then four-letter words up to `vocab` ids, which no merge produces.

    Nearly every id that random weights choose is a word. So each token of a stream has text, as with real models.
    """
    from tokenizers import pre_tokenizers

    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    for number in range(vocab - len(tokens)):
        places = (number // 26**3, number // 26**2, number // 26, number)
        tokens.append("".join(LETTERS[place % 26] for place in places))
    for token, number in (special or {}).items():
        tokens[number] = token
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": token, **flags} for token, number in (special or {}).items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [],
        },
    }


TEMPLATE = """\
{%- for message in messages -%}
{{ message['role'] }}: {% if message['content'] is string %}{{ message['content'] }}{% else %}
{%- for part in message['content'] -%}
{%- if part['type'] in ('image', 'image_url') -%}<|vision_bos|><|IMAGE|><|vision_eos|>
{%- elif part['type'] in ('video', 'video_url') -%}<|vision_bos|><|VIDEO|><|vision_eos|>
{%- elif part['type'] in ('audio', 'input_audio', 'audio_url') -%}<|AUDIO|>
{%- else -%}{{ part['text'] }}{%- endif -%}
{%- endfor -%}
{%- endif %}
{% endfor -%}
assistant: """


def _compressed(form: str, inputs: dict | None, **weights: object) -> dict:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    named = {"quant_method": "compressed-tensors", "format": form}
    return {**named, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


# --weights of the benchmarks -> quantization_config for random weights.
FORMS = {
    "fp8": _compressed(
        "float-quantized",
        {"type": "float", "num_bits": 8, "dynamic": True, "strategy": "token"},
        num_bits=8,
        type="float",
        strategy="channel",
    ),
    "fp8-weights": _compressed("float-quantized", None, num_bits=8, type="float", strategy="channel"),
    "fp8-blocks": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "w4": _compressed("pack-quantized", None, num_bits=4, type="int", strategy="group", group_size=128),
    "awq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["lm_head"],
    },
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "int8": _compressed("int-quantized", {"type": "int", "num_bits": 8}, num_bits=8, type="int", strategy="channel"),
}


def write_folder(folder: Path, config: dict, weights: str = "") -> Path:
    """Writes config.json, tokenizer.json, a chat template and a vision model's processor; returns the folder.

    `weights`: a name in FORMS; "": floats.
    """
    if weights:
        config = {**config, "quantization_config": FORMS[weights]}
    folder.mkdir(parents=True, exist_ok=True)
    special = config.get("special", {})
    vocab = config.get("text_config", config)["vocab_size"]
    (folder / "config.json").write_text(json.dumps({key: config[key] for key in config if key not in OURS}))
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer(vocab, special)))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, settings in config.get("files", {}).items():
        (folder / name).write_text(json.dumps(settings))
    return folder
