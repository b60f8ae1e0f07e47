"""VisionConfig: the settings of Qwen's vision tower in all its generations, read from config.json.

In: the object `vision_config`. Out: a frozen VisionConfig. Thread: any.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from engine.base.errors import ConfigError
from engine.base.request import Modality
from engine.checkpoint.section import MAX_LAYERS, Section
from engine.kernels.activation import BY_NAME, Activation


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The vision tower of Qwen2-VL, Qwen2.5-VL, Qwen2.5-Omni and Qwen3-VL."""

    modalities: ClassVar[tuple[Modality, ...]] = ("image", "video")

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int  # merge_size x merge_size patches become one row for the decoder
    window_size: int  # side of an attention window in pixels; 0: layers have no windows
    full_layers: frozenset[int]  # layers that attend over the whole frame
    out_hidden_size: int
    rope_theta: float
    joined_qkv: bool  # the checkpoint holds queries, keys and values as one tensor
    layer_norm: bool = False  # LayerNorms, not RMSNorms
    gated_mlp: bool = True
    activation: Activation = Activation.SILU  # the MLP's activation
    patch_bias: bool = False
    position_side: int = 0  # learned positions form a square of this side; 0: there are none
    deep_layers: tuple[int, ...] = ()  # layers after which a merger makes a further part of the rows

    @property
    def row_width(self) -> int:
        return self.out_hidden_size

    @property
    def row_parts(self) -> int:
        return 1 + len(self.deep_layers)


def read_vision(section: Section, joined_qkv: bool = False) -> VisionConfig:
    """The tower's numbers, checked."""
    _activation(section, "silu", ("silu",))
    full = section.items("fullatt_block_indexes", (7, 15, 23, 31))
    config = VisionConfig(
        num_layers=section.integer("depth", 32, least=1, most=MAX_LAYERS),
        hidden_size=section.size("hidden_size"),
        intermediate_size=section.size("intermediate_size"),
        num_heads=section.size("num_heads"),
        in_channels=section.size("in_channels", section.size("in_chans", 3)),
        patch_size=section.size("patch_size", 14),
        temporal_patch_size=section.size("temporal_patch_size", 2),
        merge_size=section.size("spatial_merge_size", 2),
        window_size=section.size("window_size", 112),
        full_layers=frozenset(full),
        out_hidden_size=section.size("out_hidden_size"),
        rope_theta=_theta(section),
        joined_qkv=joined_qkv,
    )
    check(config, section)
    return config


def check(config: VisionConfig, section: Section) -> None:
    """ConfigError if sizes contradict each other."""
    if config.hidden_size % config.num_heads or config.hidden_size // config.num_heads % 4:
        raise ConfigError(
            f"{section.path}: hidden_size={config.hidden_size} over num_heads={config.num_heads} must give heads "
            "of a multiple of 4 (rotary positions along two axes)"
        )
    if 0 < config.window_size < config.patch_size * config.merge_size:
        raise ConfigError(
            f"{section.path}: window_size={config.window_size} pixels must hold a merge block of "
            f"{config.merge_size} x {config.merge_size} patches of {config.patch_size} pixels"
        )
    layers = range(config.num_layers)
    if len(set(config.deep_layers)) < len(config.deep_layers) or not set(config.deep_layers) <= set(layers):
        raise ConfigError(
            f"{section.path}: deepstack_visual_indexes={list(config.deep_layers)} must be different layers of the "
            f"tower's {config.num_layers}, from 0"
        )


def read_vision2(section: Section) -> VisionConfig:
    """Qwen2-VL's tower: LayerNorms, an MLP without gate, no windows; the file's `hidden_size` is the decoder's."""
    width = section.size("embed_dim", 1280)
    config = VisionConfig(
        hidden_size=width,
        intermediate_size=int(width * section.number("mlp_ratio", 4)),
        out_hidden_size=section.size("hidden_size", 3584),  # the 7B's file lacks the key
        activation=_activation(section, "quick_gelu"),
        **_plain(section, 14),
    )
    check(config, section)
    return config


def read_vision3(section: Section) -> VisionConfig:
    """Qwen3-VL's tower: interpolated learned positions, and deepstack."""
    count = section.size("num_position_embeddings", 2304)
    side = math.isqrt(count)
    if side * side != count:
        raise ConfigError(f"{section.path}: num_position_embeddings={count} must be a square")
    config = VisionConfig(
        hidden_size=section.size("hidden_size"),
        intermediate_size=section.size("intermediate_size"),
        out_hidden_size=section.size("out_hidden_size"),
        activation=_activation(section, "gelu_pytorch_tanh"),
        patch_bias=True,
        position_side=side,
        deep_layers=tuple(section.items("deepstack_visual_indexes", (8, 16, 24))),
        **_plain(section, 16),
    )
    check(config, section)
    return config


def _plain(section: Section, patch_size: int) -> dict[str, Any]:
    """The fields that the towers without windows share."""
    depth = section.integer("depth", 32, least=1, most=MAX_LAYERS)
    return {
        "num_layers": depth,
        "num_heads": section.size("num_heads", 16),
        "in_channels": section.size("in_channels", section.size("in_chans", 3)),
        "patch_size": section.size("patch_size", patch_size),
        "temporal_patch_size": section.size("temporal_patch_size", 2),
        "merge_size": section.size("spatial_merge_size", 2),
        "window_size": 0,
        "full_layers": frozenset(range(depth)),
        "rope_theta": _theta(section),
        "joined_qkv": True,
        "layer_norm": True,
        "gated_mlp": False,
    }


def _theta(section: Section) -> float:
    rope = section.section("rope_parameters") if section.values.get("rope_parameters") else section
    return rope.number("rope_theta", 10_000.0)


def _activation(section: Section, default: str, allowed: Collection[str] = tuple(BY_NAME)) -> Activation:
    act = str(section.values.get("hidden_act") or default)
    if act not in allowed:
        named = ", ".join(map(repr, allowed))
        raise ConfigError(f"{section.path}: hidden_act={act!r}; this tower is supported with {named}")
    return BY_NAME[act]
