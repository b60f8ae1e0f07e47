"""Reads a checkpoint's configuration, and builds the model that it describes.

In: a folder in Hugging Face or Mistral format. Out: a ModelConfig, and a Model without weights (engine/weights/load
fills it). engine/models/lookup.py finds the architecture's family. Thread: any. Code named by `auto_map` is never
imported; it is logged and ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch

from engine.base.errors import ConfigError
from engine.base.model_config import ModelConfig, TextConfig
from engine.base.request import Modality
from engine.checkpoint import config as common
from engine.checkpoint.experts import one_by_one
from engine.checkpoint.files import read_json, read_root
from engine.checkpoint.pooling import Body, Form, read_pooling
from engine.checkpoint.pooling_modules import is_lexical
from engine.checkpoint.rope import max_position
from engine.checkpoint.section import Section
from engine.checkpoint.text import complete
from engine.models.base.both_ways import attends_both_ways, pooled_text, sees_all
from engine.models.base.family import Family
from engine.models.base.model import Model
from engine.models.implementation import implementation_of
from engine.models.lookup import family_of
from engine.quant.assign import assign
from engine.quant.online import ONLINE
from engine.quant.settings import refuse_quantized, with_quantisation
from engine.weights.files import Shard

log = logging.getLogger(__name__)
MODALITIES = get_args(Modality)


def load_model_config(
    folder: str | Path,
    overrides: Mapping[str, Any] | None = None,
    without: Collection[str] = (),
    implementation: str = "auto",
    runner: str = "auto",
    pooler: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """Reads and checks the configuration of a checkpoint; ConfigError in one line if it cannot be served.

    `overrides`: override values of config.json. `without`: modalities that no prompt will hold. `implementation`:
    native, transformers, or auto: native if there is a native file. `runner`: auto, generate or pooling. `pooler`: the
    value of --pooler-config.
    """
    folder = Path(folder)
    text_only = set(MODALITIES) <= set(without)
    root = with_quantisation(read_root(folder, overrides, text_only), folder)
    generation = read_json(folder / "generation_config.json", required=False)
    architecture, form, implementation = implementation_of(root, text_only, implementation)
    if "auto_map" in root.values:
        log.warning("%s names code to import (auto_map); it is ignored", folder / "config.json")
    refuse_quantized(root)
    family = family_of(architecture, implementation)
    outer = root.section(family.section) if family.section in root.values else root
    body = complete(outer.section("text_config")) if "text_config" in outer.values else outer
    body = body.renamed(family.keys)
    encoder_prefix = family.encoder_prefix(outer) if family.encoder_prefix is not None else 0
    with _named(architecture):
        text = family.text(body, outer)
        towers = {} if text_only else family.towers_of(outer, text, without)
        under = _under(family, folder, root, body, form, text.hidden_size, pooler or {})
        pooling = read_pooling(folder, root, under, runner, pooler or {})
        if pooling is not None:
            text = pooled_text(text, pooling, towers, encoder_prefix, implementation)
        elif attends_both_ways(body) and family.bidirectional != "prompt":
            raise ConfigError("use_bidirectional_attention=true: this model cannot generate; --runner pooling")
    taken = {modality for tower in towers.values() for modality in tower.modalities}
    ids = family.media_token_ids(outer).items()
    return ModelConfig(
        architecture=architecture,
        implementation=implementation,
        folder=str(folder),
        text=text,
        towers=towers,
        processor=family.processor if isinstance(family.processor, str) else family.processor(outer, taken),
        media_token_ids={name: token for name, token in ids if name in taken or name not in MODALITIES},
        eos_token_ids=common.drawable(
            common.eos_token_ids(generation, root.values, outer.values, body.values), text.vocab_size
        ),
        max_position=encoder_prefix + longest_of(body, text) - family.first_position(body),
        torch_dtype=common.saved_dtype(root.values, outer.values, body.values),
        generation=common.generation_defaults(generation),
        raw=root.values,
        encoder_prefix=encoder_prefix,
        bidirectional=family.bidirectional_in(outer, bool(towers)),
        adds_media=family.adds_media and bool(towers),
        left_out=text_only or family.leaves_out(outer, towers, without),
        pooling=pooling,
        is_encoder=family.head is not None,
    )


def _under(
    family: Family, folder: Path, root: Section, body: Section, form: Form, hidden_size: int, pooler: Mapping[str, Any]
) -> Body:
    """Properties of the model below the pooling layers."""
    form = "lexical" if family.head and is_lexical(folder) else form
    head = family.head(body, form) if family.head else ()
    own = family.pooling and family.pooling(folder, body, root, pooler)
    return Body(hidden_size, form, family.head is not None, sees_all(family, root, body), head, own)


@contextmanager
def _named(architecture: str) -> Iterator[None]:
    """Prefixes a ConfigError with the architecture's name, because another architecture may support the refused
    value."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{architecture}: {error}") from None


def build_model(
    config: ModelConfig, dtype: torch.dtype, device: str = "cpu", shards: Sequence[Shard] | None = None
) -> Model:
    """The model of a checkpoint, with sized but empty parts; `shards`: its files, None: random weights."""
    if _turns_experts(config, shards):
        config = replace(config, text=one_by_one(config.text))
    model = family_of(config.architecture, config.implementation).model(config, dtype, device)
    assign(model, model.weight_table(), config, shards)
    return model


IN_ONE = ("joined", "upright", "turned")  # layouts with one tensor for all experts, which some files split


def files_decide(config: ModelConfig) -> bool:
    """Whether building the model needs the headers of the weight files."""
    return config.raw.get("quantization_config") is not None or _has_experts_in_one(config)


def _has_experts_in_one(config: ModelConfig) -> bool:
    return any(layer.experts is not None and layer.experts.layout in IN_ONE for layer in config.text.layers)


def _turns_experts(config: ModelConfig, shards: Sequence[Shard] | None) -> bool:
    """Whether files hold each expert separately, although the family's releases have one tensor for all."""
    if not _has_experts_in_one(config):
        return False
    if shards is None:
        method = (config.raw.get("quantization_config") or {}).get("quant_method")
        return method not in (None, ONLINE)
    return any(".experts.0." in name for shard in shards for name in shard.tensors)


def longest_of(body: Section, text: TextConfig) -> int:
    """The largest number of positions over all layers."""
    return max(max_position(body, layer.rope) for layer in text.layers)
