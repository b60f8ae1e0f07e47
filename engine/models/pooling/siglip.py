"""SigLIP, and SigLIP 2 with a fixed picture size: a bidirectional text body of 64 tokens, read at the last token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.base.errors import ConfigError
from engine.base.model_config import HeadLayer, PoolingConfig
from engine.checkpoint.section import Section
from engine.encoders.vit.config import VitConfig
from engine.encoders.vit.single import AttendedRow
from engine.models.base.family import Family
from engine.models.pooling.two_towers import KEYS, TwoTowers, text_of, token_of, vectors
from engine.models.pooling.two_towers import vision as vision_of
from engine.weights.table import Row

HEAD = "vision_model.head"
PAD = 1  # padding token if the tokenizer names none


class Siglip(TwoTowers):
    """Texts are padded as in training, and tokens attend to the padding too."""

    ENDING = AttendedRow
    ENDING_ROWS = (
        Row(("vision_model.post_layernorm",), "vision.projector.post_norm"),
        Row((HEAD,), "vision.projector.probe"),
        Row((HEAD + ".attention",), "vision.projector.attention"),
        Row((HEAD + ".attention.out_proj",), "vision.projector.out"),
        Row((HEAD + ".layernorm",), "vision.projector.norm"),
        Row((HEAD + ".mlp.fc1",), "vision.projector.up"),
        Row((HEAD + ".mlp.fc2",), "vision.projector.down"),
    )


def vision(section: Section) -> VitConfig:
    """The tower."""
    if not section.boolean("vision_use_head", True):
        raise ConfigError(f"{section.path}: vision_use_head=false; vectors of pictures need the head")
    return vision_of(section, vision_of(section, 1).hidden_size)


def pooling(folder: Path, body: Section, outer: Section, given: Mapping[str, Any]) -> PoolingConfig:
    """The pooling config; texts are padded to all positions."""
    hidden, length = body.size("hidden_size"), body.size("max_position_embeddings")
    layer = HeadLayer("text_model.head", hidden, body.size("projection_size", hidden), bias=True)
    pad = token_of(folder, "pad_token", PAD)
    shape = {"text_len": length, "pad_token": pad, "lower_case": True}  # SigLIP 2's files do not name lower_case
    return vectors(given, layer, length, bidirectional=True, **shape)


FAMILY = Family(
    name="SigLIP",
    architectures=("SiglipModel",),
    model=Siglip,
    text=text_of(causal=False, activation="gelu_pytorch_tanh", eps=1e-6),
    towers={"vision": vision},
    processor="towers:TowerPictures",
    keys=KEYS,
    media_token_ids=lambda outer: {},
    pooling=pooling,
)
