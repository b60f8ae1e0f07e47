"""Retrievers of pages (ColPali, ColQwen2): a decoder that sees, and a product behind every token.

An input is a text or the picture of a page, written as the checkpoint's processor writes it:

    query      prefix, text, ten padding tokens, a line's end: in their vectors the model has learned to add terms
    page       the picture between the words with which the model was trained
    text       alone: transformers writes none; colpali-engine's process_texts does

Published files name the decoder's tensors below `vlm.`. Thread: any; what it makes belongs to the device thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine.base.errors import ConfigError
from engine.base.model_config import HeadLayer, ModelConfig, PoolingConfig
from engine.checkpoint.config import media_token_ids
from engine.checkpoint.files import read_json
from engine.checkpoint.pooling_tokens import known_tokens
from engine.checkpoint.section import Section
from engine.models.base.decoder import Decoder

PROCESSOR = "processor_config.json"
TOKENIZER = "tokenizer_config.json"
TERMS = 10  # padding tokens behind a query
USUAL = 128  # numbers of a vector, where the file is silent


def below_vlm(make: Callable[[ModelConfig, torch.dtype, str], Decoder]) -> Callable[..., Decoder]:
    """The decoder that `make` makes, of files that name it `vlm`."""

    def made(config: ModelConfig, dtype: torch.dtype, device: str) -> Decoder:
        model = make(config, dtype, device)
        model.table = replace(model.table, prefixes=("vlm.", *model.table.prefixes))
        return model

    return made


def vectors(
    folder: Path, body: Section, root: Section, given: Mapping[str, Any], prefix: str, page: str, begin: str = ""
) -> PoolingConfig:
    """Vectors of tokens, of length 1; `prefix` stands before queries, `begin` before all texts, `page` is a picture's
    input. `given`: --pooler-config."""
    if given:
        raise ConfigError("--pooler-config: a retriever of pages has nothing to choose; leave the flag out")
    spelled = placeholder(folder, root)
    if page.count(spelled) != 1:
        raise ConfigError(f"{PROCESSOR}: visual_prompt_prefix={page!r} must hold {spelled} once, where a page stands")
    layer = HeadLayer("embedding_proj_layer", body.size("hidden_size"), root.size("embedding_dim", USUAL), bias=True)
    return PoolingConfig(
        task="embed",
        kind="last",
        activation="normalize",
        layers=(layer,),
        dimensions=None,
        prompts={"query": begin + prefix, "document": begin},
        default_prompt="query",
        tokens_only=True,
        page=page,
        endings={"query": token_named(folder, "pad_token") * TERMS + "\n"},
    )


def said(folder: Path, key: str, usual: str) -> str:
    """A text of the processor's file."""
    text = read_json(folder / PROCESSOR, required=False).get(key) or usual
    if not isinstance(text, str):
        raise ConfigError(f"{PROCESSOR}: {key}={text!r} must be a text")
    return text


def placeholder(folder: Path, root: Section) -> str:
    """How the token that stands for a picture is spelled."""
    number = media_token_ids(root).get("image")
    spelled = next((token for token, one in known_tokens(folder).items() if one == number), None)
    if spelled is None:
        raise ConfigError(f"config.json: image_token_id={number!r} is no token of tokenizer.json")
    return spelled


def token_named(folder: Path, key: str) -> str:
    """How the token is spelled that the tokenizer's file names by `key`."""
    named = read_json(folder / TOKENIZER).get(key)
    content = named.get("content") if isinstance(named, dict) else named
    if content not in known_tokens(folder):
        raise ConfigError(f"{TOKENIZER}: {key}={content!r} must be a token of tokenizer.json")
    return str(content)
