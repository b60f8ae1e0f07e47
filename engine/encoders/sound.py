"""The parts that audio towers share: a layer of Whisper's encoder, unrolled frames, positions, and weight rows.

Thread: device. Most audio towers are Whisper's encoder with other convolutions, positions and projections around
its layers. `rows` is the table of the checkpoint names of these parts; a tower adds the names of its own modules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.activation import gelu
from engine.kernels.attention.dense import dense_attention
from engine.kernels.rotate import apply_rope
from engine.layers.linear import Linear
from engine.layers.norm import LayerNorm
from engine.weights.table import Row

EPS = 1e-5
KERNEL = 3  # frames that each convolution reads
Rotations = tuple[Tensor, Tensor]  # cos, sin, [rows, rotated pairs of a head]


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Names of a layer's modules that differ between families' checkpoints, relative to the layer."""

    attention_norm: str = "self_attn_layer_norm"
    out: str = "self_attn.out_proj"
    mlp_norm: str = "final_layer_norm"
    up: str = "fc1"
    down: str = "fc2"


WHISPER = LayerNames()


def rows(model: str, module: str, names: LayerNames = WHISPER, **modules: str) -> tuple[Row, ...]:
    """Weight rows of the model's attribute `model`, called `module` in checkpoints.

    `modules`: part of the tower -> the module's name relative to `module`.
    """
    layer, target = f"{module}.layers.*.", f"{model}.layers.*."
    attention = layer + "self_attn."
    return (
        *(Row((f"{module}.{name}",), f"{model}.{part}") for part, name in modules.items()),
        Row((layer + names.attention_norm,), target + "attention_norm"),
        Row((attention + "q_proj", attention + "k_proj", attention + "v_proj"), target + "qkv"),
        Row((layer + names.out,), target + "out"),
        Row((layer + names.mlp_norm,), target + "mlp_norm"),
        Row((layer + names.up,), target + "fc1"),
        Row((layer + names.down,), target + "fc2"),
    )


class AudioLayer:
    """A layer of Whisper's encoder; Whisper's keys have no bias."""

    __slots__ = ("attention_norm", "fc1", "fc2", "head_dim", "mlp_norm", "num_heads", "out", "qkv")

    def __init__(self, size: int, num_heads: int, width: int, key_bias: bool = False) -> None:
        self.num_heads = num_heads
        self.head_dim = size // num_heads
        self.attention_norm = LayerNorm(size, EPS)
        self.mlp_norm = LayerNorm(size, EPS)
        self.qkv = Linear(size, size, size, size, bias=(True, key_bias, True))
        self.out = Linear(size, size, bias=True)
        self.fc1 = Linear(size, width, bias=True)
        self.fc2 = Linear(width, size, bias=True)

    def __call__(self, x: Tensor, bounds: Tensor, turn: Rotations | None = None) -> None:
        """Adds to x [rows, hidden], segment after segment; `turn`: the rotation of queries and keys."""
        heads = self.qkv(self.attention_norm(x)).view(x.shape[0], 3 * self.num_heads, self.head_dim)
        both, v = heads[:, : 2 * self.num_heads], heads[:, 2 * self.num_heads :]
        if turn is not None:
            both = apply_rope(both, *turn)
        q, k = both[:, : self.num_heads], both[:, self.num_heads :]
        self.out.add_to(x, dense_attention(q, k, v, bounds, self.head_dim**-0.5))
        self.fc2.add_to(x, gelu(self.fc1(self.mlp_norm(x))))


def unroll(x: Tensor, stride: int) -> Tensor:
    """[count, length, channels] -> [count, ceil(length / stride), channels * KERNEL], with a zero row at either end."""
    padded = functional.pad(x, (0, 0, 1, 1))
    windows = padded.unfold(1, KERNEL, stride)  # [count, out, channels, KERNEL], a view
    return windows.reshape(*windows.shape[:2], -1)


def sinusoids(length: int, channels: int) -> Tensor:
    """Whisper's positions, [length, channels] float32: sines in the first half of the channels, cosines in the
    second."""
    step = math.log(10_000) / (channels // 2 - 1)
    rates = torch.exp(-step * torch.arange(channels // 2, dtype=torch.float32))
    angles = torch.arange(length)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)
