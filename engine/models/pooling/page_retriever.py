"""Page retrievers (ColPali, ColQwen2): a decoder that takes pictures, and a linear layer on every token.

An input is a text or the picture of a page, formatted as by the checkpoint's processor:

    query      prefix, text, ten padding tokens, a newline: the model has learned to put further query terms into these
    page       the picture inside the text with which the model was trained
    text       the text alone, as by colpali-engine's process_texts; transformers has no such input

Published files name the decoder's tensors below `vlm.`. Thread: any; the models belong to the device thread.
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
TERMS = 10  # padding tokens after a query
USUAL = 128  # default width of a vector


def below_vlm(make: Callable[[ModelConfig, torch.dtype, str], Decoder]) -> Callable[..., Decoder]:
    """`make`, for files that have the prefix `vlm.` before the decoder's names."""

    def made(config: ModelConfig, dtype: torch.dtype, device: str) -> Decoder:
        model = make(config, dtype, device)
        model.table = replace(model.table, prefixes=("vlm.", *model.table.prefixes))
        return model

    return made


def vectors(
    folder: Path, body: Section, root: Section, given: Mapping[str, Any], prefix: str, page: str, begin: str = ""
) -> PoolingConfig:
    """The pooling config: normalised vectors of tokens. `prefix` precedes queries, `begin` precedes all texts, `page`
    is the input of a picture. `given`: --pooler-config."""
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
    """The text under `key` in the processor's file; `usual`: the default."""
    text = read_json(folder / PROCESSOR, required=False).get(key) or usual
    if not isinstance(text, str):
        raise ConfigError(f"{PROCESSOR}: {key}={text!r} must be a text")
    return text


def placeholder(folder: Path, root: Section) -> str:
    """The text of the picture's placeholder token."""
    number = media_token_ids(root).get("image")
    spelled = next((token for token, one in known_tokens(folder).items() if one == number), None)
    if spelled is None:
        raise ConfigError(f"config.json: image_token_id={number!r} is no token of tokenizer.json")
    return spelled


def token_named(folder: Path, key: str) -> str:
    """The text of the token that the tokenizer's file names under `key`."""
    named = read_json(folder / TOKENIZER).get(key)
    content = named.get("content") if isinstance(named, dict) else named
    if content not in known_tokens(folder):
        raise ConfigError(f"{TOKENIZER}: {key}={content!r} must be a token of tokenizer.json")
    return str(content)
