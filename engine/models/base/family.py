"""Family: all differences between one family of checkpoints and the others.

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
    """How to read and build checkpoints of one family, and how to process their media."""

    name: str  # the publisher's spelling
    architectures: tuple[str, ...]  # classes in config.json that the family serves; a decoder's first class generates
    model: Callable[[ModelConfig, torch.dtype, str], Model]
    text: Callable[[Section, Section], TextConfig]  # the decoder's section, and the section that holds it
    towers: Mapping[str, Callable[[Section], TowerConfig]] = field(default_factory=dict)  # "vision": of vision_config
    # The media processor, a name in mm/processors/registry; "" for text only. In some families it depends on the
    # towers.
    processor: str | Callable[[Section, Collection[Modality]], str] = ""
    # Makes a tower config for fewer modalities, if no prompt will hold the others; None: towers are not narrowed.
    narrowed: Callable[[Any, tuple[Modality, ...]], TowerConfig] | None = None
    keys: Mapping[str, str] = field(default_factory=dict)  # key of the decoder's section -> Llama's key
    encoder_prefix: Callable[[Section], int] | None = None  # audio rows at the start of each prompt
    # For encoders: the layers of a classification head of a form; None: the family is a decoder.
    head: Callable[[Section, Form], tuple[HeadLayer, ...]] | None = None
    first_position: Callable[[Section], int] = _zero  # unused rows at the start of the position table
    # Which tokens of a prompt attend to later tokens, in a model with towers. In some families the checkpoint decides.
    bidirectional: Bidirectional | Callable[[Section], Bidirectional] = ""
    # Media rows are added to token embeddings, including the answer's, so spans extend beyond the prompt.
    adds_media: bool = False
    # From config.json: the placeholder tokens that templates write for an item, and the tokens around placeholders.
    media_token_ids: Callable[[Section], dict[str, int]] = media_token_ids
    inside: bool = False  # models with towers may contain this decoder; its model_type is the file's name
    section: str = ""  # the object of config.json that describes the model, if a checkpoint holds several models
    # For a family that only makes vectors: (folder, text_config, config.json, --pooler-config) -> PoolingConfig.
    pooling: Callable[[Path, Section, Section, Mapping[str, Any]], PoolingConfig] | None = None

    @property
    def through(self) -> bool:
        """Whether the decoder is a module of transformers; the family's file has the towers."""
        return bool(getattr(self.model, "through", False))

    def bidirectional_in(self, outer: Section, sees: bool) -> Bidirectional:
        """Which tokens of a prompt attend to later tokens; `sees`: whether the model has a tower."""
        if isinstance(self.bidirectional, str):
            return self.bidirectional if sees or self.bidirectional == "prompt" else ""
        return self.bidirectional(outer) if sees else ""

    def towers_of(self, outer: Section, text: TextConfig, without: Collection[str]) -> dict[str, TowerConfig]:
        """The checkpoint's towers, except towers that encode only modalities of `without`."""
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
        """Whether a tower of the checkpoint is not built, or only partly."""
        narrower = self.narrowed is not None and bool(without)
        return narrower or any(
            outer.values.get(f"{name}_config") is not None and name not in towers for name in self.towers
        )
