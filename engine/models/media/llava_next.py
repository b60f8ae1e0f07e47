"""LLaVA-NeXT (1.6): LLaVA that also cuts pictures into tiles, with a learned newline."""

from __future__ import annotations

from dataclasses import replace

from engine.checkpoint.section import Section
from engine.encoders.vit.config import VitConfig
from engine.models.base.family import Family
from engine.models.media import llava
from engine.models.media.seeing import seeing, text


def vision(section: Section) -> VitConfig:
    """LLaVA's tower, and the newline."""
    config = llava.vision(section)
    return replace(config, projector=replace(config.projector, newline=True))


FAMILY = Family(
    name="LLaVA-NeXT",
    architectures=("LlavaNextForConditionalGeneration",),
    model=seeing,
    text=text,
    towers={"vision": vision},
    processor="anyres:AnyRes",
)
