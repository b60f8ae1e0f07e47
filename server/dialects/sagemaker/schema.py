"""The body of /invocations: that of the route which its fields choose."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Raw

from server.schema.fields import said

ABSENT = Raw()  # in place of a field that was not sent


class InvocationBody(msgspec.Struct, kw_only=True):
    """The fields that choose the route, whose values are not decoded; that route reads all fields."""

    messages: Annotated[Raw, said("Chooses /v1/chat/completions.")] = msgspec.field(default_factory=Raw)
    prompt: Annotated[Raw, said("Chooses /v1/completions.")] = msgspec.field(default_factory=Raw)
    input: Annotated[
        Raw,
        said("Chooses /v1/responses; of models that pool, /v1/embeddings or /classify.", "What is 12 + 30?"),
    ] = msgspec.field(default_factory=Raw)
    query: Annotated[Raw, said("Chooses /rerank; /score together with items.")] = msgspec.field(default_factory=Raw)
    items: Annotated[Raw, said("Chooses /score together with query.")] = msgspec.field(default_factory=Raw)
    inputs: Annotated[
        Raw, said("Chooses the protocol of text-embeddings-inference: /embed, /embed_sparse or /predict.")
    ] = msgspec.field(default_factory=Raw)
