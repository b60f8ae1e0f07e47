"""/v2/embed: vectors of texts or images in up to six forms.

Owner: loop, the handler's task. In: CohereEmbedBody. Out: one JSON body. The body becomes that of /v1/embeddings.

    float    the vector                       base64   its float32 bytes
    int8     round(127 x / max |x|)           uint8    the same + 128
    ubinary  bits x > 0, the first is high    binary   the same - 128

Cohere calibrates int8 with numbers of its own models; here each vector has its own scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import Response

from _fast import base64_text
from server.dialects.cohere.schema import CohereEmbedBody
from server.dialects.names import client_names
from server.errors import invalid, not_here, quoted
from server.http.body import read_json
from server.http.exchange import state_of
from server.pooling.tokens import pooling_of
from server.pooling.vectors import as_json, check_dimensions, finished
from server.routes import embeddings
from server.routes.endpoint import pooling_route
from server.schema.pooling import EmbeddingBody

SIDES = {"START": "left", "END": "right", "NONE": "right"}
NAMES = {"dimensions": "output_dimension", "truncate_prompt_tokens": "max_tokens"}


def int8(vectors: np.ndarray) -> np.ndarray:
    """int16 [inputs, width] from -127 to 127: each vector scaled by its own largest number."""
    largest = np.maximum(np.abs(vectors).max(axis=-1, keepdims=True), np.float32(1e-12))
    return np.rint(127 * vectors / largest).astype(np.int16)


def bits(vectors: np.ndarray) -> np.ndarray:
    """int16 [inputs, ceil(width / 8)] from 0 to 255."""
    return np.packbits(vectors > 0, axis=-1).astype(np.int16)


def base64(vectors: np.ndarray) -> list[Any]:
    """A JSON string for each vector."""
    return [orjson.Fragment(base64_text.quoted(np.ascontiguousarray(one, "<f4").view(np.uint8))) for one in vectors]


FORMS: dict[str, Callable[[np.ndarray], Any]] = {
    "float": np.ascontiguousarray,
    "int8": int8,
    "uint8": lambda vectors: int8(vectors) + 128,
    "binary": lambda vectors: bits(vectors) - 128,
    "ubinary": bits,
    "base64": base64,
}


async def embed(request: Request) -> Response:
    """Vectors in the wanted forms."""
    state = state_of(request)
    body = await read_json(request, CohereEmbedBody, state.config.limits.max_request_bytes, any_type=True)
    config = pooling_of(state)
    if config.tasks[0] != "embed":
        raise not_here("model", f"the served model has {' and '.join(config.tasks)}, and makes no vectors of inputs")
    forms = forms_of(body)
    name, given = given_of(body)
    made = EmbeddingBody(
        model=body.model,
        input=given,
        input_type=body.input_type,
        dimensions=body.output_dimension,
        priority=body.priority,
        **cut_of(body),
    )
    texts = body.texts or []

    def answer(inputs: embeddings.Arrays, passes: list[embeddings.Arrays], about: dict[str, Any]) -> Response:
        dimensions = body.output_dimension or config.usual_dimensions
        vectors = finished(np.stack(passes[0]), config.activation, None, dimensions)
        units = {"input_tokens": about["usage"]["prompt_tokens"]}
        content = {
            "id": about["id"],
            "response_type": "embeddings_by_type",
            "embeddings": {form: FORMS[form](vectors) for form in forms},
            "texts": texts,
            "meta": {"api_version": {"version": "2"}, "billed_units": units},
        }
        return Response(as_json(content), media_type="application/json")

    with client_names({**NAMES, "input": name}):
        check_dimensions(config, body.output_dimension, state.engine.limits.pooled_width)
        made.prompt_name = embeddings.role_of(made, config)
        return await embeddings.answered(request, made, "embd-", [False], answer)


def forms_of(body: CohereEmbedBody) -> list[str]:
    """The wanted forms, each once."""
    forms = ["float"] if body.embedding_types is None else list(dict.fromkeys(body.embedding_types))
    for at, form in enumerate(forms):
        if form not in FORMS:
            text = f"embedding_types[{at}]: got {quoted(form)}; must be one of {', '.join(FORMS)}"
            raise invalid(f"embedding_types[{at}]", text)
    if not forms:
        raise invalid("embedding_types", f"embedding_types: is empty; send at least one of {', '.join(FORMS)}")
    return forms


def given_of(body: CohereEmbedBody) -> tuple[str, list[Any]]:
    """The name of the field with inputs, and the inputs of /v1/embeddings."""
    given = [name for name in ("texts", "images", "inputs") if getattr(body, name)]
    if len(given) != 1:
        got = " and ".join(given) or "none"
        raise invalid("texts", f"texts: send exactly one of texts, images and inputs, with an entry; got {got}")
    if body.images:
        return "images", [{"content": [{"type": "image_url", "image_url": {"url": url}}]} for url in body.images]
    return given[0], list(getattr(body, given[0]))


def cut_of(body: CohereEmbedBody) -> dict[str, Any]:
    """The fields of truncation of /v1/embeddings."""
    side = "END" if body.truncate is None else body.truncate
    if side not in SIDES:
        raise invalid("truncate", f"truncate: got {quoted(side)}; must be NONE, START or END")
    most = None if side == "NONE" else -1
    if body.max_tokens is not None:
        if body.max_tokens < 1 or side == "NONE":
            text = f"max_tokens: got {body.max_tokens}; must be 1 or more, with truncate START or END"
            raise invalid("max_tokens", text)
        most = body.max_tokens
    return {"truncate_prompt_tokens": most, "truncation_side": SIDES[side]}


ROUTES = [pooling_route("/v2/embed", embed)]
