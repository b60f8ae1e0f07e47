"""RopeTable: frequencies of one RopeConfig, and the cos/sin of a step's positions (once per step, not per layer).

In: positions [T] or [axes, T]. Out: a Rope, for qkv_rope_store. The formulas of the scaled kinds equal transformers'
(modeling_rope_utils).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from engine.base.model_config import RopeConfig
from engine.kernels.rope import cos_sin


class Rope(NamedTuple):
    """The rotation of a step's positions for one kind of layer."""

    cos: Tensor  # [T, rotary_dim / 2] float32
    sin: Tensor
    query_scale: Tensor | None = None  # [T, 1, 1] float32: factor of the queries


class RopeTable:
    """Frequencies on the device of the model."""

    __slots__ = ("config", "inv_freq", "sections")

    def __init__(self, config: RopeConfig, device: str, context: int) -> None:
        """`context`: the longest served context in tokens."""
        self.config = config
        self.inv_freq = frequencies(config, context).to(device)  # [rotary_dim / 2] float32
        self.sections = config.mrope_section or None

    def __call__(self, positions: Tensor) -> Rope:
        cos, sin = cos_sin(
            positions,
            self.inv_freq,
            self.sections,
            self.config.attention_factor,
            self.config.mrope_turns,
        )
        if not self.config.query_scaling:
            return Rope(cos, sin)
        turns = ((positions + self.config.query_offset) // self.config.original_max_position).to(torch.float32)
        return Rope(cos, sin, (1.0 + self.config.query_scaling * turns.log1p())[:, None, None])


def frequencies(config: RopeConfig, context: int) -> Tensor:
    """Radians per position of each rotated pair, [rotary_dim / 2] float32.

    "dynamic" changes its base only beyond the checkpoint's context, which is never served; up to that length it equals
    "default". "longrope" has different frequencies for contexts up to the original length and for longer contexts.
    Cached keys are shared between requests, so all requests use the frequencies of the longest served context.
    """
    if config.kind == "none":
        return torch.zeros(config.rotary_dim // 2)  # an angle of 0 changes no bit of a head
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    inv_freq = 1.0 / config.theta**exponents
    if config.kind == "proportional":
        inv_freq[config.turning :] = 0.0
        return inv_freq / config.factor
    if config.kind == "linear":
        return inv_freq / config.factor
    if config.kind == "llama3":
        return _llama3(config, inv_freq)
    if config.kind == "yarn":
        return _yarn(config, inv_freq)
    if config.kind == "longrope":
        factors = config.long_factors if context > config.original_max_position else config.short_factors
        return 1.0 / (torch.tensor(factors) * config.theta**exponents)
    return inv_freq


def _llama3(config: RopeConfig, inv_freq: Tensor) -> Tensor:
    """Long wavelengths are stretched by `factor`, short wavelengths are unchanged, wavelengths between are blended."""
    turns = config.original_max_position * inv_freq / (2 * math.pi)  # rotations within the original context
    width = config.high_freq_factor - config.low_freq_factor
    blend = (turns - config.low_freq_factor) / (width or 1e-9)  # Llama 4 has both equal: a step, no ramp
    blend = blend.clamp(0.0, 1.0)
    return (1.0 - blend) * inv_freq / config.factor + blend * inv_freq


def _yarn(config: RopeConfig, inv_freq: Tensor) -> Tensor:
    """High frequencies are unchanged, low frequencies are divided by `factor`, with a linear ramp between."""

    def dimension(rotations: float) -> float:
        """The (fractional) dimension that makes `rotations` turns within the original context."""
        waves = config.original_max_position / (rotations * 2 * math.pi)
        return config.rotary_dim * math.log(waves) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without a division by zero
    pairs = torch.arange(config.rotary_dim // 2, dtype=torch.float32)
    stretched = ((pairs - low) / (high - low)).clamp(0.0, 1.0)
    return inv_freq / config.factor * stretched + inv_freq * (1.0 - stretched)
