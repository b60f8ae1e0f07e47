"""ELECTRA (ms-marco-electra-base, KoELECTRA): BERT whose classifiers apply two layers to the first token.

The small models have embeddings narrower than the hidden size.
"""

from __future__ import annotations

from engine.base.model_config import HeadLayer
from engine.checkpoint.pooling import Form, labels_of
from engine.checkpoint.pooling_lexical import head_of_gaps
from engine.checkpoint.section import Section
from engine.models.base.family import Family
from engine.models.pooling import bert
from engine.models.pooling.classes import ALL, classes
from engine.weights.table import Row, Table

IGNORED = ("embeddings.position_ids", "discriminator_predictions.*", "generator_*")  # heads of the two training models


class Electra(bert.Bert):
    """BERT's body with other weight names."""

    WEIGHTS = Table((*bert.ROWS, Row(("embeddings_project",), "widen")), prefixes=("electra.",), ignore=IGNORED)
    narrow: int = 128  # default width of an embedding


def head(body: Section, form: Form) -> tuple[HeadLayer, ...]:
    """The heads of Electra's ForSequenceClassification, ForTokenClassification and ForMaskedLM."""
    if form == "lexical":
        names = "generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head"
        return head_of_gaps(body, names, width=body.size("embedding_size", Electra.narrow))
    hidden, count = body.size("hidden_size"), len(labels_of(body))
    if form != "score":
        return (HeadLayer("classifier", hidden, count, bias=True),) if form == "tokens" else ()
    first = HeadLayer("classifier.dense", hidden, hidden, bias=True, activation="gelu")
    return first, HeadLayer("classifier.out_proj", hidden, count, bias=True)


FAMILY = Family(
    name="ELECTRA", architectures=classes("Electra", *ALL, "ForPreTraining"), model=Electra, text=bert.text, head=head
)
