"""Reads and builds models that combine a plain vision transformer with a decoder of another family.

Thread: device. The model_type in the decoder's section of config.json names the decoder's family. The tower
(engine/encoders/vit) runs once per picture, and forward replaces the placeholders' embeddings by the tower's rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from engine.base.errors import ConfigError
from engine.base.model_config import ModelConfig, TextConfig
from engine.checkpoint.section import Section
from engine.checkpoint.text import complete
from engine.encoders.tower import by_modality
from engine.encoders.vit.config import ProjectorConfig, VitConfig, read_vit
from engine.encoders.vit.names import PREFIXES, with_tower
from engine.encoders.vit.tower import VitTower
from engine.kernels.activation import BY_NAME
from engine.models.base.decoder import Decoder
from engine.models.base.family import Family
from engine.models.lookup import inner_decoder, inner_decoders


def seeing(config: ModelConfig, dtype: torch.dtype, device: str) -> Decoder:
    """The decoder, with the tower unless it is left out."""
    model = decoder_family(config.raw["text_config"], "config.json").model(config, dtype, device)
    assert isinstance(model, Decoder)
    vision = config.towers.get("vision")
    model.table = replace(model.table, prefixes=PREFIXES)
    if isinstance(vision, VitConfig):
        model.vision = VitTower(vision, dtype, device)
        model.towers = by_modality(model.vision)
        model.table = with_tower(model.table, vision)
    return model


def text(body: Section, outer: Section, tied: bool = False) -> TextConfig:
    """The decoder's config, read by its own family; `tied`: default of tie_word_embeddings."""
    family = decoder_family(body.values, body.path)
    said = [section.values.get("tie_word_embeddings") for section in (outer, body)]
    ties = any(said) if any(value is not None for value in said) else tied
    outer = Section({**outer.values, "tie_word_embeddings": ties}, outer.path)
    return family.text(body.renamed(family.keys), outer)


def decoder_family(values: dict[str, Any], path: str) -> Family:
    """The family of a decoder's section."""
    kind = str(values.get("model_type") or "llama")
    family = inner_decoder(kind)
    if family is None:
        known = ", ".join(inner_decoders())
        raise ConfigError(f"{path}: model_type={kind!r} is not supported here; supported are {known}")
    return family


def read_vision(section: Section, feature_layer: int = -1, **projector: Any) -> VitConfig:
    """The config of a tower with a projector of two linear layers; `projector`: fields that differ from LLaVA's."""
    outer = outside(section)
    layer = outer.integer("vision_feature_layer", feature_layer, least=-(2**31))
    act = str(outer.values.get("projector_hidden_act") or "gelu")
    if act not in BY_NAME:
        raise ConfigError(f"{outer.path}: projector_hidden_act={act!r}; supported are {', '.join(BY_NAME)}")
    hidden = complete(outer.section("text_config")).size("hidden_size")
    fields = {"out_size": hidden, "activation": BY_NAME[act], **projector}
    return read_vit(section, ProjectorConfig(**fields), layer)


def outside(section: Section) -> Section:
    """The object around a tower's section."""
    assert section.outer is not None, "a tower's section lies in another one"
    return section.outer
