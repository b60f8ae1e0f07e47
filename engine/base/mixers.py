"""Configurations of layers that replace attention in a decoder: a convolution, a layer with a state, or nothing.

engine/checkpoint/mixers.py reads them from config.json; they are frozen. States, the decay A and the inputs of the time
step dt are float32 for every dtype of a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ConvolutionConfig:
    """A short convolution along the sequence."""

    width: int  # columns of the convolution: as many as the residual stream has, or a rank's part of them
    conv_l_cache: int  # tokens that it reads, the newest included
    bias: bool = False  # the convolution and the products before and after it have biases


@dataclass(frozen=True, slots=True)
class NoMixer:
    """No mixer: the layer has only an MLP or experts."""


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """A gated delta rule after a short convolution: a state [key_dim, value_dim] for each value head."""

    key_heads: int
    value_heads: int  # a multiple of key_heads; consecutive value heads share a key head
    key_dim: int
    value_dim: int
    taps: int  # tokens that the convolution reads, the newest included
    eps: float  # epsilon of the norm of each head's result
    gate: Literal["silu", "sigmoid"] = "silu"  # activation of this norm's gate
    # True: files have two matrices, [q k v z] and [b a], with rows grouped by key head. False: four matrices.
    by_key_head: bool = False

    @property
    def key_width(self) -> int:
        """Columns of the keys of all heads, equal to the columns of the queries."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Columns of the values of all heads, equal to the columns of the gates z."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class Mamba1Config:
    """Mamba: a state [width, state_size]; dt, B and C are computed from the convolution's result."""

    width: int
    state_size: int
    rank: int  # columns of dt before the product that widens dt to `width`
    taps: int
    conv_bias: bool = True
    bias: bool = False  # the input and output products have biases
    norms: Literal["none", "weights", "bare"] = "none"  # RMSNorms of dt, B and C, with weights or without
    eps: float = 1e-6  # epsilon of these norms


@dataclass(frozen=True, slots=True)
class Mamba2Config:
    """Mamba-2: a state [head_dim, state_size] for each head; a group of heads shares B and C."""

    heads: int
    head_dim: int
    state_size: int
    groups: int  # a divisor of heads
    taps: int
    conv_bias: bool = True
    bias: bool = False  # the input and output products have biases
    # Before the output product: gate, then an RMSNorm per group ("behind gate"); an RMSNorm per group, then the gate
    # ("before gate"); or only the gate ("none").
    norm: Literal["behind gate", "before gate", "none"] = "behind gate"
    eps: float = 1e-5
    scale_in: float = 1.0  # factor of the layer's input
    scale_out: float = 1.0  # factor of the layer's result
    multipliers: tuple[float, ...] = ()  # factors of z, x, B, C and dt in the input product; (): all 1

    @property
    def width(self) -> int:
        """Columns of z, equal to the columns of x."""
        return self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class BothConfig:
    """Attention and Mamba-2 in parallel on the same input; both results are added to the stream. Then an MLP."""

    state: Mamba2Config
    attention_in: float = 1.0  # factor of attention's input
    keys: float = 1.0  # factor of attention's keys
    attention_out: float = 1.0  # factor of attention's result
    out_bias: bool = False  # bias of Mamba-2's output product; `state.bias`: of the input product
    mlp_gate: float = 1.0  # factor of the MLP's gate, before the activation
    mlp_out: float = 1.0  # factor of the MLP's result


MixerConfig = ConvolutionConfig | NoMixer | DeltaConfig | Mamba1Config | Mamba2Config | BothConfig
WITH_STATE = DeltaConfig | Mamba1Config | Mamba2Config
