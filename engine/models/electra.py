"""ELECTRA (ms-marco-electra-base, KoELECTRA): BERT whose classifiers have two layers behind the first token."""

from __future__ import annotations

from engine.checkpoint.pooling import Form, labels_of
from engine.checkpoint.section import Section
from engine.errors import ConfigError
from engine.model_config import HeadLayer, TextConfig
from engine.models import bert
from engine.models.family import Family
from engine.weights.table import Table

IGNORED = ("embeddings.position_ids", "discriminator_predictions.*", "generator_*")  # of both models of its training


class Electra(bert.Bert):
    """BERT's body under another name."""

    WEIGHTS = Table(bert.ROWS, prefixes=("electra.",), ignore=IGNORED)


def text(body: Section, outer: Section) -> TextConfig:
    """The encoder."""
    read = bert.text(body, outer)
    width = body.size("embedding_size", 128)
    if width != read.hidden_size:
        raise ConfigError(
            f"{body.path}: embedding_size={width} and hidden_size={read.hidden_size}: ELECTRA with narrow embeddings "
            "is not supported; supported are sizes that are equal, as in electra-base"
        )
    return read


def head(body: Section, form: Form) -> tuple[HeadLayer, ...]:
    """Of ElectraForSequenceClassification and ElectraForTokenClassification."""
    hidden, count = body.size("hidden_size"), len(labels_of(body))
    if form != "score":
        return (HeadLayer("classifier", hidden, count, bias=True),) if form == "tokens" else ()
    first = HeadLayer("classifier.dense", hidden, hidden, bias=True, activation="gelu")
    return first, HeadLayer("classifier.out_proj", hidden, count, bias=True)


FAMILY = Family(name="ELECTRA", model=Electra, text=text, head=head)
