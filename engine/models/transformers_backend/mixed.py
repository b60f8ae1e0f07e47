"""Models that take media and have no file here, but whose decoder has one: it reads what transformers' towers make.

Thread: device. The decoder is ours in all, its forms of weights and of the cache too. Of the class of transformers its
towers and projectors are filled and run (class_tower.py); its decoder stays without weights and is never run. Served so
where the class gives its decoder rows in the places of an item's tokens and nothing else (showing.py), and where our
decoder takes such rows as they are.
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
    """Whether a class can be served so, which transformers knows; what is wrong with it is said elsewhere."""
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
    # What a class does with the head's result is its own: Aya Vision does not scale as its decoder's class does.
    plain = read.embedding_scale == read.media_scale == read.logit_scale == 1.0 and not read.logit_softcap
    return plain and shape.axes == 1 and shape.stem == "model"


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder, by what transformers makes of config.json: classes have defaults of their own, also for ties."""
    config = seeing.config(outer)
    inside = config.get_text_config(decoder=True)
    tied = bool(getattr(config, "tie_word_embeddings", getattr(inside, "tie_word_embeddings", False)))
    family = decoder_family(inside.to_dict(), body.path)
    whole = Section({**inside.to_dict(), "tie_word_embeddings": tied}, body.path)
    return family.text(whole.renamed(family.keys), whole)


def mixed(config: ModelConfig, dtype: torch.dtype, device: str) -> Decoder:
    """The decoder, and the towers where they are wanted."""
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
    architectures=(),  # of transformers, which knows them
    model=mixed,
    text=text,
    towers=seeing.TOWERS,
    processor=seeing.processor,
    narrowed=seeing.narrowed,
    media_token_ids=seeing.media_token_ids,
)
