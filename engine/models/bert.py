"""BERT (bge, e5, MiniLM, cross-encoders): an encoder with two types of tokens; classifiers read its tanh pooler."""

from __future__ import annotations

import torch

from engine.checkpoint.pooling import Form, labels_of
from engine.checkpoint.rope import no_rope
from engine.checkpoint.section import MAX_LAYERS, Section
from engine.checkpoint.text import refuse
from engine.errors import ConfigError
from engine.kernels.activation import BY_NAME
from engine.model_config import HeadLayer, LayerConfig, ModelConfig, TextConfig
from engine.models.encoder import Encoder
from engine.models.family import Family
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
IGNORED = ("pooler.dense.*", "embeddings.position_ids", "cls.*")  # vectors are not made of BERT's own pooler


class Bert(Encoder):
    """Positions from the table's first row on."""

    WEIGHTS = Table(ROWS, prefixes=("bert.",), ignore=IGNORED)
    reads_pairs = True

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        types = Section(config.raw, "config.json").size("type_vocab_size", 2)
        super().__init__(config, dtype, device, types, first_position=0)


def text(body: Section, outer: Section) -> TextConfig:
    """The encoder of BERT, RoBERTa and XLM-R."""
    refuse(body, position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    hidden, heads = body.size("hidden_size"), body.size("num_attention_heads")
    if hidden % heads:
        raise ConfigError(f"{body.path}: hidden_size={hidden} is no multiple of num_attention_heads={heads}")
    activation = str(body.values.get("hidden_act") or "gelu")
    if activation not in BY_NAME:
        raise ConfigError(
            f"{body.path}: hidden_act={activation!r} is not supported; supported are {', '.join(BY_NAME)}"
        )
    width = hidden // heads
    layer = LayerConfig(0, no_rope(width), width**-0.5)
    return TextConfig(
        vocab_size=body.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=body.size("intermediate_size"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width,
        norm_eps=body.number("layer_norm_eps", 1e-12),
        qkv_bias=True,
        o_bias=True,
        qk_norm="none",
        mlp_bias=True,
        tie_embeddings=False,
        layers=(layer,) * body.integer("num_hidden_layers", least=1, most=MAX_LAYERS),
        activation=activation,
        gated_mlp=False,
        layer_norm=True,
        norm_bias=True,
    )


def head(body: Section, form: Form) -> tuple[HeadLayer, ...]:
    """Of BertForSequenceClassification."""
    if form != "score":
        return ()
    hidden = body.size("hidden_size")
    last = HeadLayer("classifier", hidden, len(labels_of(body)), bias=True)
    return HeadLayer("pooler.dense", hidden, hidden, bias=True, activation="tanh"), last


FAMILY = Family(name="BERT", model=Bert, text=text, head=head)
