"""InternLM2 for the tests: a tiny random checkpoint in its makers' layout, and their formulas.

After https://huggingface.co/internlm/internlm2-chat-7b/blob/main/modeling_internlm2.py, which transformers lacks:
InternLM2Attention (wqkv's rows are "(h gs d)", gs = queries of a key-value head, its key, its value), InternLM2MLP
(w1 is the gate) and InternLM2DecoderLayer. Its dynamic RoPE equals the default RoPE up to max_position_embeddings.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from tests import tiny

CONFIG = {
    "architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "vocab_size": 331, "hidden_size": 72,
    "intermediate_size": 100, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "bias": False,
    "rope_scaling": {"type": "dynamic", "factor": 2.0}, "hidden_act": "silu", "tie_word_embeddings": False,
    "auto_map": {"AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM"}, "torch_dtype": "float32",
}  # fmt: skip


def tensors(config: dict[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Random weights by their published names."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    fused = (
        (config["num_attention_heads"] + 2 * config["num_key_value_heads"]) * hidden // config["num_attention_heads"]
    )
    layer = {
        "attention_norm": (hidden,), "attention.wqkv": (fused, hidden), "attention.wo": (hidden, hidden),
        "ffn_norm": (hidden,), "feed_forward.w1": (inner, hidden), "feed_forward.w3": (inner, hidden),
        "feed_forward.w2": (hidden, inner),
    }  # fmt: skip
    shapes = {"model.tok_embeddings": (config["vocab_size"], hidden), "model.norm": (hidden,)}
    shapes["output"] = shapes["model.tok_embeddings"]
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(8)
    made = {}
    for name, shape in shapes.items():
        tensor = torch.randn(shape, generator=generator)
        norm, embedding = len(shape) == 1, name.endswith("tok_embeddings")
        made[f"{prefix}{name}.weight"] = (
            1 + 0.1 * tensor if norm else 1.5 * tensor * (1 if embedding else shape[1] ** -0.5)
        )
        if config["bias"] and name.endswith(("wqkv", "wo")):
            made[f"{prefix}{name}.bias"] = 0.1 * torch.randn(shape[:1], generator=generator)
    return made


def checkpoint(folder: Path, **changes: Any) -> Path:
    """Writes the folder of a text model."""
    config = {**CONFIG, **changes}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors(config), folder / "model.safetensors")
    tiny.write_tokenizer(folder)
    return folder


def embeddings(folder: Path, tokens: list[int], prefix: str = "") -> Tensor:
    """Embeddings [T, hidden] of tokens."""
    return load_file(folder / "model.safetensors")[f"{prefix}model.tok_embeddings.weight"][tokens]


@torch.inference_mode()
def logits(folder: Path, x: Tensor, config: dict[str, Any] = CONFIG, prefix: str = "") -> Tensor:
    """Logits [T, vocabulary] of the embeddings x [T, hidden]."""
    held = load_file(folder / "model.safetensors")

    def product(name: str, x: Tensor) -> Tensor:
        return F.linear(x, held[f"{prefix}{name}.weight"], held.get(f"{prefix}{name}.bias"))

    def norm(name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], held[f"{prefix}{name}.weight"], config["rms_norm_eps"])

    heads, kept = config["num_attention_heads"], config["num_key_value_heads"]
    width, groups = config["hidden_size"] // heads, heads // kept
    inv_freq = 1.0 / config["rope_theta"] ** (torch.arange(0, width, 2).float() / width)
    angles = torch.outer(torch.arange(len(x)).float(), inv_freq).repeat(1, 2)[:, None]

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()

    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        qkv = product(layer + "attention.wqkv", norm(layer + "attention_norm", x)).view(len(x), kept, groups + 2, width)
        queries = rotated(qkv[:, :, :groups].flatten(1, 2)).transpose(0, 1)
        keys, values = rotated(qkv[:, :, -2]).transpose(0, 1), qkv[:, :, -1].transpose(0, 1)
        keys, values = (part.repeat_interleave(groups, 0) for part in (keys, values))
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + product(layer + "attention.wo", attended.transpose(0, 1).flatten(1))
        y = norm(layer + "ffn_norm", x)
        gated = F.silu(product(layer + "feed_forward.w1", y)) * product(layer + "feed_forward.w3", y)
        x = x + product(layer + "feed_forward.w2", gated)
    return product("output", norm("model.norm", x))


def greedy(folder: Path, tokens: list[int], count: int) -> list[int]:
    """`count` greedy tokens after the prompt."""
    tokens, given = list(tokens), len(tokens)
    for _ in range(count):
        tokens.append(int(logits(folder, embeddings(folder, tokens))[-1].argmax()))
    return tokens[given:]
