"""ALBERT (paraphrase-albert, classifiers): BERT with narrow embeddings, and one layer that runs several times."""

from __future__ import annotations

from engine.base.model_config import HeadLayer, TextConfig
from engine.checkpoint.pooling import Form, labels_of
from engine.checkpoint.pooling_lexical import head_of_gaps
from engine.checkpoint.section import Section
from engine.checkpoint.text import refuse
from engine.models.base.encoder import EncoderLayer
from engine.models.base.family import Family
from engine.models.pooling import bert
from engine.models.pooling.classes import ALL, classes
from engine.weights.table import Row, Table

LAYER = "encoder.albert_layer_groups.0.albert_layers.0."
SELF = LAYER + "attention."
ROWS = (
    *bert.ROWS[:4],
    Row(("encoder.embedding_hidden_mapping_in",), "widen"),
    Row((SELF + "query", SELF + "key", SELF + "value"), "layers.0.qkv", "rows"),
    Row((SELF + "dense",), "layers.0.o", "columns"),
    Row((SELF + "LayerNorm",), "layers.0.attention_norm"),
    Row((LAYER + "ffn",), "layers.0.up", "rows"),
    Row((LAYER + "ffn_output",), "layers.0.down", "columns"),
    Row((LAYER + "full_layer_layer_norm",), "layers.0.mlp_norm"),
)
IGNORED = ("pooler.*", "predictions.*", "sop_classifier.*", "embeddings.position_ids")


class Albert(bert.Bert):
    """One layer, which runs num_hidden_layers times."""

    WEIGHTS = Table(ROWS, prefixes=("albert.",), ignore=IGNORED)
    narrow: int = 128

    def made_layers(self, text: TextConfig) -> list[EncoderLayer]:
        return [self.layer(text)] * len(text.layers)


def text(body: Section, outer: Section) -> TextConfig:
    """The encoder."""
    refuse(body, num_hidden_groups=1, inner_group_num=1)
    return bert.text(Section({"hidden_act": "gelu_new", **body.values}, body.path, body.outer), outer)


def head(body: Section, form: Form) -> tuple[HeadLayer, ...]:
    """The heads of Albert's ForSequenceClassification, ForTokenClassification and ForMaskedLM."""
    if form == "lexical":
        names = "predictions.dense", "predictions.LayerNorm", "predictions"
        activation = str(body.values.get("hidden_act") or "gelu_new")
        return head_of_gaps(body, names, activation, body.size("embedding_size", Albert.narrow))
    hidden = body.size("hidden_size")
    last = HeadLayer("classifier", hidden, len(labels_of(body)), bias=True)
    if form != "score":
        return (last,) if form == "tokens" else ()
    return HeadLayer("pooler", hidden, hidden, bias=True, activation="tanh"), last


FAMILY = Family(
    name="ALBERT", architectures=classes("Albert", *ALL, "ForPreTraining"), model=Albert, text=text, head=head
)
