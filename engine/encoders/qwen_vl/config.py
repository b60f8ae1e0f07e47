"""VisionConfig: the numbers of Qwen2.5-VL's vision tower, and how config.json spells them.

In: the object `vision_config`. Out: a frozen VisionConfig. Thread: any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from engine.checkpoint.section import MAX_LAYERS, Section
from engine.errors import ConfigError
from engine.request import Modality


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The vision tower of Qwen2.5-VL and Qwen2.5-Omni."""

    modalities: ClassVar[tuple[Modality, ...]] = ("image", "video")

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
    joined_qkv: bool  # the checkpoint holds queries, keys and values as one tensor

    @property
    def row_width(self) -> int:
        return self.out_hidden_size


def read_vision(section: Section, joined_qkv: bool = False) -> VisionConfig:
    """The tower's numbers, checked."""
    act = section.values.get("hidden_act", "silu")
    if act != "silu":
        raise ConfigError(f"{section.path}: hidden_act={act!r}; this tower is supported with 'silu'")
    rope = section.section("rope_parameters") if section.values.get("rope_parameters") else section
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
        rope_theta=rope.number("rope_theta", 10_000.0),
        joined_qkv=joined_qkv,
    )
    if config.hidden_size % config.num_heads or config.hidden_size // config.num_heads % 4:
        raise ConfigError(
            f"{section.path}: hidden_size={config.hidden_size} over num_heads={config.num_heads} must give heads "
            "of a multiple of 4 (rotary positions along two axes)"
        )
    if config.window_size < config.patch_size * config.merge_size:
        raise ConfigError(
            f"{section.path}: window_size={config.window_size} pixels must hold a merge block of "
            f"{config.merge_size} x {config.merge_size} patches of {config.patch_size} pixels"
        )
    return config
