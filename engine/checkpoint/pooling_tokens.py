"""Reads a checkpoint's settings for results per token.

The settings are BGE-M3's two extra layers, PyLate's markers of queries and documents, and the token that ends a step.
In: a folder. Out: heads of tokens, a token id. Thread: any; the only side effect is to read files.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from engine.base.errors import ConfigError
from engine.base.model_config import Activation, HeadLayer, TokenHead
from engine.checkpoint.files import read_json

log = logging.getLogger(__name__)
SPARSE, COLBERT = "sparse_linear", "colbert_linear"


def token_heads(folder: Path, hidden: int, activation: Activation) -> tuple[TokenHead, ...]:
    """BGE-M3's heads for token weights and token vectors; (): the checkpoint has none. Pickles are not read."""
    files = [folder / f"{name}.safetensors" for name in (SPARSE, COLBERT)]
    if not all(file.is_file() for file in files):
        if (folder / f"{SPARSE}.pt").is_file() or (folder / f"{COLBERT}.pt").is_file():
            log.warning(
                "%s: weights and vectors of tokens lie in .pt files, which are pickles and are not read; inputs are "
                "served without them. To have both: python -m server convert %s",
                folder,
                folder,
            )
        return ()
    sparse, colbert = (
        HeadLayer("", hidden, width, bias=True, folder=file.name) for file, width in zip(files, (1, hidden))
    )
    return (
        TokenHead("token_classify", (sparse,), "relu", dropped=(1, 1)),
        TokenHead("token_embed", (colbert,), activation, dropped=(1, 0)),
    )


def step_tag(folder: Path, token: str) -> int:
    """The id of the token that ends a step."""
    if token in (known := known_tokens(folder)):
        return known[token]
    raise ConfigError(
        f"tokenizer.json: has no {token}, which ends the steps of a process reward model; name another by "
        "--pooler-config '{\"step_tag_id\": ...}'"
    )


def late_interaction(folder: Path, said: dict[str, Any]) -> dict[str, Any]:
    """Fields of PoolingConfig for PyLate's ColBERT models; `said`: PyLate's file of prompts and markers."""
    prefixes = {role: said.get(f"{role}_prefix") for role in ("query", "document")}
    words = said.get("skiplist_words") or []
    if not any(prefixes.values()) and said.get("model_type") != "ColBERT":
        return {}
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ConfigError("config_sentence_transformers.json: skiplist_words must be a list of texts")
    known = known_tokens(folder)
    for role, prefix in prefixes.items():
        if prefix and prefix not in known:
            raise ConfigError(
                f"config_sentence_transformers.json: {role}_prefix={prefix!r} is no token of tokenizer.json"
            )
    if said.get("do_query_expansion", True):
        log.warning(
            "%s: its queries were filled up with mask tokens (do_query_expansion); here they are not, and scores lack "
            "the products of these tokens",
            folder,
        )
    prompts = said.get("prompts") or {}
    return {
        "markers": {role: known[prefix] for role, prefix in prefixes.items() if prefix},
        "skipped": tuple(known[word] for word in words if word in known),
        "prompts": {role: prompts.get(role, "") for role in prefixes} | prompts,
    }


def known_tokens(folder: Path) -> dict[str, int]:
    """Token -> id, from tokenizer.json."""
    tokenizer = read_json(folder / "tokenizer.json")
    found = tokenizer.get("model", {}).get("vocab", {})
    known = dict(found) if isinstance(found, dict) else {piece: at for at, (piece, _) in enumerate(found)}
    return known | {added["content"]: int(added["id"]) for added in tokenizer.get("added_tokens") or ()}
