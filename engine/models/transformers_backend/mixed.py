"""Media models without a native file whose decoder has one: transformers' towers feed our native decoder.

Thread: device. The decoder is native, including its weight formats and cache. The towers and projectors of the
transformers class are filled and run (class_tower.py); its decoder has no weights and never runs. Conditions: the class
passes its decoder only rows in place of an item's tokens (showing.py), and our decoder takes such rows unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from engine.base.errors import ConfigError
from engine.base.model_config import ModelConfig, TextConfig
from engine.checkpoint.section import Section
from engine.encoders.tower import by_modality
from engine.models.base.decoder import Decoder
from engine.models.base.family import Family
from engine.models.lookup import inner_decoder
from engine.models.media.seeing import decoder_family
from engine.models.transformers_backend import seeing, skeleton
from engine.models.transformers_backend.class_tower import class_towers
from engine.models.transformers_backend.weights import await_all, parts_and_table


def suits(architecture: str, values: Mapping[str, Any]) -> bool:
    """Whether a class of transformers can be served in this way; does not report why not."""
    outer = Section({**values, "architectures": [architecture]}, "config.json")
    try:
        with skeleton.refusing():
            kind = skeleton.config_of(architecture, values).get_text_config(decoder=True).model_type
        if inner_decoder(kind) is None:
            return False
        shape = seeing.shape_of(outer)
        read = text(outer, outer)
    except ConfigError:
        return False
    # A class may treat logits differently from its decoder's own class: Aya Vision does not scale them.
    plain = read.embedding_scale == read.media_scale == read.logit_scale == 1.0 and not read.logit_softcap
    return plain and shape.axes == 1 and shape.stem == "model"


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder's config, read through transformers, whose classes have their own defaults, also for tied
    embeddings."""
    config = seeing.config(outer)
    inside = config.get_text_config(decoder=True)
    tied = bool(getattr(config, "tie_word_embeddings", getattr(inside, "tie_word_embeddings", False)))
    family = decoder_family(inside.to_dict(), body.path)
    whole = Section({**inside.to_dict(), "tie_word_embeddings": tied}, body.path)
    return family.text(whole.renamed(family.keys), whole)


def mixed(config: ModelConfig, dtype: torch.dtype, device: str) -> Decoder:
    """The decoder, with the towers that are needed."""
    inside = skeleton.config_of(config.architecture, config.raw).get_text_config(decoder=True)
    model = decoder_family(inside.to_dict(), "config.json").model(config, dtype, device)
    assert isinstance(model, Decoder)
    kinds = [kind for tower in config.towers.values() for kind in tower.modalities]
    if not kinds:
        return model
    module = seeing.with_towers(config)
    base, decoder, head = module.model, skeleton.decoder_in(module), module.get_output_embeddings()
    ours = tuple(f"{name}." for name, each in module.named_modules() if each is decoder or each is head)
    inner = tuple(f"{name}." for name, each in base.named_children() if each is decoder)
    parts, table = parts_and_table(module)
    theirs = [(row, part) for row, part in zip(table.rows, parts) if not part.target.startswith(ours)]
    await_all([part for _, part in theirs], lambda: skeleton.fill_buffers(module, device))
    model.replaced_parts = SimpleNamespace(**{f"p{number}": part for number, (_, part) in enumerate(theirs)})
    rows = [replace(row, target=f"replaced_parts.p{number}") for number, (row, _) in enumerate(theirs)]
    model.table = replace(
        table,
        rows=(*model.table.rows, *rows),
        prefixes=("model.", "language_model.", *inner, "model."),
        ignore=(*model.table.ignore, *table.ignore),
    )
    model.towers = by_modality(*class_towers(kinds, base, decoder, config, dtype, device))
    return model


FAMILY = Family(
    name="towers of transformers",
    architectures=(),  # transformers lists them
    model=mixed,
    text=text,
    towers=seeing.TOWERS,
    processor=seeing.processor,
    narrowed=seeing.narrowed,
    media_token_ids=seeing.media_token_ids,
)
