"""InternVL in transformers' layout: InternViT, four concatenated neighbours, two linear layers, a Qwen or Llama."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from engine.base.errors import ConfigError
from engine.checkpoint.section import Section
from engine.encoders.vit.config import VitConfig
from engine.models.base.family import Family
from engine.models.media.seeing import outside, read_vision, seeing, text


def vision(section: Section) -> VitConfig:
    """The tower; its class token makes no row."""
    outer = outside(section)
    merge = neighbours(outer)
    given = outer.values.get("vision_feature_select_strategy") or "default"
    if given != "default":
        raise ConfigError(f"{outer.path}: vision_feature_select_strategy={given!r} is supported with 'default'")
    config = read_vision(section, merge=merge, norm="layer", norm_eps=1e-5)
    return replace(config, modalities=("image", "video"))


def neighbours(outer: Section) -> int:
    """Patches along a side of the square that becomes one row."""
    ratio = outer.number("downsample_ratio", 0.5)
    if ratio <= 0 or 1 / ratio != int(1 / ratio):
        raise ConfigError(f"{outer.path}: downsample_ratio={ratio} must be one over a whole number")
    return int(1 / ratio)


FAMILY = Family(
    name="InternVL",
    architectures=("InternVLForConditionalGeneration",),
    model=seeing,
    text=partial(text, tied=True),
    towers={"vision": vision},
    processor="internvl:InternVL",
)
