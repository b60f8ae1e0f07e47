"""dots.ocr for the tests: a tiny random checkpoint in the published layout, and its tower's formulas.

After modeling_dots_vision.py of https://huggingface.co/rednote-hilab/dots.ocr, which transformers lacks: DotsPatchEmbed
(a norm after the patches), VisionAttention, DotsSwiGLUFFN (fc1 is the gate), the norm after the layers, PatchMerger (a
LayerNorm). The decoder is transformers' Qwen2.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from tests import tiny
from tests.models.with_rows import Held, drawn

VISION = {
    "embed_dim": 72, "hidden_size": 96, "intermediate_size": 100, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_channels": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 1, "rms_norm_eps": 1e-5,
    "use_bias": False, "is_causal": False, "post_norm": True, "attn_implementation": "flash_attention_2",
}  # fmt: skip
TEXT = {
    "vocab_size": tiny.VOCAB_SIZE, "hidden_size": 96, "intermediate_size": 112, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "tie_word_embeddings": False, "use_sliding_window": False, "sliding_window": 2048,
    "eos_token_id": tiny.IDS["<|im_end|>"], "pad_token_id": tiny.IDS["<|endoftext|>"],
}  # fmt: skip
CONFIG = {
    **TEXT, "architectures": ["DotsOCRForCausalLM"], "model_type": "dots_ocr", "attention_bias": True,
    "rope_scaling": None, "image_token_id": tiny.IDS["<|IMAGE|>"], "video_token_id": tiny.IDS["<|VIDEO|>"],
    "vision_config": VISION, "torch_dtype": "float32",
    "auto_map": {"AutoModelForCausalLM": "modeling_dots_ocr.DotsOCRForCausalLM"},
}  # fmt: skip
FILES = {
    "min_pixels": 56 * 56, "max_pixels": 224 * 224, "patch_size": 14, "temporal_patch_size": 1, "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "DotsVLProcessor",
}  # fmt: skip
CHECKPOINTS = {"dots_ocr": CONFIG}  # of tests/tiny.py


def shapes(sees: dict[str, Any] = VISION) -> dict[str, tuple[int, ...]]:
    """Shapes of the tower's tensors by their published names."""
    size, inner, patch = sees["embed_dim"], sees["intermediate_size"], sees["patch_size"]
    block = size * sees["spatial_merge_size"] ** 2
    made: dict[str, tuple[int, ...]] = {
        "patch_embed.patchifier.proj.weight": (size, 3, patch, patch), "patch_embed.patchifier.proj.bias": (size,),
        "patch_embed.patchifier.norm.weight": (size,), "post_trunk_norm.weight": (size,),
        "merger.ln_q.weight": (size,), "merger.ln_q.bias": (size,), "merger.mlp.0.weight": (block, block),
        "merger.mlp.0.bias": (block,), "merger.mlp.2.weight": (sees["hidden_size"], block),
        "merger.mlp.2.bias": (sees["hidden_size"],),
    }  # fmt: skip
    for number in range(sees["num_hidden_layers"]):
        layer = f"blocks.{number}."
        made |= {
            layer + "norm1.weight": (size,), layer + "attn.qkv.weight": (3 * size, size),
            layer + "attn.proj.weight": (size, size), layer + "norm2.weight": (size,),
            layer + "mlp.fc1.weight": (inner, size), layer + "mlp.fc2.weight": (size, inner),
            layer + "mlp.fc3.weight": (inner, size),
        }  # fmt: skip
    return {f"vision_tower.{name}": shape for name, shape in made.items()}


@functools.cache
def decoder() -> Any:
    """The decoder: transformers' Qwen2 with random weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return tiny.seeded(Qwen2ForCausalLM, Qwen2Config(**TEXT))


def checkpoint(folder: Path, config: dict[str, Any] = CONFIG) -> Path:
    """Writes a folder in the published layout."""
    folder.mkdir(exist_ok=True)
    held = {name: tensor.clone() for name, tensor in decoder().state_dict().items()}
    save_file({**held, **drawn(shapes(), 7)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(FILES))
    tiny.write_tokenizer(folder)
    return folder


def turned(x: Tensor, angle: Tensor) -> Tensor:
    """x [heads, patches, head_dim] rotated by angle [patches, head_dim / 2]; a pair is a dimension of either half."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@torch.inference_mode()
def rows(folder: Path, patches: Tensor, grid: tuple[int, int]) -> Tensor:
    """The tower's rows [blocks, hidden] of one picture's patches [patches, 3 * 14 * 14], in blocks of 2 x 2."""
    held = Held({name.removeprefix("vision_tower."): t for name, t in load_file(folder / "model.safetensors").items()})
    heads, (height, width) = VISION["num_attention_heads"], grid
    places = [
        (2 * i + di, 2 * j + dj)
        for i in range(height // 2)
        for j in range(width // 2)
        for di in (0, 1)
        for dj in (0, 1)
    ]
    quarter = VISION["embed_dim"] // heads // 4
    frequency = 10_000.0 ** -(torch.arange(quarter) / quarter)
    angle = (torch.tensor(places, dtype=torch.float32)[:, :, None] * frequency).flatten(1)
    kernel = held.tensors["patch_embed.patchifier.proj.weight"]
    x = F.conv2d(patches.view(-1, 3, 14, 14), kernel, held.tensors["patch_embed.patchifier.proj.bias"]).flatten(1)
    x = held.rms_norm("patch_embed.patchifier.norm", x, 1e-5)
    for number in range(VISION["num_hidden_layers"]):
        layer = f"blocks.{number}."
        qkv = held.product(layer + "attn.qkv", held.rms_norm(layer + "norm1", x, 1e-5))
        q, k, v = qkv.view(len(x), 3, heads, -1).permute(1, 2, 0, 3)
        attended = F.scaled_dot_product_attention(turned(q, angle), turned(k, angle), v)
        x = x + held.product(layer + "attn.proj", attended.transpose(0, 1).flatten(1))
        normed = held.rms_norm(layer + "norm2", x, 1e-5)
        gated = F.silu(held.product(layer + "mlp.fc1", normed)) * held.product(layer + "mlp.fc3", normed)
        x = x + held.product(layer + "mlp.fc2", gated)
    x = held.norm("merger.ln_q", held.rms_norm("post_trunk_norm", x, 1e-5), 1e-6).view(len(x) // 4, -1)
    return held.product("merger.mlp.2", F.gelu(held.product("merger.mlp.0", x)))
