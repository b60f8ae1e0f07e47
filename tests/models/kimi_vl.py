"""Kimi-VL for the tests: a tiny random checkpoint in the published layout, and its tower's formulas.

After modeling_kimi_vl.py and image_processing_kimi_vl.py of https://huggingface.co/moonshotai/Kimi-VL-A3B-Instruct,
which transformers lacks: Learnable2DInterpPosEmb, Rope2DPosEmb (complex numbers of adjacent dimensions), patch_merger,
KimiVLMultiModalProjector. The decoder is transformers' DeepSeek-V3.
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

SIZE, INNER, HEADS, DEPTH, WIDTH = 72, 100, 2, 3, 96  # of the tower; WIDTH: of the decoder
SQUARE, LIMIT = (5, 7), 60  # learned positions; patches of a picture before it is filled up
VISION = {
    "model_type": "moonvit", "patch_size": 14, "num_attention_heads": HEADS, "num_hidden_layers": DEPTH,
    "hidden_size": SIZE, "intermediate_size": INNER, "init_pos_emb_height": SQUARE[0],
    "init_pos_emb_width": SQUARE[1], "merge_kernel_size": [2, 2], "torch_dtype": "bfloat16",
}  # fmt: skip
TEXT = {
    "vocab_size": tiny.VOCAB_SIZE, "hidden_size": WIDTH, "intermediate_size": 112, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    "rope_theta": 800_000.0, "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "n_shared_experts": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.446,
    "norm_topk_prob": True, "tie_word_embeddings": False, "eos_token_id": tiny.IDS["<|im_end|>"],
    "pad_token_id": tiny.IDS["<|endoftext|>"], "bos_token_id": None,
}  # fmt: skip
CONFIG = {
    "architectures": ["KimiVLForConditionalGeneration"], "model_type": "kimi_vl", "vision_config": VISION,
    "text_config": {
        **TEXT, "model_type": "deepseek_v3", "topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1,
    },
    "media_placeholder_token_id": tiny.IDS["<|IMAGE|>"], "torch_dtype": "float32", "tie_word_embeddings": False,
    "auto_map": {"AutoModel": "modeling_kimi_vl.KimiVLForConditionalGeneration"},
}  # fmt: skip
FILES = {
    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "image_processor_type": "KimiVLImageProcessor",
    "in_token_limit": LIMIT, "merge_kernel_size": [2, 2], "num_pooled_tokens": 1024, "pad_input": True,
    "patch_size": 14, "processor_class": "KimiVLProcessor",
}  # fmt: skip
CHECKPOINTS = {"kimi_vl": CONFIG}  # of tests/tiny.py


def shapes() -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of tower and projector by their published names."""
    block = 4 * SIZE
    modules = {
        "vision_tower.patch_embed.proj": (SIZE, 3, 14, 14), "vision_tower.encoder.final_layernorm": (SIZE,),
        "multi_modal_projector.pre_norm": (SIZE,), "multi_modal_projector.linear_1": (block, block),
        "multi_modal_projector.linear_2": (WIDTH, block),
    }  # fmt: skip
    for number in range(DEPTH):
        layer = f"vision_tower.encoder.blocks.{number}."
        modules |= {
            layer + "norm0": (SIZE,), layer + "norm1": (SIZE,), layer + "wqkv": (3 * SIZE, SIZE),
            layer + "wo": (SIZE, SIZE), layer + "mlp.fc0": (INNER, SIZE), layer + "mlp.fc1": (SIZE, INNER),
        }  # fmt: skip
    made = {f"{name}.weight": shape for name, shape in modules.items()}
    made |= {f"{name}.bias": shape[:1] for name, shape in modules.items()}
    return {**made, "vision_tower.patch_embed.pos_emb.weight": (*SQUARE, SIZE)}


@functools.cache
def decoder() -> Any:
    """The decoder: transformers' DeepSeek-V3 with random weights."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    return tiny.seeded(DeepseekV3ForCausalLM, DeepseekV3Config(**TEXT))


def checkpoint(folder: Path, config: dict[str, Any] = CONFIG) -> Path:
    """Writes a folder in the published layout."""
    tiny.save(decoder(), folder)
    held = {f"language_model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    own = drawn(shapes(), 11)
    own["vision_tower.patch_embed.pos_emb.weight"] *= 12
    save_file({**held, **own}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(FILES))
    return folder


def turned(x: Tensor, height: int, width: int) -> Tensor:
    """x [heads, patches, head_dim] as complex numbers of adjacent dimensions, turned by column and row in turns."""
    head = x.shape[-1]
    angles = [
        [place * 10_000.0 ** (-4 * index / head) for index in range(head // 4) for place in (column, row)]
        for row in range(height)
        for column in range(width)
    ]
    turns = torch.polar(torch.ones(height * width, head // 2), torch.tensor(angles))
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turns).flatten(-2)


@torch.inference_mode()
def rows(folder: Path, pixels: Tensor) -> Tensor:
    """The tower's rows [blocks, WIDTH] of normalised pixels [3, height, width] of whole blocks."""
    held = Held(load_file(folder / "model.safetensors"))
    height, width = pixels.shape[1] // 14, pixels.shape[2] // 14
    kernel = (held.tensors[f"vision_tower.patch_embed.proj.{kind}"] for kind in ("weight", "bias"))
    x = F.conv2d(pixels[None], *kernel, stride=14)[0].flatten(1).T
    square = held.tensors["vision_tower.patch_embed.pos_emb.weight"]
    if (height, width) != SQUARE:
        square = F.interpolate(square.permute(2, 0, 1)[None], size=(height, width), mode="bicubic")[0].permute(1, 2, 0)
    x = x + square.flatten(0, 1)
    for number in range(DEPTH):
        layer = f"vision_tower.encoder.blocks.{number}."
        qkv = held.product(layer + "wqkv", held.norm(layer + "norm0", x, 1e-5)).view(len(x), 3, HEADS, -1)
        q, k, v = qkv.permute(1, 2, 0, 3)
        attended = F.scaled_dot_product_attention(turned(q, height, width), turned(k, height, width), v)
        x = x + held.product(layer + "wo", attended.transpose(0, 1).flatten(1))
        inner = held.product(layer + "mlp.fc0", held.norm(layer + "norm1", x, 1e-5))
        x = x + held.product(layer + "mlp.fc1", F.gelu(inner, approximate="tanh"))
    x = held.norm("vision_tower.encoder.final_layernorm", x, 1e-5)
    x = held.norm("multi_modal_projector.pre_norm", x, 1e-5).view(height, width, -1)
    blocks = [x[i : i + 2, j : j + 2].flatten() for i in range(0, height, 2) for j in range(0, width, 2)]
    inner = F.gelu(held.product("multi_modal_projector.linear_1", torch.stack(blocks)))
    return held.product("multi_modal_projector.linear_2", inner)
