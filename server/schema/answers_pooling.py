"""Types of the answers of /v1/embeddings, /pooling, /classify, /score and /rerank (API.md section 13)."""

from __future__ import annotations

from typing import Annotated, Literal

from server.schema.answers_common import ABSENT, Answer, Created, Id, Maybe, ModelName
from server.schema.fields import said

Position = Annotated[int, said("The number of the input, from 0.", 0)]
ListObject = Annotated[Literal["list"], said("The kind of this object.")]


class PoolingUsage(Answer):
    """Counts of tokens."""

    prompt_tokens: Annotated[int, said("Tokens of all inputs.", 8)]
    total_tokens: Annotated[int, said("The same number.", 8)]


Counts = Annotated[PoolingUsage, said("Counts of tokens.")]


class Embedding(Answer):
    """The vector of an input."""

    index: Position
    object: Annotated[Literal["embedding"], said("The kind of this object.")]
    embedding: Annotated[list[float] | str, said("The numbers, or their bytes as base64.", [0.1, -0.2])]


class EmbeddingList(Answer):
    """Vectors of inputs."""

    id: Id
    object: ListObject
    created: Created
    model: ModelName
    data: Annotated[list[Embedding], said("A vector for each input.")]
    usage: Counts


class Pooled(Answer):
    """The result of a pooling model for an input."""

    index: Position
    object: Annotated[Literal["pooling"], said("The kind of this object.")]
    data: Annotated[
        list[float | list[float]] | str, said("A vector, a row for each token, or the bytes as base64.", [0.1, -0.2])
    ]


class PooledList(Answer):
    """The results of a pooling model for the inputs."""

    id: Id
    object: ListObject
    created: Created
    model: ModelName
    data: Annotated[list[Pooled], said("A result for each input.")]
    usage: Counts


class Classified(Answer):
    """The classes of an input."""

    index: Position
    label: Annotated[str | None, said("The name of the likeliest class.", "positive")]
    probs: Annotated[list[float], said("The probability of each class.", [0.1, 0.9])]
    num_classes: Annotated[int, said("The number of classes.", 2)]


class ClassifiedList(Answer):
    """Classes of inputs."""

    id: Id
    object: ListObject
    created: Created
    model: ModelName
    data: Annotated[list[Classified], said("The classes of each input.")]
    usage: Counts


class PairScore(Answer):
    """The score of a pair."""

    index: Annotated[int, said("The number of the pair, from 0.", 0)]
    object: Annotated[Literal["score"], said("The kind of this object.")]
    score: Annotated[float, said("The score.", 0.87)]


class ScoreList(Answer, tag_field="object", tag="list"):
    """Scores of pairs."""

    id: Id
    created: Created
    model: ModelName
    data: Annotated[list[PairScore], said("A score for each pair.")]
    usage: Counts


class RankedText(Answer):
    """A document."""

    text: Annotated[str, said("The text of the document.", "A cat is an animal.")]


class Ranked(Answer):
    """A document and its score."""

    index: Annotated[int, said("The number of the document in the request, from 0.", 0)]
    relevance_score: Annotated[float, said("How well the document answers the query.", 0.87)]
    document: Annotated[Maybe[RankedText], said("The document, where it is wanted.")] = ABSENT


class RankedList(Answer):
    """Documents by their scores."""

    id: Id
    created: Created
    model: ModelName
    results: Annotated[list[Ranked], said("The documents, the best first.")]
    usage: Counts
