"""A checkpoint that calls one tool and then answers: a Qwen3 whose next token depends on the last token alone.

Attention and MLP add nothing. In the head, the row of a token is the embedding of the token before it. The chat
template ends with `<|call|>` if a tool may be called, and with `<|answer|>` after a tool's result or without tools.

    <|call|>   <think> \\nLet me look.\\n </think> <tool_call> (the call) </tool_call> <|im_end|>
    <|answer|> I have looked. <|im_end|>
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

ANSWER, THOUGHT = "I have looked.", "Let me look."
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|call|>", "<|answer|>")
CONTEXT, HIDDEN, HEAD = 131_072, 64, 32  # CONTEXT: an agent sends 90,000 bytes, and each byte is a token here
TEMPLATE = """\
{%- if tools %}<|im_start|>system
Call a tool as <tool_call>{"name": its name, "arguments": an object}</tool_call>.
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if tools and messages[-1].role != 'tool' %}<|call|>{% else %}<|answer|>{% endif %}{% endif %}"""


def calling(folder: Path, name: str, arguments: dict[str, Any]) -> Path:
    """Writes a checkpoint that calls the tool `name` with `arguments`, once per question."""
    folder.mkdir(parents=True)
    call = json.dumps({"name": name, "arguments": arguments})
    plain = ("<think>", f"\n{THOUGHT}\n", "</think>", "<tool_call>", call, "</tool_call>", ANSWER)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in plain])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": CONTEXT,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ids = {token: tokenizer.token_to_id(token) for token in (*SPECIAL, *plain)}
    (folder / "config.json").write_text(json.dumps(_config(tokenizer.get_vocab_size(), ids["<|im_end|>"])))
    follows = [*pairwise(("<|call|>", *plain[:-1], "<|im_end|>")), *pairwise(("<|answer|>", ANSWER, "<|im_end|>"))]
    pairs = [(ids[before], ids[after]) for before, after in follows]
    save_file(_weights(tokenizer.get_vocab_size(), pairs), folder / "model.safetensors", {"format": "pt"})
    return folder


def _config(vocab_size: int, end: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": end,
    }


def _weights(vocab_size: int, pairs: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    embedding = torch.randn(vocab_size, HIDDEN, generator=torch.Generator().manual_seed(0))
    head = torch.zeros(vocab_size, HIDDEN)
    for before, after in pairs:
        head[after] += 4 * embedding[before]  # the logit of this token is 256, all others are below 150
    sides = {"q_proj": (HEAD, HIDDEN), "k_proj": (HEAD, HIDDEN), "v_proj": (HEAD, HIDDEN), "o_proj": (HIDDEN, HEAD)}
    layer = {f"self_attn.{part}.weight": torch.zeros(shape) for part, shape in sides.items()}
    layer |= {f"mlp.{part}_proj.weight": torch.zeros(HIDDEN, HIDDEN) for part in ("gate", "up", "down")}
    layer |= {f"self_attn.{part}_norm.weight": torch.ones(HEAD) for part in "qk"}
    layer |= {f"{part}_layernorm.weight": torch.ones(HIDDEN) for part in ("input", "post_attention")}
    return {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(HIDDEN),
        **{f"model.layers.0.{name}": tensor for name, tensor in layer.items()},
    }
