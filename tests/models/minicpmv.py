"""MiniCPM-V 4.5 for the tests: a tiny random checkpoint in the published layout, and its tower's formulas.

After the code in https://huggingface.co/openbmb/MiniCPM-V-4_5, which transformers lacks: modeling_navit_siglip.py
(positions by fractions of the sides), resampler.py (queries, keys with positions, values without them) and
image_processing_minicpmv.py (sizes and slices). The decoder is transformers' Qwen3, the attention of the queries
torch's MultiheadAttention.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from tests import tiny
from tests.models.with_rows import Held, drawn

SIZE, INNER, HEADS, DEPTH, SIDE, PATCH = 72, 100, 2, 3, 7, 14  # of the tower; SIDE: of the square of positions
WIDTH, QUERIES, VIEW, MOST = 256, 5, 56, 9
VISION = {
    "hidden_size": SIZE, "intermediate_size": INNER, "num_attention_heads": HEADS, "num_hidden_layers": DEPTH,
    "image_size": SIDE * PATCH, "patch_size": PATCH, "model_type": "siglip_vision_model",
}  # fmt: skip
TEXT = {
    "vocab_size": tiny.VOCAB_SIZE, "hidden_size": WIDTH, "intermediate_size": 112, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "eos_token_id": tiny.IDS["<|im_end|>"],
    "pad_token_id": tiny.IDS["<|endoftext|>"],
}  # fmt: skip
CONFIG = {
    **TEXT, "architectures": ["MiniCPMV"], "model_type": "minicpmv", "version": 4.5, "vision_config": VISION,
    "query_num": QUERIES, "drop_vision_last_layer": False, "use_image_id": True, "batch_vision_input": True,
    "slice_config": {"max_slice_nums": MOST, "patch_size": PATCH, "model_type": "minicpmv"}, "slice_mode": True,
    "image_token_id": tiny.IDS["<|IMAGE|>"], "torch_dtype": "float32",
    "auto_map": {"AutoModel": "modeling_minicpmv.MiniCPMV"},
}  # fmt: skip
FILES = {
    "image_processor_type": "MiniCPMVImageProcessor", "max_slice_nums": MOST, "scale_resolution": VIEW,
    "patch_size": PATCH, "use_image_id": True, "image_feature_size": QUERIES, "slice_mode": True,
    "norm_mean": [0.5, 0.5, 0.5], "norm_std": [0.5, 0.5, 0.5],
}  # fmt: skip
CHECKPOINTS = {"minicpmv": CONFIG}  # of tests/tiny.py


def shapes() -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of tower and resampler by their published names."""
    modules = {
        "vpm.embeddings.patch_embedding": (SIZE, 3, PATCH, PATCH), "vpm.post_layernorm": (SIZE,),
        "resampler.attn.out_proj": (WIDTH, WIDTH), "resampler.ln_q": (WIDTH,), "resampler.ln_kv": (WIDTH,),
        "resampler.ln_post": (WIDTH,),
    }  # fmt: skip
    for number in range(DEPTH):
        layer = f"vpm.encoder.layers.{number}."
        modules |= {layer + name: (SIZE,) for name in ("layer_norm1", "layer_norm2")}
        modules |= {layer + f"self_attn.{name}_proj": (SIZE, SIZE) for name in ("q", "k", "v", "out")}
        modules |= {layer + "mlp.fc1": (INNER, SIZE), layer + "mlp.fc2": (SIZE, INNER)}
    made: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in modules.items()}
    made |= {f"{name}.bias": shape[:1] for name, shape in modules.items()}
    return made | {
        "vpm.embeddings.position_embedding.weight": (SIDE**2, SIZE), "resampler.query": (QUERIES, WIDTH),
        "resampler.kv_proj.weight": (WIDTH, SIZE), "resampler.attn.in_proj_weight": (3 * WIDTH, WIDTH),
        "resampler.attn.in_proj_bias": (3 * WIDTH,), "resampler.proj": (WIDTH, WIDTH),
    }  # fmt: skip


@functools.cache
def decoder() -> Any:
    """The decoder: transformers' Qwen3 with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return tiny.seeded(Qwen3ForCausalLM, Qwen3Config(**TEXT))


def checkpoint(folder: Path, config: dict[str, Any] = CONFIG) -> Path:
    """Writes a folder in the published layout."""
    folder.mkdir(exist_ok=True)
    held = {f"llm.{name}": tensor.clone() for name, tensor in decoder().state_dict().items()}
    own = drawn(shapes(), 9)
    own["vpm.embeddings.position_embedding.weight"] *= 6
    own["resampler.query"] *= 8
    save_file({**held, **own}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(FILES))
    tiny.write_tokenizer(folder)
    return folder


@torch.inference_mode()
def rows(folder: Path, view: Tensor) -> Tensor:
    """The rows [QUERIES, WIDTH] of one view, normalised pixels [3, height, width]."""
    held = Held(load_file(folder / "model.safetensors"))
    x = summarised(held, view)
    return asked(held, x + waves(view.shape[1] // PATCH, view.shape[2] // PATCH), x)


@torch.inference_mode()
def film_rows(folder: Path, frames: Tensor, moments: Sequence[Sequence[int]]) -> Tensor:
    """The rows [groups * QUERIES, WIDTH] of frames [n, 3, height, width], with the moments of each group's frames."""
    held, found, first = Held(load_file(folder / "model.safetensors")), [], 0
    places = waves(frames.shape[2] // PATCH, frames.shape[3] // PATCH)
    frequency = 10_000.0 ** -(torch.arange(WIDTH // 2) / (WIDTH // 2))
    for group in moments:
        views = [summarised(held, view) for view in frames[first : first + len(group)]]
        times = [torch.cat([(moment * frequency).sin(), (moment * frequency).cos()]) for moment in group]
        keys = torch.cat([view + places + time for view, time in zip(views, times)])
        found.append(asked(held, keys, torch.cat(views)))
        first += len(group)
    return torch.cat(found)


def summarised(held: Held, view: Tensor) -> Tensor:
    """What the queries attend to: [patches, WIDTH]."""
    height, width = view.shape[1] // PATCH, view.shape[2] // PATCH
    kernel = (held.tensors[f"vpm.embeddings.patch_embedding.{kind}"] for kind in ("weight", "bias"))
    x = F.conv2d(view[None], *kernel, stride=PATCH)[0].flatten(1).T
    places = [  # the last of SIDE equal pieces of the side that begins at or before the patch's fraction
        [sum(edge / SIDE <= at / count + 1e-7 for edge in range(1, SIDE)) for at in range(count)]
        for count in (height, width)
    ]
    table = held.tensors["vpm.embeddings.position_embedding.weight"].view(SIDE, SIDE, -1)
    x = x + table[places[0]][:, places[1]].flatten(0, 1)
    for number in range(DEPTH):
        layer = f"vpm.encoder.layers.{number}."
        normed = held.norm(layer + "layer_norm1", x, 1e-6)
        q, k, v = (
            held.product(f"{layer}self_attn.{name}_proj", normed).view(len(x), HEADS, -1).transpose(0, 1)
            for name in "qkv"
        )
        attended = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
        x = x + held.product(layer + "self_attn.out_proj", attended)
        inner = held.product(layer + "mlp.fc1", held.norm(layer + "layer_norm2", x, 1e-6))
        x = x + held.product(layer + "mlp.fc2", F.gelu(inner, approximate="tanh"))
    x = held.norm("vpm.post_layernorm", x, 1e-6)
    return held.norm("resampler.ln_kv", held.product("resampler.kv_proj", x), 1e-6)


def asked(held: Held, keys: Tensor, values: Tensor) -> Tensor:
    """The rows of the queries, [QUERIES, WIDTH]."""
    attention = torch.nn.MultiheadAttention(WIDTH, WIDTH // 128)
    names = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
    attention.load_state_dict({name: held.tensors[f"resampler.attn.{name}"] for name in names})
    query = held.norm("resampler.ln_q", held.tensors["resampler.query"], 1e-6)
    found = attention(query, keys, values)[0]
    return held.norm("resampler.ln_post", found, 1e-6) @ held.tensors["resampler.proj"]


def waves(height: int, width: int) -> Tensor:
    """Sines and cosines of the column, then of the row, [height * width, WIDTH]."""
    quarter = WIDTH // 4
    frequency = [10_000.0 ** -(index / quarter) for index in range(quarter)]
    return torch.tensor(
        [
            [wave(place * each) for place in (column, row) for wave in (math.sin, math.cos) for each in frequency]
            for row in range(height)
            for column in range(width)
        ]
    )


def sampled(total: int, fps: float, wanted: float) -> tuple[list[int], list[list[int]]]:
    """Indices of chosen frames, and moments by group, after the model card's `encode_video`."""
    length, most, most_together = total / fps, 180, 3
    if wanted * int(length) <= most:
        together, count = 1, round(min(wanted, round(fps)) * min(most, length))
    else:
        together = math.ceil(length * wanted / most)
        count = round(length * wanted) if together <= most_together else most * most_together
        together = min(together, most_together)
    gap = total / count
    chosen = [int(number * gap + gap / 2) for number in range(count)]
    scale = np.arange(0, length, 0.1)
    nearest = [scale[np.abs(scale - index / fps).argmin()] for index in chosen]
    moments = (np.array(nearest) / 0.1).astype(np.int32).tolist()
    return chosen, [moments[first : first + together] for first in range(0, count, together)]


def fitted(width: float, height: float, upscale: bool) -> tuple[int, int]:
    if width * height > VIEW * VIEW or upscale:
        ratio = width / height
        height = int(VIEW / math.sqrt(ratio))
        width = int(height * ratio)
    return tuple(max(round(side / PATCH) * PATCH, PATCH) for side in (width, height))


def views_of(image: Image.Image) -> tuple[list[Image.Image], tuple[int, int]]:
    """The view of the whole and the slices, row by row; (columns, rows) of the slices."""
    width, height = image.size
    wanted, best = min(math.ceil(width * height / VIEW**2), MOST), (0, 0)
    if wanted <= 1:
        return [image.resize(fitted(width, height, True), Image.Resampling.BICUBIC)], best
    error = math.inf
    for count in (wanted - 1, wanted, wanted + 1):
        for columns in range(1, count + 1):
            if 1 < count <= MOST and count % columns == 0:
                rows_ = count // columns
                off = abs(math.log(width / height) - math.log(columns / rows_))
                if off < error:
                    best, error = (columns, rows_), off
    columns, rows_ = best
    cell = (max(round(width / columns) * columns, columns) / columns, max(round(height / rows_) * rows_, rows_) / rows_)
    wide, high = fitted(*cell, True)
    large = image.resize((wide * columns, high * rows_), Image.Resampling.BICUBIC)
    boxes = [(j * wide, i * high, (j + 1) * wide, (i + 1) * high) for i in range(rows_) for j in range(columns)]
    whole = image.resize(fitted(width, height, False), Image.Resampling.BICUBIC)
    return [whole, *map(large.crop, boxes)], best
