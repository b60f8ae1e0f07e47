"""LFM2-VL: SigLIP 2 for pictures of any shape, concatenated neighbours, two linear layers, before an LFM2."""

from __future__ import annotations

from dataclasses import replace

from engine.base.model_config import TextConfig
from engine.checkpoint.section import Section
from engine.encoders.vit.config import VitConfig
from engine.models.base.family import Family
from engine.models.media import seeing


def vision(section: Section) -> VitConfig:
    """The tower."""
    outer = seeing.outside(section)
    read = seeing.read_vision(
        section,
        merge=outer.size("downsample_factor", 2),
        norm="layer" if outer.boolean("projector_use_layernorm", True) else "",
        inner_size=outer.size("projector_hidden_size", 2560),
        bias=outer.boolean("projector_bias", True),
    )
    return replace(read, post_norm=True)


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder."""
    return seeing.text(body, outer, tied=outer.boolean("tie_embedding", True))


FAMILY = Family(
    name="LFM2-VL",
    architectures=("Lfm2VlForConditionalGeneration",),
    model=seeing.seeing,
    text=text,
    towers={"vision": vision},
    processor="lfm2_vl:Lfm2Pictures",
)
