"""BERT (bge, e5, MiniLM, cross-encoders): an encoder with two types of tokens; classifiers read its tanh pooler."""

from __future__ import annotations

from typing import Any

import torch

from engine.base.errors import ConfigError
from engine.base.model_config import HeadLayer, LayerConfig, ModelConfig, TextConfig
from engine.checkpoint.pooling import Form, labels_of
from engine.checkpoint.pooling_lexical import head_of_gaps
from engine.checkpoint.rope import FULL, RopeDefaults, no_rope, read_rope
from engine.checkpoint.section import MAX_LAYERS, Section
from engine.checkpoint.text import refuse
from engine.kernels.activation import BY_NAME
from engine.models.base.encoder import Encoder
from engine.models.base.family import Family
from engine.models.pooling.classes import ALL, classes
from engine.weights.table import Row, Table

LAYER = "encoder.layer.*."
SELF = LAYER + "attention.self."
ROWS = (
    Row(("embeddings.word_embeddings",), "embed"),
    Row(("embeddings.position_embeddings",), "positions"),
    Row(("embeddings.token_type_embeddings",), "types"),
    Row(("embeddings.LayerNorm",), "embed_norm"),
    Row((SELF + "query", SELF + "key", SELF + "value"), "layers.*.qkv", "rows"),
    Row((LAYER + "attention.output.dense",), "layers.*.o", "columns"),
    Row((LAYER + "attention.output.LayerNorm",), "layers.*.attention_norm"),
    Row((LAYER + "intermediate.dense",), "layers.*.up", "rows"),
    Row((LAYER + "output.dense",), "layers.*.down", "columns"),
    Row((LAYER + "output.LayerNorm",), "layers.*.mlp_norm"),
)
IGNORED = ("pooler.dense.*", "embeddings.position_ids", "cls.*")  # vectors do not use BERT's own pooler


class Bert(Encoder):
    """An encoder whose positions start at the table's first row."""

    WEIGHTS = Table(ROWS, prefixes=("bert.",), ignore=IGNORED)
    reads_pairs = True
    narrow: int | None = None  # default of `embedding_size`; None: the key is not read

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        body = Section(config.raw, "config.json")
        narrow = self.narrow and body.size("embedding_size", self.narrow)
        super().__init__(config, dtype, device, body.size("type_vocab_size", 2), first_position=0, narrow=narrow)


def text(body: Section, outer: Section) -> TextConfig:
    """The encoder's config for BERT, RoBERTa and XLM-R."""
    refuse(body, position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    return post_norm_text(body, None, gated_mlp=False, qkv_bias=True, o_bias=True, mlp_bias=True)


def post_norm_text(body: Section, rope: RopeDefaults | None, **family: Any) -> TextConfig:
    """A post-norm encoder's config; rope: None if positions come from a table; family: fields of TextConfig."""
    hidden, heads = body.size("hidden_size"), body.size("num_attention_heads")
    if hidden % heads:
        raise ConfigError(f"{body.path}: hidden_size={hidden} is no multiple of num_attention_heads={heads}")
    activation = str(body.values.get("hidden_act") or "gelu")
    if activation not in BY_NAME:
        raise ConfigError(
            f"{body.path}: hidden_act={activation!r} is not supported; supported are {', '.join(BY_NAME)}"
        )
    width = hidden // heads
    turned = no_rope(width) if rope is None else read_rope(body, FULL, width, rope)
    layer = LayerConfig(0, turned, width**-0.5)
    return TextConfig(
        vocab_size=body.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=body.size("intermediate_size"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width,
        norm_eps=body.number("layer_norm_eps", 1e-12),
        qk_norm="none",
        tie_embeddings=False,
        layers=(layer,) * body.integer("num_hidden_layers", least=1, most=MAX_LAYERS),
        activation=activation,
        layer_norm=True,
        norm_bias=True,
        **family,
    )


def head(body: Section, form: Form) -> tuple[HeadLayer, ...]:
    """The heads of Bert's ForSequenceClassification, ForTokenClassification and ForMaskedLM; other families share
    them."""
    if form == "lexical":
        gaps, activation = "cls.predictions", str(body.values.get("hidden_act") or "gelu")
        return head_of_gaps(body, (f"{gaps}.transform.dense", f"{gaps}.transform.LayerNorm", gaps), activation)
    hidden = body.size("hidden_size")
    last = HeadLayer("classifier", hidden, len(labels_of(body)), bias=True)
    if form != "score":
        return (last,) if form == "tokens" else ()
    return HeadLayer("pooler.dense", hidden, hidden, bias=True, activation="tanh"), last


FAMILY = Family(name="BERT", architectures=classes("Bert", *ALL), model=Bert, text=text, head=head)
