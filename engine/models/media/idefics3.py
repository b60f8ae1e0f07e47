"""Idefics3 and SmolVLM: SigLIP, concatenated neighbours, a linear layer, before a Llama."""

from __future__ import annotations

from engine.checkpoint.section import Section
from engine.encoders.vit.config import VitConfig
from engine.models.base.family import Family
from engine.models.media.seeing import outside, read_vision, seeing, text


def vision(section: Section) -> VitConfig:
    """The tower's config; in released files the tower's model_type may be the model's."""
    kind = {"idefics3_vision": "idefics3", "smolvlm_vision": "idefics3", "smolvlm": "idefics3"}
    given = str(section.values.get("model_type") or "idefics3")
    named = Section({**section.values, "model_type": kind.get(given, given)}, section.path, section.outer)
    return read_vision(named, merge=outside(section).size("scale_factor", 2), products=1, bias=False)


FAMILY = Family(
    name="Idefics3, SmolVLM",
    architectures=("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
    model=seeing,
    text=text,
    towers={"vision": vision},
    processor="idefics3:Idefics3",
)
