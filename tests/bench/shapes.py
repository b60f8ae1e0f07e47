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


def byte_tokenizer(vocab: int) -> dict:
    """A byte-level BPE tokenizer.json: 256 bytes, then two-letter entries that no merge reaches, up to `vocab` ids."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = list(alphabet)
    first = 0
    while len(tokens) < vocab:
        second, first_letter = first % len(alphabet), (first // len(alphabet)) % len(alphabet)
        tokens.append(alphabet[first_letter] + alphabet[second] * (1 + first // len(alphabet) ** 2))
        first += 1
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


def write_folder(folder: Path, config: dict) -> Path:
    """Writes config.json and tokenizer.json; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer(config["vocab_size"])))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder
