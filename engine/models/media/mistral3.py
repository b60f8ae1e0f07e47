"""Mistral 3 (Small 3.1, Magistral, Devstral, Ministral 3): Pixtral's tower, neighbours merged, before a Mistral."""

from __future__ import annotations

from engine.checkpoint.section import Section
from engine.checkpoint.text import complete
from engine.encoders.vit.config import VitConfig
from engine.models.base.family import Family
from engine.models.media.seeing import outside, read_vision, seeing, text


def vision(section: Section) -> VitConfig:
    """The tower."""
    outer = outside(section)
    body = complete(outer.section("text_config"))
    return read_vision(
        section,
        merge=outer.size("spatial_merge_size", 2),
        channels_first=True,
        norm="rms",
        norm_eps=body.number("rms_norm_eps", 1e-5 if body.values.get("model_type") == "ministral3" else 1e-6),
        reduces=True,
        bias=outer.boolean("multimodal_projector_bias", False),
    )


FAMILY = Family(
    name="Mistral 3",
    architectures=("Mistral3ForConditionalGeneration",),
    model=seeing,
    text=text,
    towers={"vision": vision},
    processor="pixtral:Pixtral",
)
