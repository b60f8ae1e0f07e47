"""/api/embed and /api/embeddings: vectors of texts, over the steps of /v1/embeddings.

Owner: loop. In: OllamaEmbedBody or OllamaEmbeddingsBody. Out: vectors of length 1, whatever the model's activation is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from server.dialects.ollama.names import served_of
from server.dialects.ollama.schema import OllamaEmbedBody, OllamaEmbeddingsBody
from server.http.body import read_json
from server.http.exchange import exchange_of
from server.pooling.tokens import pooling_of
from server.pooling.vectors import activated, as_json, check_dimensions
from server.routes.embeddings import Arrays, answered, tasks_of
from server.routes.endpoint import pooling_route
from server.schema.pooling import VectorsBody

Content = Callable[[list[np.ndarray], int], dict[str, Any]]  # (vectors, tokens of all inputs) -> the answer
WHOLE = -1  # inputs are cut to the context length


async def embed(request: Request) -> Response:
    """A vector for each input."""
    exchange = exchange_of(request)
    state = exchange.state
    body = await read_json(request, OllamaEmbedBody, state.config.limits.max_request_bytes, any_type=True)
    model = await served_of(exchange, body.model)

    def content(vectors: list[np.ndarray], tokens: int) -> dict[str, Any]:
        took = int((time.monotonic() - exchange.arrival) * 1e9)
        times = {"total_duration": took, "load_duration": 0, "prompt_eval_count": tokens}
        return {"model": model, "embeddings": vectors, **times}

    if body.input == []:
        return Response(as_json(content([], 0)), media_type="application/json")
    cut = None if body.truncate is False else WHOLE
    ours = VectorsBody(input=body.input, dimensions=body.dimensions, truncate_prompt_tokens=cut)  # type: ignore[arg-type]
    return await vectors_of(request, ours, content)


async def embeddings(request: Request) -> Response:
    """The vector of a text, by the older route."""
    exchange = exchange_of(request)
    limits = exchange.state.config.limits
    body = await read_json(request, OllamaEmbeddingsBody, limits.max_request_bytes, any_type=True)
    await served_of(exchange, body.model)

    def content(vectors: list[np.ndarray], tokens: int) -> dict[str, Any]:
        return {"embedding": vectors[0]}

    return await vectors_of(request, VectorsBody(input=body.prompt, truncate_prompt_tokens=WHOLE), content)


async def vectors_of(request: Request, body: VectorsBody, content: Content) -> Response:
    """The answer that `content` makes of normalised vectors."""
    state = exchange_of(request).state
    tasks_of(state, body)  # refuses models without vectors of whole inputs
    config = pooling_of(state)
    check_dimensions(config, body.dimensions, state.engine.limits.pooled_width)

    def answer(inputs: Arrays, passes: list[Arrays], about: dict[str, Any]) -> Response:
        stacked = np.stack(passes[0])[..., : body.dimensions or config.usual_dimensions]
        made = content(list(activated(stacked, "normalize")), about["usage"]["prompt_tokens"])
        return Response(as_json(made), media_type="application/json")

    return await answered(request, body, "embd-", [False], answer)


ROUTES = [pooling_route("/api/embed", embed), pooling_route("/api/embeddings", embeddings)]
