"""HunyuanOCR (HunYuanVL): HunYuan dense with four position axes, and a vision tower (engine/encoders).

A head's pairs are divided into sections. Each section is rotated by one position axis: the token's place in the
prompt, or in pictures column, line and number of the picture. Both dimensions of a pair use the same axis, as in the
published code and in vLLM's XDRotaryEmbedding. transformers (5.13 to 5.23) divides a head's dimensions instead, so the
halves of a pair use different axes (https://github.com/huggingface/transformers/pull/46417); its results differ for
prompts with pictures.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from engine.base.errors import ConfigError
from engine.base.model_config import ModelConfig, TextConfig
from engine.checkpoint.rope import RopeDefaults
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text
from engine.encoders.hunyuan_vl import ROWS, UNREAD, HunYuanVisionConfig, HunYuanVisionTower, read_vision
from engine.encoders.tower import by_modality
from engine.models.base.family import Family
from engine.models.text.hunyuan_v1_dense import HunYuanDense

ROPE = RopeDefaults(axes=(3, 4))


class HunYuanVL(HunYuanDense):
    """Text and pictures in; text out."""

    WEIGHTS = replace(
        HunYuanDense.WEIGHTS, rows=(*HunYuanDense.WEIGHTS.rows, *ROWS), ignore=(*HunYuanDense.WEIGHTS.ignore, *UNREAD)
    )

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        vision = config.towers.get("vision")
        self.vision = HunYuanVisionTower(vision, dtype, device) if isinstance(vision, HunYuanVisionConfig) else None
        self.towers = by_modality(self.vision)


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder's config; released files use the names xdrope_section for the sections and xdrope for the type."""
    values = {**body.values, **{key: _renamed(body.values.get(key)) for key in ("rope_parameters", "rope_scaling")}}
    read = read_text(Section(values, body.path), outer, rope=ROPE, eps=1e-5, qk_norm="head after rotation", tied=True)
    if read.layers[0].rope.axes == 1:
        raise ConfigError(f"{body.path}: mrope_section (or xdrope_section) is missing among the rope settings")
    return read


def _renamed(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    kind = given.get("rope_type") or given.get("type")
    sections = given.get("mrope_section") or given.get("xdrope_section")
    return {**given, "rope_type": "dynamic" if kind == "xdrope" else kind, "mrope_section": sections}


FAMILY = Family(
    name="HunyuanOCR",
    architectures=("HunYuanVLForConditionalGeneration",),
    model=HunYuanVL,
    text=text,
    towers={"vision": read_vision},
    processor="hunyuan_vl:HunYuanVL",
    keys={"attention_head_dim": "head_dim"},
)
