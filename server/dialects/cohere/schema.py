"""Body and answer of Cohere's /v2/embed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from server.schema import fields
from server.schema.answers_common import ABSENT, Answer, Maybe
from server.schema.fields import said


class CohereEmbedBody(msgspec.Struct, kw_only=True):
    """The body of /v2/embed: one of texts, images and inputs."""

    model: fields.Model = None
    texts: Annotated[list[str] | None, said("The texts.", ["The film was good."])] = None
    images: Annotated[list[str] | None, said("Images as data: URLs, of models that take images.")] = None
    inputs: Annotated[
        list[dict[str, Any]] | None, said("Objects whose content is a list of parts: text and image_url.")
    ] = None
    input_type: Annotated[
        str | None, said("The purpose of the inputs, such as search_query or search_document.", "search_query")
    ] = None
    embedding_types: Annotated[
        list[str] | None, said("Forms of the vectors: float, int8, uint8, binary, ubinary, base64.", ["float"])
    ] = None
    output_dimension: Annotated[int | None, said("Length of the vectors, of models that can shorten them.", 256)] = None
    truncate: Annotated[
        str | None, said("The end of longer inputs that is cut off: START, END (the default) or NONE.", "END")
    ] = None
    max_tokens: Annotated[int | None, said("Most tokens of an input; longer inputs are cut.")] = None
    priority: fields.Priority = None


Integers = Annotated[Maybe[list[list[int]]], said("A list of integers for each input.", [[12, -7]])]


class CohereVectors(Answer, rename={"numbers": "float"}):
    """Vectors by their form."""

    numbers: Annotated[Maybe[list[list[float]]], said("The numbers.", [[0.1, -0.2]])] = ABSENT
    int8: Integers = ABSENT
    uint8: Integers = ABSENT
    binary: Integers = ABSENT
    ubinary: Integers = ABSENT
    base64: Annotated[Maybe[list[str]], said("The bytes of the float32 numbers, little endian.")] = ABSENT


class CohereVersion(Answer):
    """The version of the protocol."""

    version: Annotated[Literal["2"], said("The version of the protocol.")]


class CohereUnits(Answer):
    """Counts."""

    input_tokens: Annotated[int, said("Tokens of all inputs.", 8)]


class CohereMeta(Answer):
    """Facts about the answer."""

    api_version: Annotated[CohereVersion, said("The version of the protocol.")]
    billed_units: Annotated[CohereUnits, said("Counts of tokens.")]


class CohereEmbedded(Answer):
    """Vectors of inputs."""

    id: Annotated[str, said("The id of the answer.", "embd-5f0c")]
    response_type: Annotated[Literal["embeddings_by_type"], said("The kind of this object.")]
    embeddings: Annotated[CohereVectors, said("The vectors in each of the wanted forms.")]
    texts: Annotated[list[str], said("The texts of the request.")]
    meta: Annotated[CohereMeta, said("Facts about the answer.")]
