"""PaliGemma and PaliGemma 2: SigLIP and a linear layer, before Gemma or Gemma 2.

All tokens of a prompt see each other, whatever a layer's window; tokens of the answer see earlier tokens only.
"""

from __future__ import annotations

from dataclasses import replace

from engine.base.model_config import TextConfig
from engine.checkpoint.section import Section
from engine.encoders.vit.config import VitConfig
from engine.models.base.family import Family
from engine.models.media.seeing import read_vision, seeing
from engine.models.media.seeing import text as seeing_text


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder's config. use_bidirectional_attention of newer files is dropped: it only means bidirectional
    prompts."""
    values = {key: value for key, value in body.values.items() if key != "use_bidirectional_attention"}
    return seeing_text(Section(values, body.path, body.outer), outer, tied=True)


def vision(section: Section) -> VitConfig:
    """The tower."""
    config = read_vision(section, products=1, outer_name="multi_modal_projector.linear")
    return replace(config, post_norm=True)


FAMILY = Family(
    name="PaliGemma",
    architectures=("PaliGemmaForConditionalGeneration",),
    model=seeing,
    text=text,
    towers={"vision": vision},
    processor="gemma:PaliGemma",
    bidirectional="prompt",
)
