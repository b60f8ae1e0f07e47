"""Whisper's cross-attention weights for a finished text, from which word timestamps are computed.

Thread: device, on the executor's stream, between two steps. In: a window's features, and its prompt and text. Out: the
weights of the alignment heads. The text is known, so all its tokens pass the decoder at once, without the KV cache.
Layers after the last alignment head do not run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.base.errors import RequestError
from engine.kernels.activation import gelu
from engine.models.base.model import Model
from engine.models.media.whisper import Whisper
from engine.models.media.whisper_layer import WhisperLayer

LayerHead = tuple[int, int]


@torch.inference_mode()
def sound_attention(
    model: Model, features: Mapping[str, np.ndarray], token_ids: Sequence[int], heads: Sequence[LayerHead]
) -> np.ndarray:
    """float32 [heads, tokens, rows of a window]: the attention weight of each row for each input token."""
    if not isinstance(model, Whisper):
        raise RequestError("times of words need a model with cross-attention; this one has none")
    text, most = model.config.text, model.positions.num_positions
    if not heads or not all(0 <= layer < len(model.layers) and 0 <= head < text.num_heads for layer, head in heads):
        raise RequestError(
            f"alignment_heads={list(heads)}: pairs of one of {len(model.layers)} layers and one of {text.num_heads} "
            "heads are needed"
        )
    ids = torch.tensor(token_ids[:most], device=model.device)
    given = {name: torch.from_numpy(value) for name, value in features.items()}
    sound = model.audio.encode(given)[: model.audio.config.num_positions]
    x = model.embed(ids) + model.positions(torch.arange(len(ids), device=model.device))
    found: dict[LayerHead, Tensor] = {}
    for number in range(max(layer for layer, _ in heads) + 1):
        wanted = sorted({head for layer, head in heads if layer == number})
        weights = _pass(model.layers[number], x, sound, wanted)
        found.update({(number, head): line for head, line in zip(wanted, weights)})
    return torch.stack([found[pair] for pair in heads]).cpu().numpy()


def _pass(layer: WhisperLayer, x: Tensor, sound: Tensor, wanted: list[int]) -> Tensor:
    """Adds a layer to x [tokens, hidden]; returns the weights of these heads, float32 [len(wanted), tokens, rows]."""
    heads, dim = layer.num_heads, layer.head_dim
    q, k, v = layer.qkv(layer.self_norm(x)).view(len(x), 3, heads, dim).permute(1, 2, 0, 3)  # [heads, tokens, dim]
    layer.out.add_to(x, _joined(functional.scaled_dot_product_attention(q, k, v, is_causal=True)))
    q = layer.cross_q(layer.cross_norm(x)).view(len(x), heads, dim).transpose(0, 1)
    k, v = layer.cross_kv(sound).view(len(sound), 2, heads, dim).permute(1, 2, 0, 3)
    layer.cross_out.add_to(x, _joined(functional.scaled_dot_product_attention(q, k, v)))
    layer.fc2.add_to(x, gelu(layer.fc1(layer.mlp_norm(x))))
    scores = q[wanted].float() @ k[wanted].float().transpose(1, 2) * dim**-0.5
    return scores.softmax(-1)


def _joined(attended: Tensor) -> Tensor:
    """[heads, tokens, dim] -> [tokens, heads * dim]."""
    return attended.transpose(0, 1).flatten(1)
