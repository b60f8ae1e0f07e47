"""Reads SPLADE checkpoints as sentence-transformers' SparseEncoder saves them: a weight for every vocabulary token.

A masked language model gives each token of an input a logit for every token of the vocabulary. The input's weight for
a vocabulary token is log(1 + relu(largest logit)) (https://arxiv.org/abs/2109.10086). Some checkpoints apply
log(1 + ...) a second time (https://arxiv.org/abs/2504.14839). In: modules.json, the module's folder, the layers of
the family's head. Out: PoolingConfig. Thread: any.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.base.errors import ConfigError
from engine.base.model_config import Activation, HeadLayer, PoolingConfig
from engine.checkpoint.files import read_json
from engine.checkpoint.section import Section
from engine.checkpoint.text import refuse

POOLING = "SpladePooling"
FIRST = ("MLMTransformer", "Transformer")  # the first module in sentence-transformers 5, and in later versions
ACTIVATIONS: dict[str, Activation] = {"relu": "log1p", "log1p_relu": "log1p_twice"}  # activation_function -> ours
OF_HEADS = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "silu")  # activations before the norm
BODIES = "BERT, RoBERTa, XLM-R, CamemBERT, DistilBERT, MPNet, ELECTRA, ALBERT and ModernBERT"


def lexical(
    folder: Path,
    modules: Sequence[tuple[str, str]],
    head: tuple[HeadLayer, ...],
    said: dict[str, Any],
    **every: Any,
) -> PoolingConfig:
    """A SPLADE checkpoint's config. said: config_sentence_transformers.json; every: fields of all checkpoints. Raises
    ConfigError."""
    names = [name for name, _ in modules]
    if len(names) != 2 or names[0] not in FIRST or names[1] != POOLING:
        raise ConfigError(f"modules.json: {', '.join(names)}; {POOLING} is supported behind MLMTransformer, and last")
    if not head or not head[-1].tied:
        raise ConfigError(f"modules.json: {POOLING} is supported behind the ...ForMaskedLM of {BODIES}")
    path = f"{modules[1][1]}/config.json"
    values = {"pooling_strategy": "max", "activation_function": "relu"} | read_json(folder / path)
    for key, allowed in {"pooling_strategy": ("max",), "activation_function": tuple(ACTIVATIONS)}.items():
        if values[key] not in allowed:
            listed = ", ".join(map(repr, allowed))
            raise ConfigError(f"{path}: {key}={values[key]!r} is not supported; supported: {listed}")
    similarity = said.get("similarity_fn_name") or "dot"
    if similarity not in ("dot", "cosine"):
        raise ConfigError(
            f"config_sentence_transformers.json: similarity_fn_name={similarity!r} is not supported; supported are dot "
            "and cosine"
        )
    return PoolingConfig(
        task="embed",
        kind="max",
        activation=ACTIVATIONS[values["activation_function"]],
        layers=head,
        layers_first=True,
        compares_products=similarity == "dot",
        bidirectional=True,
        dimensions=None,
        **every,
    )


def head_of_gaps(
    body: Section, names: tuple[str, str, str], activation: str = "gelu", width: int | None = None, **layer: Any
) -> tuple[HeadLayer, ...]:
    """The head of a masked language model; names: the modules of the linear layer, the norm after it, the logits' bias.

    width: the embedding's width, None: the hidden size; layer: fields of the first layer that differ from BERT's.
    """
    refuse(body, tie_word_embeddings=True)
    if activation not in OF_HEADS:
        raise ConfigError(
            f"{body.path}: hidden_act={activation!r} is not supported with {POOLING}; supported: {', '.join(OF_HEADS)}"
        )
    hidden, (product, norm, logits) = body.size("hidden_size"), names
    width = hidden if width is None else width
    first = {"bias": True, "norm_eps": body.number("layer_norm_eps", 1e-12), "norm_bias": True, **layer}
    return (
        HeadLayer(product, hidden, width, activation=activation, norm=norm, **first),
        HeadLayer(logits, width, body.size("vocab_size"), bias=True, tied=True),
    )
