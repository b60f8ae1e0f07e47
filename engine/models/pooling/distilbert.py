"""DistilBERT (multi-qa-distilbert, msmarco-distilbert, sst-2 classifiers): BERT without token types."""

from __future__ import annotations

import torch

from engine.base.model_config import HeadLayer, ModelConfig
from engine.checkpoint.pooling import Form, labels_of
from engine.checkpoint.pooling_lexical import head_of_gaps
from engine.checkpoint.section import Section
from engine.models.base.encoder import Encoder
from engine.models.base.family import Family
from engine.models.pooling.bert import text
from engine.models.pooling.classes import ALL, classes
from engine.weights.table import Row, Table

LAYER = "transformer.layer.*."
OWN = LAYER + "attention."
ROWS = (
    Row(("embeddings.word_embeddings",), "embed"),
    Row(("embeddings.position_embeddings",), "positions"),
    Row(("embeddings.LayerNorm",), "embed_norm"),
    Row((OWN + "q_lin", OWN + "k_lin", OWN + "v_lin"), "layers.*.qkv", "rows"),
    Row((OWN + "out_lin",), "layers.*.o", "columns"),
    Row((LAYER + "sa_layer_norm",), "layers.*.attention_norm"),
    Row((LAYER + "ffn.lin1",), "layers.*.up", "rows"),
    Row((LAYER + "ffn.lin2",), "layers.*.down", "columns"),
    Row((LAYER + "output_layer_norm",), "layers.*.mlp_norm"),
)
IGNORED = ("vocab_*", "embeddings.position_ids")  # vocab_...: the masked language model's head
KEYS = {
    "dim": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers",
    "hidden_dim": "intermediate_size", "activation": "hidden_act",
}  # fmt: skip


class DistilBert(Encoder):
    """Positions start at the table's first row; the files hold sinusoidal positions too."""

    WEIGHTS = Table(ROWS, prefixes=("distilbert.",), ignore=IGNORED)

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device, types=0, first_position=0)


def head(body: Section, form: Form) -> tuple[HeadLayer, ...]:
    """The heads of DistilBertForSequenceClassification, DistilBertForTokenClassification and DistilBertForMaskedLM."""
    if form == "lexical":
        activation = str(body.values.get("hidden_act") or "gelu")
        return head_of_gaps(body, ("vocab_transform", "vocab_layer_norm", "vocab_projector"), activation)
    hidden = body.size("hidden_size")
    last = HeadLayer("classifier", hidden, len(labels_of(body)), bias=True)
    if form != "score":
        return (last,) if form == "tokens" else ()
    return HeadLayer("pre_classifier", hidden, hidden, bias=True, activation="relu"), last


FAMILY = Family(
    name="DistilBERT", architectures=classes("DistilBert", *ALL), model=DistilBert, text=text, head=head, keys=KEYS
)
