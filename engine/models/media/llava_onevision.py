"""LLaVA-OneVision: LLaVA-NeXT whose pictures' rows are bounded, and films, whose frames have a fourth of the rows."""

from __future__ import annotations

from dataclasses import replace

from engine.checkpoint.section import Section
from engine.encoders.vit.config import VitConfig
from engine.models.base.family import Family
from engine.models.media import llava_next
from engine.models.media.seeing import seeing, text


def vision(section: Section) -> VitConfig:
    """LLaVA-NeXT's tower; of as many rows, a film takes more memory than a picture."""
    config = llava_next.vision(section)
    return replace(config, modalities=("video", "image"), frame_rows=(-(-config.side // 2)) ** 2)


FAMILY = Family(
    name="LLaVA-OneVision",
    architectures=("LlavaOnevisionForConditionalGeneration",),
    model=seeing,
    text=text,
    towers={"vision": vision},
    processor="onevision:OneVision",
)
