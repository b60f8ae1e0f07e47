"""LLaVA-OneVision: LLaVA-NeXT with a bound on a picture's rows, and video, whose frames have a fourth of the rows."""

from __future__ import annotations

from dataclasses import replace

from engine.checkpoint.section import Section
from engine.encoders.vit.config import VitConfig
from engine.models.base.family import Family
from engine.models.media import llava_next
from engine.models.media.seeing import seeing, text


def vision(section: Section) -> VitConfig:
    """LLaVA-NeXT's tower config; "video" comes first, because a video takes more memory per row than a picture."""
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
