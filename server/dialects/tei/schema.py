"""Bodies and answers of text-embeddings-inference."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from server.schema.answers_common import ABSENT, Answer, Maybe
from server.schema.fields import said
from server.schema.pooling import RerankBody, Sides


class TeiFields(msgspec.Struct, kw_only=True):
    """The fields that bodies of texts share."""

    inputs: Annotated[
        str | list[str | int | list[str | int]],
        said("A text, texts, token ids or lists of token ids.", "The film was good."),
    ]
    truncate: Annotated[bool | None, said("Whether longer inputs are cut to the context, instead of refused.")] = None
    truncation_direction: Annotated[str | None, said("The side that is cut off: left or right.", "right")] = None
    prompt_name: Annotated[
        str | None, said("The name of the checkpoint's prompt that goes before each input.", "query")
    ] = None


class TeiEmbedBody(TeiFields, kw_only=True):
    """The body of /embed."""

    normalize: Annotated[bool | None, said("Whether vectors get the length 1; they do unless it is false.")] = None
    dimensions: Annotated[int | None, said("Length of the vectors, of models that can shorten them.", 256)] = None


class TeiTokensBody(TeiFields, kw_only=True):
    """The body of /embed_all and /embed_sparse."""


class TeiPredictBody(TeiFields, kw_only=True):
    """The body of /predict."""

    raw_scores: Annotated[bool | None, said("Whether scores are logits, instead of probabilities.")] = None


class SharedRerankBody(RerankBody, kw_only=True):
    """The body of /rerank: `texts` makes it a body of text-embeddings-inference."""

    documents: Annotated[
        Sides | None,
        said("The documents to sort: texts, or objects with text or media.", ["A cat is an animal.", "It rains."]),
    ] = None  # type: ignore[assignment]  # a body with texts has none
    texts: Annotated[list[str] | None, said("The documents, in the words of text-embeddings-inference.")] = None
    raw_scores: Annotated[bool | None, said("With texts: whether scores are logits, instead of probabilities.")] = None
    return_text: Annotated[bool | None, said("With texts: whether the answer holds the texts.")] = None
    truncate: Annotated[bool | None, said("With texts: whether long texts are cut, instead of refused.")] = None
    truncation_direction: Annotated[
        str | None, said("With texts: the side that is cut off, left or right.", "right")
    ] = None


class TeiWeight(Answer):
    """The weight of a token of the vocabulary."""

    index: Annotated[int, said("The token id.", 1012)]
    value: Annotated[float, said("The weight, above 0.", 1.5)]


class TeiLabel(Answer):
    """The score of a class."""

    score: Annotated[float, said("The probability, or the logit.", 0.9)]
    label: Annotated[str, said("The name of the class.", "positive")]


class TeiRank(Answer):
    """A text and its score."""

    index: Annotated[int, said("The number of the text in the request, from 0.", 0)]
    score: Annotated[float, said("How well the text answers the query.", 0.87)]
    text: Annotated[Maybe[str], said("The text, where it is wanted.")] = ABSENT


class TeiInfo(Answer):
    """The served model."""

    model_id: Annotated[str, said("The first served name.", "bge-base")]
    model_sha: Annotated[str | None, said("Always null.")]
    model_dtype: Annotated[str, said("The number format of the weights.", "float16")]
    model_type: Annotated[
        dict[str, dict[str, Any]], said("Under embedding, reranker or classifier: the pooling, or the labels.")
    ]
    max_input_length: Annotated[int, said("Most tokens of an input.", 512)]
    max_batch_tokens: Annotated[int, said("Most tokens of a step.", 8192)]
    max_concurrent_requests: Annotated[int, said("Inputs that may run and wait.", 1024)]
    max_client_batch_size: Annotated[int, said("Most inputs of a request.", 2048)]
    auto_truncate: Annotated[bool, said("Always false: a request says whether its inputs are cut.")]
    version: Annotated[str, said("The version of this server.", "0.1.0")]
