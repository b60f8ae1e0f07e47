"""SPLADE's checkpoints, as sentence-transformers' SparseEncoder saves them: weights of all tokens of the vocabulary.

A model that fills gaps in texts gives each token of an input a logit of every token of the vocabulary; the input's
weight of one of these is log(1 + relu(its largest logit)) (https://arxiv.org/abs/2109.10086). In: modules.json, the
module's folder, the layers of the family's head. Out: PoolingConfig. Thread: any.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.checkpoint.files import read_json
from engine.checkpoint.section import Section
from engine.checkpoint.text import refuse
from engine.errors import ConfigError
from engine.model_config import HeadLayer, PoolingConfig

POOLING = "SpladePooling"
FIRST = ("MLMTransformer", "Transformer")  # sentence-transformers 5, and later


def lexical(
    folder: Path, modules: Sequence[tuple[str, str]], head: tuple[HeadLayer, ...], said: dict[str, Any],
    **every: Any,
) -> PoolingConfig:  # fmt: skip
    """said: config_sentence_transformers.json; every: fields of all checkpoints. Raises ConfigError."""
    names = [name for name, _ in modules]
    if len(names) != 2 or names[0] not in FIRST or names[1] != POOLING:
        raise ConfigError(f"modules.json: {', '.join(names)}; {POOLING} is supported behind MLMTransformer, and last")
    if not head or not head[-1].tied:
        raise ConfigError(f"modules.json: {POOLING} is supported behind BertForMaskedLM and DistilBertForMaskedLM")
    path = f"{modules[1][1]}/config.json"
    values = read_json(folder / path)
    for key, value in {"pooling_strategy": "max", "activation_function": "relu"}.items():
        if values.get(key, value) != value:
            raise ConfigError(f"{path}: {key}={values[key]!r} is not supported; supported is {value!r}")
    similarity = said.get("similarity_fn_name") or "dot"
    if similarity not in ("dot", "cosine"):
        raise ConfigError(
            f"config_sentence_transformers.json: similarity_fn_name={similarity!r} is not supported; supported are dot "
            "and cosine"
        )
    return PoolingConfig(
        task="embed",
        kind="max",
        activation="log1p_relu",
        layers=head,
        layers_first=True,
        compares_products=similarity == "dot",
        bidirectional=True,
        dimensions=None,
        **every,
    )


def head_of_gaps(body: Section, names: tuple[str, str, str]) -> tuple[HeadLayer, ...]:
    """Of a class that fills gaps; names: the modules of its product, of the norm behind it and of the logits' bias."""
    refuse(body, tie_word_embeddings=True, hidden_act="gelu")
    hidden, (product, norm, logits) = body.size("hidden_size"), names
    return (
        HeadLayer(
            product, hidden, hidden, bias=True, activation="gelu", norm=norm,
            norm_eps=body.number("layer_norm_eps", 1e-12), norm_bias=True,
        ),
        HeadLayer(logits, hidden, body.size("vocab_size"), bias=True, tied=True),
    )  # fmt: skip
