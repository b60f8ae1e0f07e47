"""Published widths: the tiny configurations of tests/tiny.py with widths, heads and experts of released models.

Layers, vocabulary and patches stay as few as in the tiny models; experts are fewer where they would not fit in memory.
There are no weights: `--load-format dummy` draws them, and `draw_on_host` draws the same numbers for every device.
"""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.weights import dummy
from tests import pooling_kit as kit
from tests import tiny, tiny_realtime

POOL = 1_000_003  # numbers drawn for a tensor; larger tensors repeat them


def wide(hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int, **more: Any) -> dict[str, Any]:
    """config.json's keys of a decoder's widths."""
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, **more,
    }  # fmt: skip


def experts(inner: int, count: int, top_k: int, **more: Any) -> dict[str, Any]:
    return {"moe_intermediate_size": inner, "num_experts": count, "num_experts_per_tok": top_k, **more}


def sees(hidden: int, inner: int, heads: int, **more: Any) -> dict[str, Any]:
    """config.json's keys of a tower's widths."""
    return {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads, **more}


SIGLIP = sees(1152, 4304, 16)
CLIP = sees(1024, 4096, 16)
QWEN = wide(2048, 11008, 16, 2, 128)
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}}
INTERLEAVED = {"rope_parameters": {**SECTIONS["rope_parameters"], "mrope_interleaved": True}}
HALF_TURNED = {
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5,
    }
}  # fmt: skip
DECODERS: dict[str, dict[str, Any]] = {  # tiny checkpoint -> the values that replace its configuration's
    "llama-llama3": wide(4096, 14336, 32, 8, 128),
    "mistral": wide(3840, 10240, 32, 8, 120),
    "mistral-window": wide(5120, 14336, 32, 8, 128),
    "qwen2": wide(896, 4864, 14, 2, 64),
    "qwen3": wide(2560, 9728, 32, 8, 128),
    "phi3": wide(3072, 8192, 32, 32, 96),
    "gemma": wide(2048, 16384, 8, 1, 256),
    "gemma2": wide(3584, 14336, 16, 8, 256, query_pre_attn_scalar=256),
    "gemma3": wide(1152, 6912, 4, 1, 256, query_pre_attn_scalar=256),
    "glm4": wide(4096, 13696, 32, 2, 128),
    "stablelm": wide(2560, 6912, 32, 32, 80),
    "stablelm-parallel": wide(5120, 13824, 32, 8, 160),
    "gemma4-large": wide(3840, 15360, 16, 8, 256, global_head_dim=512, num_global_key_value_heads=2),
    "gpt_neox": {"hidden_size": 6144, "intermediate_size": 24576, "num_attention_heads": 64},
    "gpt2": {"n_embd": 1600, "n_head": 25, "n_inner": 6400},
    "opt": {"hidden_size": 2560, "ffn_dim": 10240, "num_attention_heads": 32, "word_embed_proj_dim": 2560},
    "starcoder2": wide(3072, 12288, 24, 2, 128),
    "cohere2": wide(4096, 14336, 32, 8, 128),
    "olmo2": wide(4096, 11008, 32, 32, 128),
    "granite": wide(2048, 8192, 32, 8, 64),
    "nemotron": wide(3072, 9216, 24, 8, 128),
    "apertus": wide(4096, 21504, 32, 8, 128),
    "seed_oss": wide(5120, 27648, 80, 8, 128),
    "exaone4": wide(2048, 4096, 32, 8, 64),
    "hunyuan": wide(4096, 14336, 32, 8, 128),
    "lfm2": {"hidden_size": 2048, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8},
    "phi": {**wide(2560, 10240, 32, 32, 80)},
    "mixtral": wide(4096, 3584, 32, 8, 128),
    "qwen2_moe": {**wide(2048, 5632, 16, 16, 128), **experts(1408, 20, 4, shared_expert_intermediate_size=5632)},
    "qwen3_moe": {**wide(2048, 6144, 32, 4, 128), **experts(768, 40, 8)},
    "olmoe": {**wide(2048, 1024, 16, 16, 128), "num_experts": 24, "num_experts_per_tok": 8},
    "granite_moe": {**wide(1536, 512, 24, 8, 64), "num_local_experts": 40, "num_experts_per_tok": 8},
    "glm4_moe": {**wide(4096, 10944, 96, 8, 128), "moe_intermediate_size": 1408, "n_routed_experts": 8,
                 "num_experts_per_tok": 3},
    "gpt_oss": {**wide(2880, 2880, 64, 8, 64), "num_local_experts": 8, "num_experts_per_tok": 4},
    "minimax_m2": {**wide(3072, 1536, 48, 8, 128), "num_local_experts": 12, "num_experts_per_tok": 4,
                   "rotary_dim": 64},
}  # fmt: skip
SEEING: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # values of tower, decoder, rest
    "gemma3-vision": ({**SIGLIP, "image_size": 896}, wide(2560, 10240, 8, 4, 256), {"mm_tokens_per_image": 256}),
    "paligemma": ({**SIGLIP, "image_size": 224, "projection_dim": 2048}, wide(2048, 16384, 8, 1, 256),
                  {"projection_dim": 2048, "hidden_size": 2048}),
    "llava": ({**CLIP, "image_size": 336}, wide(4096, 11008, 32, 32, 128), {}),
    "llava-siglip": ({**SIGLIP, "image_size": 384}, wide(896, 4864, 14, 2, 64), {}),
    "llava_onevision": ({**SIGLIP, "image_size": 384}, wide(896, 4864, 14, 2, 64), {}),
    "mistral3": ({**CLIP, "image_size": 1540}, wide(5120, 8192, 32, 8, 128), {}),
    "internvl": ({**CLIP, "image_size": [448, 448]}, QWEN, {}),
    "internvl-6b": (sees(3200, 12800, 25, image_size=[448, 448]), QWEN, {}),
    "idefics3": ({**SIGLIP, "image_size": 364}, wide(4096, 14336, 32, 8, 128), {"scale_factor": 2}),
    "smolvlm": (sees(768, 3072, 12, image_size=512, patch_size=16), wide(576, 1536, 9, 3, 64),
                {"scale_factor": 4}),
    "lfm2_vl": (SIGLIP, wide(2048, 12288, 32, 8, 64), {}),
    "llama4-vision": (sees(1408, 5632, 16, image_size=336), wide(2048, 2048, 16, 8, 128), {}),
    "qwen2_vl": ({"embed_dim": 1280, "num_heads": 16, "mlp_ratio": 4, "hidden_size": 2048}, {**QWEN, **SECTIONS}, {}),
    "qwen2_5_vl": ({"hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048},
                   {**QWEN, **SECTIONS}, {}),
    "qwen3_vl": ({"hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 2048,
                  "num_position_embeddings": 2304}, {**QWEN, **INTERLEAVED}, {}),
    "glm4v": ({"hidden_size": 1536, "intermediate_size": 4096, "num_heads": 12, "out_hidden_size": 4096},
              {**wide(4096, 13696, 32, 2, 128), **HALF_TURNED}, {}),
    # No norm precedes the layers: random weights make attention so sharp that errors triple in each layer.
    "chatglm-vision": ({"num_hidden_layers": 2, "hidden_size": 1792, "intermediate_size": 15360, "num_heads": 16,
                        "image_size": 560, "num_positions": 1601},
                       {"hidden_size": 4096, "ffn_hidden_size": 13696, "num_attention_heads": 32, "kv_channels": 128},
                       {}),
    "gemma4-vision": (SIGLIP, {}, {}),
    "hunyuan_vl": (SIGLIP, {}, {}),
}  # fmt: skip
HEARING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # audio models: values of tower, decoder
    "voxtral-realtime": (sees(1280, 5120, 32, head_dim=64, sliding_window=750), wide(3072, 9216, 32, 8, 128)),
}
NAMES = (*DECODERS, *(name for name, (_, decoder, _) in SEEING.items() if decoder), *HEARING)


@functools.cache
def folder_of(name: str) -> Path:
    """A folder with tokenizer and configuration in published widths, without weights."""
    source = tiny_realtime.folder() if name in HEARING else tiny.checkpoint(name)
    folder = kit.home() / f"wide-{name}"
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            shutil.copy(file, folder)
    config = json.loads((source / "config.json").read_text())
    if name in DECODERS:
        config |= DECODERS[name]
    elif name in HEARING:
        tower, decoder = HEARING[name]
        config["audio_config"] |= tower
        config["text_config"] |= decoder
    else:
        tower, decoder, rest = SEEING[name]
        config |= rest
        config["vision_config"] |= tower
        config.get("text_config", config).update(decoder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def draw_on_host(name: str, tensor: Tensor, seed: int) -> Tensor:
    """Draws engine/weights/dummy's numbers on the host and in bfloat16, for any device and dtype."""
    few = dummy.draw(name, torch.empty(min(POOL, tensor.numel())), seed).bfloat16()
    if "bias" not in name and tensor.dim() > 1:
        few *= max(1.0, (1.5 / dummy.STD) * (tensor.numel() / tensor.shape[0]) ** -0.5)  # as tests/tiny.py
    if "scalar" in name:
        few += 1.0
    flat = few.repeat(-(-tensor.numel() // len(few)))[: tensor.numel()]
    return tensor.copy_(flat.view(tensor.shape))
