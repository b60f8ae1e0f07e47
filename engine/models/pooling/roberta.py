"""RoBERTa and CamemBERT: BERT with one token type; XLM-R has the same layers (xlm_roberta.py).

An input's first position is the row after the padding token's row.
"""

from __future__ import annotations

import torch

from engine.base.model_config import HeadLayer, ModelConfig
from engine.checkpoint.pooling import Form, labels_of
from engine.checkpoint.pooling_lexical import head_of_gaps
from engine.checkpoint.section import Section
from engine.models.base.encoder import Encoder
from engine.models.base.family import Family
from engine.models.pooling.bert import ROWS, text
from engine.models.pooling.classes import ALL, classes
from engine.weights.table import Table

IGNORED = ("pooler.dense.*", "embeddings.position_ids", "lm_head.*")


class Roberta(Encoder):
    """An encoder whose positions start after the padding token's row."""

    WEIGHTS = Table(ROWS, prefixes=("roberta.",), ignore=IGNORED)

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        root = Section(config.raw, "config.json")
        super().__init__(config, dtype, device, root.size("type_vocab_size", 1), first_position(root))


def first_position(body: Section) -> int:
    """Unused rows at the start of the position table."""
    return body.integer("pad_token_id", 1) + 1


def head(body: Section, form: Form) -> tuple[HeadLayer, ...]:
    """The heads of ForSequenceClassification, ForTokenClassification and ForMaskedLM of RoBERTa, MPNet and XLM-R."""
    if form == "lexical":
        return head_of_gaps(body, ("lm_head.dense", "lm_head.layer_norm", "lm_head"))
    hidden = body.size("hidden_size")
    if form != "score":
        return (HeadLayer("classifier", hidden, len(labels_of(body)), bias=True),) if form == "tokens" else ()
    last = HeadLayer("classifier.out_proj", hidden, len(labels_of(body)), bias=True)
    return HeadLayer("classifier.dense", hidden, hidden, bias=True, activation="tanh"), last


FAMILY = Family(
    name="RoBERTa, CamemBERT",
    architectures=(*classes("Roberta", *ALL), *classes("Camembert", *ALL)),
    model=Roberta,
    text=text,
    head=head,
    first_position=first_position,
)
