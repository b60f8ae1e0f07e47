"""ChatGLM and GLM-4V for the tests: tiny random checkpoints in the published layout, and the makers' formulas.

After modeling_chatglm.py and visual.py of https://huggingface.co/THUDM/glm-4v-9b, which transformers lacks:
SelfAttention (queries, keys and values stacked in one matrix), apply_rotary_pos_emb (adjacent dimensions of the first
half), MLP (gate above up), TransformerLayer of the tower (norms after attention and MLP), GLU, EVA2CLIPModel, and
ChatGLMModel's positions: the tokens of a picture's patches share the position between its first and its last token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from tests import tiny

BOI, EOI = tiny.IDS["<|IMAGE|>"], tiny.IDS["<|vision_eos|>"]
MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
TEXT = {
    "architectures": ["ChatGLMModel"], "model_type": "chatglm", "add_bias_linear": False, "add_qkv_bias": True,
    "apply_query_key_layer_scaling": True, "apply_residual_connection_post_layernorm": False, "ffn_hidden_size": 112,
    "fp32_residual_connection": False, "hidden_size": 96, "kv_channels": 24, "layernorm_epsilon": 1.5625e-07,
    "multi_query_attention": True, "multi_query_group_num": 2, "num_attention_heads": 4, "num_layers": 3,
    "original_rope": True, "padded_vocab_size": tiny.VOCAB_SIZE, "post_layer_norm": True, "rmsnorm": True,
    "rope_ratio": 2, "seq_length": 2048, "tie_word_embeddings": False, "torch_dtype": "float32",
    "eos_token_id": [tiny.IDS["<|im_end|>"]], "pad_token_id": tiny.IDS["<|endoftext|>"], "pre_seq_len": None,
    "auto_map": {"AutoModel": "modeling_chatglm.ChatGLMForConditionalGeneration"},
}  # fmt: skip
VISION = {
    "dropout_prob": 0.0, "hidden_act": "gelu", "hidden_size": 72, "image_size": 56, "in_channels": 3,
    "intermediate_size": 100, "layer_norm_eps": 1e-6, "num_heads": 2, "num_hidden_layers": 3, "num_positions": 17,
    "patch_size": 14, "scaling_factor": 3,
}  # fmt: skip
# Widths of glm-4v-9b. The decoder's are those printed in https://github.com/modelscope/ms-swift/issues/1468; the
# tower's are CogVLM's, with larger pictures (https://github.com/mindspore-lab/mindnlp, configuration_cogvlm.py). The
# numbers of parameters are published too (test_chatglm.py).
PUBLISHED = {
    **TEXT, "ffn_hidden_size": 13696, "hidden_size": 4096, "kv_channels": 128, "num_attention_heads": 32,
    "num_layers": 40, "padded_vocab_size": 151_552, "seq_length": 8192, "boi_token_id": 151_339,
    "eoi_token_id": 151_340, "eos_token_id": [151_329, 151_336, 151_338],
    "vision_config": {
        **VISION, "hidden_size": 1792, "image_size": 1120, "intermediate_size": 15_360, "num_heads": 16,
        "num_hidden_layers": 63, "num_positions": 6401,
    },
}  # fmt: skip
SEEING = {**TEXT, "boi_token_id": BOI, "eoi_token_id": EOI, "vision_config": VISION}
CHECKPOINTS = {"chatglm": TEXT, "chatglm-vision": SEEING}  # of tests/tiny.py


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors by their published names."""
    hidden, inner, vocabulary = (config[key] for key in ("hidden_size", "ffn_hidden_size", "padded_vocab_size"))
    heads, groups = config["num_attention_heads"], config["multi_query_group_num"]
    joined = (heads + 2 * groups) * config["kv_channels"]
    made: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (vocabulary, hidden),
        "rotary_pos_emb.inv_freq": (config["kv_channels"] // 4,),
        "encoder.final_layernorm.weight": (hidden,),
        "output_layer.weight": (vocabulary, hidden),
    }
    for number in range(config["num_layers"]):
        layer = f"encoder.layers.{number}."
        made |= {
            layer + "input_layernorm.weight": (hidden,),
            layer + "self_attention.query_key_value.weight": (joined, hidden),
            layer + "self_attention.dense.weight": (hidden, heads * config["kv_channels"]),
            layer + "post_attention_layernorm.weight": (hidden,),
            layer + "mlp.dense_h_to_4h.weight": (2 * inner, hidden),
            layer + "mlp.dense_4h_to_h.weight": (hidden, inner),
        }
        if config["add_qkv_bias"]:
            made[layer + "self_attention.query_key_value.bias"] = (joined,)
    if "vision_config" not in config:
        return made
    sees = config["vision_config"]
    size, wide, patch = sees["hidden_size"], sees["intermediate_size"], sees["patch_size"]
    modules = {
        "patch_embedding.proj": (size, sees["in_channels"], patch, patch),
        "conv": (hidden, size, 2, 2), "linear_proj.norm1": (hidden,),
    }  # fmt: skip
    for number in range(sees["num_hidden_layers"]):
        layer = f"transformer.layers.{number}."
        modules |= {
            layer + "input_layernorm": (size,), layer + "post_attention_layernorm": (size,),
            layer + "attention.query_key_value": (3 * size, size), layer + "attention.dense": (size, size),
            layer + "mlp.fc1": (wide, size), layer + "mlp.fc2": (size, wide),
        }  # fmt: skip
    made |= {f"vision.{name}.weight": shape for name, shape in modules.items()}
    made |= {f"vision.{name}.bias": shape[:1] for name, shape in modules.items()}
    return made | {
        "vision.patch_embedding.cls_embedding": (1, size),
        "vision.patch_embedding.position_embedding.weight": (sees["num_positions"], size),
        "vision.linear_proj.linear_proj.weight": (hidden, hidden),
        "vision.linear_proj.gate_proj.weight": (inner, hidden),
        "vision.linear_proj.dense_h_to_4h.weight": (inner, hidden),
        "vision.linear_proj.dense_4h_to_h.weight": (hidden, inner),
        "vision.boi": (1, 1, hidden), "vision.eoi": (1, 1, hidden),
    }  # fmt: skip


def checkpoint(folder: Path, config: dict[str, Any] = SEEING) -> Path:
    """Writes a folder in the published layout, with random weights."""
    folder.mkdir(exist_ok=True)
    draw, held = torch.Generator().manual_seed(8), {}
    for name, shape in shapes(config).items():
        tensor = torch.randn(shape, generator=draw)
        plain, bias = "embedding" in name or name.endswith(("boi", "eoi")), name.endswith("bias")
        norm = "norm" in name and not bias
        wide = torch.Size(shape[1:]).numel()
        held[f"transformer.{name}"] = (
            1 + 0.1 * tensor if norm else 0.1 * tensor if bias else 1.2 * tensor * (1 if plain else wide**-0.5)
        )
    save_file(held, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    tiny.write_tokenizer(folder)
    return folder


class Reference:
    """The makers' formulas in float32, computed with a folder's tensors."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.held = {
            name.removeprefix("transformer."): tensor
            for name, tensor in load_file(folder / "model.safetensors").items()
        }

    def product(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.held[name + ".weight"], self.held.get(name + ".bias"))

    def layer_norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.held[name + ".weight"], self.held[name + ".bias"], eps)

    def convolution(self, name: str, x: Tensor, stride: int) -> Tensor:
        return F.conv2d(x, self.held[name + ".weight"], self.held[name + ".bias"], stride=stride)

    def rows(self, picture: np.ndarray) -> Tensor:
        """The tower's rows [rows, hidden] of a scaled picture, uint8 [side, side, 3]."""
        sees = self.config["vision_config"]
        heads, eps, patch = sees["num_heads"], sees["layer_norm_eps"], sees["patch_size"]
        pixels = (torch.tensor(picture).float() / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
        x = self.convolution("vision.patch_embedding.proj", pixels.permute(2, 0, 1)[None], patch).flatten(2)[0].T
        x = torch.cat([self.held["vision.patch_embedding.cls_embedding"], x])
        x = x + self.held["vision.patch_embedding.position_embedding.weight"]
        for number in range(sees["num_hidden_layers"]):
            layer = f"vision.transformer.layers.{number}."
            qkv = self.product(layer + "attention.query_key_value", x).view(len(x), 3, heads, -1).permute(1, 2, 0, 3)
            attended = F.scaled_dot_product_attention(*qkv).transpose(0, 1).flatten(1)
            x = x + self.layer_norm(layer + "input_layernorm", self.product(layer + "attention.dense", attended), eps)
            fed = self.product(layer + "mlp.fc2", F.gelu(self.product(layer + "mlp.fc1", x)))
            x = x + self.layer_norm(layer + "post_attention_layernorm", fed, eps)
        side = sees["image_size"] // patch
        x = self.convolution("vision.conv", x[1:].T.view(1, -1, side, side), 2).flatten(2)[0].T
        glu = "vision.linear_proj."
        x = F.gelu(self.layer_norm(glu + "norm1", self.product(glu + "linear_proj", x), 1e-5))
        x = F.silu(self.product(glu + "gate_proj", x)) * self.product(glu + "dense_h_to_4h", x)
        x = self.product(glu + "dense_4h_to_h", x)
        return torch.cat([self.held["vision.boi"][0], x, self.held["vision.eoi"][0]]) / sees["scaling_factor"]

    def inputs(self, tokens: Sequence[int], pictures: Sequence[np.ndarray] = ()) -> tuple[Tensor, Tensor]:
        """Embeddings and positions; each picture replaces one BOI token."""
        parts, positions, waiting = [], [], list(pictures)
        for token in tokens:
            at = positions[-1] + 1 if positions else 0
            if waiting and token == BOI:
                parts.append(self.rows(waiting.pop(0)))
                positions += [at, *[at + 1] * (len(parts[-1]) - 2), at + 2]
            else:
                parts.append(self.held["embedding.word_embeddings.weight"][[token]])
                positions.append(at)
        return torch.cat(parts), torch.tensor(positions)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], pictures: Sequence[np.ndarray] = ()) -> Tensor:
        """Logits [embeddings, vocabulary] of every token and picture row."""
        config, (x, positions) = self.config, self.inputs(tokens, pictures)
        heads, groups, width = (config[key] for key in ("num_attention_heads", "multi_query_group_num", "kv_channels"))
        half = width // 2
        theta = 1.0 / (10_000 * config["rope_ratio"]) ** (torch.arange(0, half, 2).float() / half)
        angles = torch.outer(positions.float(), theta)[:, None]

        def rotated(x: Tensor) -> Tensor:
            first, second = x[..., :half:2], x[..., 1:half:2]
            turned = first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()
            return torch.cat([torch.stack(turned, dim=-1).flatten(-2), x[..., half:]], dim=-1).transpose(0, 1)

        def norm(name: str, x: Tensor) -> Tensor:
            return F.rms_norm(x, x.shape[-1:], self.held[name + ".weight"], config["layernorm_epsilon"])

        for number in range(config["num_layers"]):
            layer = f"encoder.layers.{number}."
            qkv = self.product(layer + "self_attention.query_key_value", norm(layer + "input_layernorm", x))
            q, k, v = qkv.view(len(x), heads + 2 * groups, width).split([heads, groups, groups], dim=1)
            keys, values = (each.repeat_interleave(heads // groups, 0) for each in (rotated(k), v.transpose(0, 1)))
            attended = F.scaled_dot_product_attention(rotated(q), keys, values, is_causal=True)
            x = x + self.product(layer + "self_attention.dense", attended.transpose(0, 1).flatten(1))
            gate, up = self.product(layer + "mlp.dense_h_to_4h", norm(layer + "post_attention_layernorm", x)).chunk(
                2, -1
            )
            x = x + self.product(layer + "mlp.dense_4h_to_h", F.silu(gate) * up)
        return self.product("output_layer", norm("encoder.final_layernorm", x))

    def greedy(self, tokens: Sequence[int], count: int, pictures: Sequence[np.ndarray] = ()) -> list[int]:
        """`count` greedy tokens after the prompt."""
        tokens, given = list(tokens), len(tokens)
        for _ in range(count):
            tokens.append(int(self.logits(tokens, pictures)[-1].argmax()))
        return tokens[given:]
