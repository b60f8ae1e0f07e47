"""Family: everything by which one family of checkpoints differs from the others.

A model file ends with its `FAMILY`, which lists the architectures that it serves (engine/models/lookup.py finds the
file by its name). Nothing else in the engine, in the server or in mm knows a family. Thread: any; frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine.base.bidirectional import Bidirectional
from engine.base.errors import ConfigError
from engine.base.model_config import HeadLayer, ModelConfig, PoolingConfig, TextConfig, TowerConfig
from engine.base.request import Modality
from engine.checkpoint.config import media_token_ids
from engine.checkpoint.pooling import Form
from engine.checkpoint.section import Section
from engine.models.base.model import Model


def _zero(body: Section) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class Family:
    """How checkpoints of one family are read, built and given media."""

    name: str  # as its makers write it
    architectures: tuple[str, ...]  # classes in config.json that it serves; of a decoder the first one generates
    model: Callable[[ModelConfig, torch.dtype, str], Model]
    text: Callable[[Section, Section], TextConfig]  # the decoder's section, and the section that holds it
    towers: Mapping[str, Callable[[Section], TowerConfig]] = field(default_factory=dict)  # "vision": of vision_config
    # Of media, as mm/processors/registry names it; "" for text only. Of some families the towers decide.
    processor: str | Callable[[Section, Collection[Modality]], str] = ""
    # A tower for fewer kinds than it reads, where it is built without those that no prompt will hold; None: it is not.
    narrowed: Callable[[Any, tuple[Modality, ...]], TowerConfig] | None = None
    keys: Mapping[str, str] = field(default_factory=dict)  # of the decoder's section -> Llama's word for the same
    encoder_prefix: Callable[[Section], int] | None = None  # rows of sound that begin each prompt; no section
    # Of encoders, whose tokens attend to all others: the layers of a classifier of this form; None: a decoder.
    head: Callable[[Section, Form], tuple[HeadLayer, ...]] | None = None
    first_position: Callable[[Section], int] = _zero  # positions of the table that no token has
    # Which tokens of a prompt see later ones, where the model sees. In some families the checkpoint decides.
    bidirectional: Bidirectional | Callable[[Section], Bidirectional] = ""
    # Rows of media are added to the embeddings of tokens, those of the answer included: spans go on behind the prompt.
    adds_media: bool = False
    # Of config.json: the tokens that templates write where an item stands, and those around them.
    media_token_ids: Callable[[Section], dict[str, int]] = media_token_ids
    inside: bool = False  # a decoder that models with towers have inside, where its model_type is the file's name
    section: str = ""  # the object of config.json that describes the model, where a checkpoint has several models
    # Of a family that only makes vectors: the folder, text_config, config.json, --pooler-config -> what it pools.
    pooling: Callable[[Path, Section, Section, Mapping[str, Any]], PoolingConfig] | None = None

    def bidirectional_in(self, outer: Section, sees: bool) -> Bidirectional:
        """Which tokens of a prompt see later ones; `sees`: whether the model has a tower."""
        if isinstance(self.bidirectional, str):
            return self.bidirectional if sees or self.bidirectional == "prompt" else ""
        return self.bidirectional(outer) if sees else ""

    def towers_of(self, outer: Section, text: TextConfig, without: Collection[str]) -> dict[str, TowerConfig]:
        """The towers that this checkpoint has, but for those that would encode only what no prompt will hold."""
        towers: dict[str, TowerConfig] = {}
        for name, read in self.towers.items():
            key = f"{name}_config" if outer.values.get(f"{name}_config") is not None else name
            if outer.values.get(key) is not None or self.encoder_prefix is not None:
                tower = read(outer.section(key) if self.encoder_prefix is None else outer)
                if tower.row_width != text.hidden_size:
                    raise ConfigError(
                        f"config.json: {key} makes rows of {tower.row_width} numbers; the decoder's "
                        f"hidden_size={text.hidden_size} is needed"
                    )
                kinds = tuple(kind for kind in tower.modalities if kind not in without)
                if kinds:
                    towers[name] = tower if self.narrowed is None else self.narrowed(tower, kinds)
        return towers

    def leaves_out(self, outer: Section, towers: Mapping[str, TowerConfig], without: Collection[str]) -> bool:
        """Whether a tower that the checkpoint has is not built, or not all of it."""
        narrower = self.narrowed is not None and bool(without)
        return narrower or any(
            outer.values.get(f"{name}_config") is not None and name not in towers for name in self.towers
        )
