"""Checkpoint folders of given shapes without weights, for `--load-format dummy`: config and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

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
TINY = {  # for trying a benchmark out
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
SHAPES = {"tiny": TINY, "8b": QWEN3_8B, "0.6b": QWEN3_06B}
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def byte_tokenizer(vocab: int) -> dict:
    """A byte-level BPE tokenizer.json: 256 bytes, then words of four letters that no merge reaches, up to `vocab` ids.

    Nearly every id that random weights choose is a word, so a stream has text with each token, as with real models.
    """
    from tokenizers import pre_tokenizers

    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    for number in range(vocab - len(tokens)):
        places = (number // 26**3, number // 26**2, number // 26, number)
        tokens.append("".join(LETTERS[place % 26] for place in places))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
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


TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant: "


def write_folder(folder: Path, config: dict) -> Path:
    """Writes config.json, tokenizer.json and a chat template; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer(config["vocab_size"])))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
