"""ModelConfig and its parts: one checkpoint's numbers as the engine computes with them.

Made by models/hf.py from config.json; frozen; read everywhere. Nothing is optional that a model computes with, so no
model asks whether a key was there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Frequencies of one kind of layer; fields that a kind does not use keep their neutral value."""

    kind: str  # default, linear, dynamic, llama3, yarn
    theta: float
    rotary_dim: int  # leading dimensions of a head that are rotated; even
    factor: float = 1.0  # linear, llama3, yarn
    original_max_position: int = 0  # llama3, yarn: context before stretching
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 1.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: whole dimensions bound the ramp
    attention_factor: float = 1.0  # yarn: scales cos and sin
    mrope_section: tuple[int, ...] = ()  # frequencies for time, height, width; () = one axis


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What differs from decoder layer to decoder layer."""

    window: int  # tokens that attention sees, the newest included; 0 = all
    rope: RopeConfig


@dataclass(frozen=True, slots=True)
class TextConfig:
    """A decoder with a plain KV cache."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # may differ from hidden_size / num_heads
    norm_eps: float
    attention_bias: bool  # the configuration's wish; a model may always or never have one
    mlp_bias: bool
    tie_embeddings: bool
    layers: tuple[LayerConfig, ...]


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The vision tower of Qwen2.5-VL and Qwen2.5-Omni."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int  # merge_size x merge_size patches become one row for the decoder
    window_size: int  # pixels
    full_layers: frozenset[int]  # layers that attend over the whole frame
    out_hidden_size: int
    rope_theta: float


@dataclass(frozen=True, slots=True)
class AudioConfig:
    """The audio tower of Qwen2.5-Omni (a Whisper encoder in chunks)."""

    num_mel_bins: int
    num_layers: int
    num_heads: int
    hidden_size: int
    intermediate_size: int
    max_positions: int
    n_window: int  # half a chunk, in mel frames
    output_dim: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One checkpoint as the engine sees it."""

    architecture: str
    folder: str
    text: TextConfig
    vision: VisionConfig | None
    audio: AudioConfig | None
    modalities: tuple[str, ...]  # "text" first
    media_token_ids: dict[str, int]  # "image", "video", "audio" and the tokens around them: "vision_start" ...
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    max_position: int  # tokens of context that the checkpoint was made for
    torch_dtype: torch.dtype  # of the weights as saved
    mrope: bool  # positions have three rows (time, height, width)
    position_id_per_seconds: int  # M-RoPE time steps in a second; 0 without time
    generation: dict[str, Any] = field(default_factory=dict)  # sampling defaults of generation_config.json
    raw: dict[str, Any] = field(default_factory=dict, repr=False)
