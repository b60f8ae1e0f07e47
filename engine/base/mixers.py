"""What stands in the place of attention in a decoder's layer: a convolution, a layer with a state, or nothing.

Read from config.json by engine/checkpoint/mixers.py; frozen. States, the decay A and what makes the step dt are
float32, whatever the checkpoint's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ConvolutionConfig:
    """A short convolution along the sequence."""

    conv_l_cache: int  # tokens that it reads, the newest included
    bias: bool = False  # of the convolution and of the products before and behind it


@dataclass(frozen=True, slots=True)
class NoMixer:
    """Nothing: the layer is an MLP, or experts, alone."""


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """A gated delta rule behind a short convolution: a state [key_dim, value_dim] for each value head."""

    key_heads: int
    value_heads: int  # a multiple of key_heads; consecutive value heads share a key head
    key_dim: int
    value_dim: int
    taps: int  # tokens that the convolution reads, the newest included
    eps: float  # of the norm of each head's result
    gate: Literal["silu", "sigmoid"] = "silu"  # of that norm
    # Files have one matrix with the rows of each key head's q, k, v, z, and one with those of its b, a; else four.
    by_key_head: bool = False

    @property
    def key_width(self) -> int:
        """Of the keys, and of the queries, of all heads."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Of the values, and of the gates, of all heads."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class Mamba1Config:
    """Mamba: a state [width, state_size], whose dt, B and C are made of what the convolution leaves."""

    width: int
    state_size: int
    rank: int  # of dt, before the product that makes it as wide as x
    taps: int
    conv_bias: bool = True
    bias: bool = False  # of the products before and behind
    norms: Literal["none", "weights", "bare"] = "none"  # RMSNorms of dt, B and C, with weights or without
    eps: float = 1e-6  # of these


@dataclass(frozen=True, slots=True)
class Mamba2Config:
    """Mamba-2: a state [head_dim, state_size] for each head; B and C are those of its group of heads."""

    heads: int
    head_dim: int
    state_size: int
    groups: int  # a divisor of heads
    taps: int
    conv_bias: bool = True
    bias: bool = False  # of the products before and behind
    # What stands before the product behind: an RMSNorm per group of what the gate multiplied ("behind gate"), or one
    # whose result the gate multiplies ("before gate"), or the gate alone.
    norm: Literal["behind gate", "before gate", "none"] = "behind gate"
    eps: float = 1e-5
    scale_in: float = 1.0  # of what the layer reads
    scale_out: float = 1.0  # of what it adds to the stream
    multipliers: tuple[float, ...] = ()  # of the product's z, x, B, C and dt; (): 1

    @property
    def width(self) -> int:
        """Of z and of x."""
        return self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class BothConfig:
    """Attention, and Mamba-2 that reads the same rows: what both make is added to the stream. Then an MLP."""

    state: Mamba2Config
    attention_in: float = 1.0  # of what attention reads
    keys: float = 1.0
    attention_out: float = 1.0  # of what it adds to the stream
    out_bias: bool = False  # of Mamba-2's product behind; `state.bias` is of the one before
    mlp_gate: float = 1.0  # of the gate, before its activation
    mlp_out: float = 1.0  # of what the MLP adds to the stream


MixerConfig = ConvolutionConfig | NoMixer | DeltaConfig | Mamba1Config | Mamba2Config | BothConfig
WITH_STATE = DeltaConfig | Mamba1Config | Mamba2Config
