"""ColBERT in its publisher's layout (colbertv2.0, answerai-colbert-small): BERT, and a linear layer on every token.

`artifact.metadata` names the marker tokens of queries and documents, and says whether punctuation of documents is
skipped. Format: https://github.com/stanford-futuredata/ColBERT (modeling/tokenization).
"""

from __future__ import annotations

import logging
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.base.errors import ConfigError
from engine.base.model_config import HeadLayer, PoolingConfig
from engine.checkpoint.files import read_json
from engine.checkpoint.pooling_tokens import known_tokens
from engine.checkpoint.section import Section
from engine.models.base.family import Family
from engine.models.pooling.bert import Bert, head, text

log = logging.getLogger(__name__)
ARTIFACT = "artifact.metadata"
ROLES = {"query": "query_token_id", "document": "doc_token_id"}
USUAL = {"query": "[unused0]", "document": "[unused1]"}


def pooling(folder: Path, body: Section, outer: Section, given: Mapping[str, Any]) -> PoolingConfig:
    """The pooling config: normalised vectors of tokens."""
    if given:
        raise ConfigError("--pooler-config: ColBERT has vectors of tokens and nothing to choose; leave the flag out")
    said = Section(read_json(folder / ARTIFACT, required=False), ARTIFACT)
    known = known_tokens(folder)
    markers = {}
    for role, key in ROLES.items():
        token = said.values.get(key) or USUAL[role]
        if token not in known:
            raise ConfigError(f"{ARTIFACT}: {key}={token!r} is no token of tokenizer.json")
        markers[role] = known[token]
    skipped = string.punctuation if said.boolean("mask_punctuation", True) else ""
    log.warning(
        "%s: its queries were filled up with mask tokens; here they are not, and scores lack the products of these "
        "tokens",
        folder,
    )
    width = body.size("hidden_size")
    return PoolingConfig(
        task="embed",
        kind="cls",
        activation="normalize",
        layers=(HeadLayer("linear", width, said.size("dim", 128)),),
        bidirectional=True,
        dimensions=None,
        prompts=dict.fromkeys(ROLES, ""),
        tokens_only=True,
        markers=markers,
        skipped=tuple(known[mark] for mark in skipped if mark in known),
    )


FAMILY = Family(name="ColBERT", architectures=("HF_ColBERT",), model=Bert, text=text, head=head, pooling=pooling)
