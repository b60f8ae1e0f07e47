"""CLIP: a causal text body read at the end token, a vision transformer read at the class token, two projections."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.base.model_config import HeadLayer, PoolingConfig
from engine.checkpoint.section import Section
from engine.encoders.vit.config import VitConfig
from engine.encoders.vit.single import ClassRow
from engine.models.base.family import Family
from engine.models.media.seeing import outside
from engine.models.pooling.two_towers import KEYS, TwoTowers, text_of, token_of, vectors
from engine.models.pooling.two_towers import vision as vision_of
from engine.weights.table import Row

USUAL = 512  # default width of a vector


class Clip(TwoTowers):
    """Reads a text at its first end-of-text token, which the tokenizer appends."""

    ENDING = ClassRow
    ENDING_ROWS = (
        Row(("vision_model.post_layernorm",), "vision.projector.norm"),
        Row(("visual_projection",), "vision.projector.projection"),
    )


def vision(section: Section) -> VitConfig:
    """The tower."""
    return vision_of(section, outside(section).size("projection_dim", USUAL))


def pooling(folder: Path, body: Section, outer: Section, given: Mapping[str, Any]) -> PoolingConfig:
    """The pooling config. Early files have eos_token_id 2 and mean the highest id of the vocabulary."""
    highest = body.size("vocab_size") - 1
    said = body.values.get("eos_token_id")
    end = highest if said in (None, 2) else body.integer("eos_token_id")
    layer = HeadLayer("text_projection", body.size("hidden_size"), outer.size("projection_dim", USUAL))
    most = body.size("max_position_embeddings")
    return vectors(given, layer, most, end_token=token_of(folder, "eos_token", end))


FAMILY = Family(
    name="CLIP",
    architectures=("CLIPModel",),
    model=Clip,
    text=text_of(causal=True, activation="quick_gelu", eps=1e-5),
    towers={"vision": vision},
    processor="towers:TowerPictures",
    keys=KEYS,
    media_token_ids=lambda outer: {},
    pooling=pooling,
)
