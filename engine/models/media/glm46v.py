"""GLM-4.6V: the model of GLM-4.1V, or of GLM-4.5V if the decoder has experts; video is sampled differently."""

from __future__ import annotations

from typing import Any

import torch

from engine.base.model_config import ModelConfig, TextConfig
from engine.checkpoint.section import Section
from engine.encoders.glm4v import read_vision
from engine.models.base.family import Family
from engine.models.base.model import Model
from engine.models.media import glm4v, glm4v_moe


def alike(decoder: dict[str, Any]) -> Family:
    """The family with the same decoder: GLM-4.5V or GLM-4.1V."""
    return glm4v_moe.FAMILY if str(decoder.get("model_type")).startswith("glm4v_moe") else glm4v.FAMILY


def model(config: ModelConfig, dtype: torch.dtype, device: str) -> Model:
    """The decoder and the tower."""
    return alike(config.raw["text_config"]).model(config, dtype, device)


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder."""
    return alike(body.values).text(body, outer)


FAMILY = Family(
    name="GLM-4.6V",
    architectures=("Glm46VForConditionalGeneration",),
    model=model,
    text=text,
    towers={"vision": read_vision},
    processor="glm4v:Glm4V",
)
