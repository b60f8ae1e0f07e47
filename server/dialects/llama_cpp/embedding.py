"""/embedding: vectors of texts in llama.cpp's form. Owner: loop. In: LlamaEmbeddingBody. Out: a list of objects."""

from __future__ import annotations

from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from server.dialects.llama_cpp.schema import LlamaEmbeddingBody
from server.dialects.names import client_names
from server.errors import not_here
from server.http.body import read_json
from server.http.exchange import state_of
from server.jobs.sampling import in_range
from server.pooling.tokens import pooling_of
from server.pooling.vectors import as_json, finished
from server.routes import embeddings
from server.routes.endpoint import pooling_route
from server.schema.pooling import EmbeddingBody

MOST_NORM = 100
GREATEST = 32760  # of a vector that is scaled by its greatest number, for clients that store 16 bits


async def embedding(request: Request) -> Response:
    """A vector for each input, in a list of one row."""
    state = state_of(request)
    body = await read_json(request, LlamaEmbeddingBody, state.config.limits.max_request_bytes, any_type=True)
    norm = 2 if body.embd_normalize is None else int(in_range("embd_normalize", body.embd_normalize, -1, MOST_NORM))
    config = pooling_of(state)
    if "embed" not in config.tasks or config.layers_first:
        raise not_here("model", f"the served model makes no dense vectors; it has {' and '.join(config.tasks)}")

    def answer(inputs: embeddings.Arrays, passes: list[embeddings.Arrays], about: dict[str, Any]) -> Response:
        lines = scaled(finished(np.stack(passes[0]), config.activation, False, config.usual_dimensions), norm)
        found = [{"index": at, "embedding": line[None]} for at, line in enumerate(lines)]
        return Response(as_json(found), media_type="application/json")

    with client_names({"input": "content"}):
        given: Any = body.content
        made = EmbeddingBody(input=given, model=body.model)
        return await embeddings.answered(request, made, "llama-", [False], answer)


def scaled(lines: np.ndarray, norm: int) -> np.ndarray:
    """Vectors [n, width] with a norm of 1, in llama.cpp's numbering of norms."""
    if norm < 0:
        return lines
    sizes = np.abs(lines)
    if norm == 0:
        lengths = sizes.max(axis=1) / GREATEST
    elif norm == 2:
        lengths = np.sqrt(np.square(lines).sum(axis=1))
    else:
        lengths = np.power(sizes, norm).sum(axis=1) ** (1.0 / norm)
    return lines / np.maximum(lengths, np.float32(1e-12))[:, None].astype(lines.dtype)


ROUTES = [pooling_route("/embedding", embedding)]
