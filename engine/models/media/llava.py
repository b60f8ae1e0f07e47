"""LLaVA: CLIP without its last layer, SigLIP or Pixtral's tower, two linear layers, before a Llama, Mistral or
Qwen2."""

from __future__ import annotations

from collections.abc import Collection

from engine.base.errors import ConfigError
from engine.base.request import Modality
from engine.checkpoint.section import Section
from engine.encoders.vit.config import VitConfig
from engine.models.base.family import Family
from engine.models.media.seeing import outside, read_vision, seeing, text


def vision(section: Section) -> VitConfig:
    """The tower; its class token makes no row."""
    outer = outside(section)
    layer = -1 if outer.values.get("model_type") == "llava_onevision" else -2  # the default
    config = read_vision(section, feature_layer=layer, bias=outer.boolean("multimodal_projector_bias", True))
    wanted = "default" if config.class_token else "full"
    given = outer.values.get("vision_feature_select_strategy") or wanted
    if given != wanted:
        raise ConfigError(
            f"{outer.path}: vision_feature_select_strategy={given!r}; with {config.kind} it is supported as {wanted!r}"
        )
    return config


def processor(outer: Section, kinds: Collection[Modality]) -> str:
    """Pixtral's processor for its tower, because pictures differ in size and have end-of-line rows; else LLaVA's."""
    sees = outer.values.get("vision_config") or {}
    return "pixtral:Pixtral" if sees.get("model_type") == "pixtral" else "llava:Llava"


FAMILY = Family(
    name="LLaVA",
    architectures=("LlavaForConditionalGeneration",),
    model=seeing,
    text=text,
    towers={"vision": vision},
    processor=processor,
)
