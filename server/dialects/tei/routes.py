"""/embed, /embed_all, /embed_sparse, /predict, /info and /rerank with `texts`.

Owner: loop, the handler's task. In: bodies of this protocol. Out: lists without an envelope. The bodies become those of
our own routes, whose functions compute the arrays; errors have this protocol's form (server/errors.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from server import __version__
from server.dialects.names import client_names
from server.dialects.tei.schema import (
    SharedRerankBody,
    TeiEmbedBody,
    TeiFields,
    TeiPredictBody,
    TeiTokensBody,
)
from server.errors import invalid, not_here, quoted
from server.http.body import read_json
from server.http.exchange import exchange_of, state_of
from server.pooling.tokens import pooling_of
from server.pooling.vectors import activated, as_json, check_dimensions, finished, of_tokens
from server.routes import embeddings, rerank
from server.routes.endpoint import json_response, pooling_route, route
from server.schema.pooling import ClassifyBody, EmbeddingBody
from server.state import AppState

Arrays = embeddings.Arrays
NAMES = {
    "input": "inputs",
    "truncate_prompt_tokens": "truncate",
    "truncation_side": "truncation_direction",
    "use_activation": "raw_scores",
}
POOLING = {"last": "last_token"}  # our words for pooling -> theirs, where they differ


async def embed(request: Request) -> Response:
    """A vector for each input."""
    state = state_of(request)
    body = await read_json(request, TeiEmbedBody, state.config.limits.max_request_bytes, any_type=True)
    config = require(state, "embed", "vectors of inputs")
    if config.layers_first:
        raise not_here("model", "the served model makes weights of the vocabulary; ask /embed_sparse")
    check_dimensions(config, body.dimensions, state.engine.limits.pooled_width)
    dimensions = body.dimensions or config.usual_dimensions

    def answer(inputs: Arrays, passes: list[Arrays], about: dict[str, Any]) -> Response:
        made = finished(np.stack(passes[0]), config.activation, False, dimensions)
        return listed(made if body.normalize is False else activated(made, "normalize"))

    return await answered(request, body, EmbeddingBody, False, answer)


async def embed_all(request: Request) -> Response:
    """A vector for each token of each input, as the model computes it."""
    state = state_of(request)
    body = await read_json(request, TeiTokensBody, state.config.limits.max_request_bytes, any_type=True)
    config = require(state, "token_embed", "vectors of tokens")
    role = body.prompt_name or config.default_prompt or ""

    def answer(inputs: Arrays, passes: list[Arrays], about: dict[str, Any]) -> Response:
        return listed([of_tokens(lines, ids, config, "token_embed", role) for lines, ids in zip(passes[0], inputs)])

    return await answered(request, body, EmbeddingBody, True, answer)


async def embed_sparse(request: Request) -> Response:
    """The weights above 0 of the vocabulary's tokens for each input."""
    state = state_of(request)
    body = await read_json(request, TeiTokensBody, state.config.limits.max_request_bytes, any_type=True)
    config = require(state, "embed", "vectors of inputs")
    if not config.layers_first:
        raise not_here("model", "the served model makes dense vectors; ask /embed")

    def answer(inputs: Arrays, passes: list[Arrays], about: dict[str, Any]) -> Response:
        lines = finished(np.stack(passes[0]), config.activation, None, None)
        return listed([[{"index": at, "value": line[at]} for at in np.flatnonzero(line > 0)] for line in lines])

    return await answered(request, body, EmbeddingBody, False, answer)


async def predict(request: Request) -> Response:
    """The classes of a text, the likeliest first; a list for each text of a batch, which is a list of lists."""
    state = state_of(request)
    body = await read_json(request, TeiPredictBody, state.config.limits.max_request_bytes, any_type=True)
    config = require(state, "classify", "classes of inputs")
    is_batch = isinstance(body.inputs, list) and any(isinstance(each, list) for each in body.inputs)
    texts: Any = texts_of(body.inputs)
    body.inputs = texts

    def labelled(array: np.ndarray) -> list[dict[str, Any]]:
        scores = finished(array, config.activation, False if body.raw_scores else None, None).reshape(-1)
        best = np.argsort(-scores, kind="stable").tolist()
        return [{"score": scores[at], "label": config.labels[at]} for at in best]

    def answer(inputs: Arrays, passes: list[Arrays], about: dict[str, Any]) -> Response:
        found = [labelled(array) for array in passes[0]]
        return listed(found if is_batch else found[0])

    return await answered(request, body, ClassifyBody, False, answer)


async def ranks(request: Request) -> Response:
    """Texts or documents sorted by score; `texts` decides which of two protocols the body speaks."""
    exchange = exchange_of(request)
    limits = exchange.state.config.limits
    body = await read_json(request, SharedRerankBody, limits.max_request_bytes, any_type=True)
    own = ("raw_scores", "return_text", "truncate", "truncation_direction")
    if body.texts is None:
        given = next((name for name in own if getattr(body, name) is not None), None)
        if given is not None:
            raise invalid(given, f"{given}: goes with texts, not with documents")
        if body.documents is None:
            raise invalid("documents", "documents: is missing and required; texts is another name")
        return await rerank.ranked(request, body)
    exchange.protocol = "tei"
    if body.documents is not None:
        raise invalid("documents", "documents: not together with texts; send one of the two")
    body.documents, body.return_documents = list(body.texts), False
    body.truncate_prompt_tokens, body.truncation_side = cut_of(body)
    body.use_activation = False if body.raw_scores else None
    with client_names(NAMES):
        (_, scores), _ = await rerank.scored_documents(request, body, "texts")
    order = sorted(range(len(scores)), key=lambda at: (-scores[at], at))
    texts = body.texts if body.return_text else None
    return json_response(
        [{"index": at, "score": scores[at], **({} if texts is None else {"text": texts[at]})} for at in order]
    )


async def info(request: Request) -> Response:
    """Facts about the served model."""
    state = state_of(request)
    if not state.engine.limits.pools:
        raise not_here("model", "the served model generates text; /about and /v1/models describe it")
    config, model = pooling_of(state), state.engine.model
    if config.task == "classify":
        names = {str(at): name for at, name in enumerate(config.labels)}
        labels = {"id2label": names, "label2id": {name: at for at, name in enumerate(config.labels)}}
        kind: dict[str, Any] = {"reranker" if len(names) == 1 else "classifier": labels}
    else:
        pooled = "splade" if config.layers_first else POOLING.get(config.kind, config.kind)
        kind = {"embedding": {"pooling": pooled}}
    asked = state.config.model.dtype
    return json_response(
        {
            "model_id": state.names[0],
            "model_sha": None,
            "model_dtype": str(model.torch_dtype).removeprefix("torch.") if asked == "auto" else asked,
            "model_type": kind,
            "max_input_length": state.engine.max_model_len,
            "max_batch_tokens": state.engine.config.max_num_batched_tokens,
            "max_concurrent_requests": state.engine.limits.max_open,
            "max_client_batch_size": state.config.pooling.max_inputs,
            "auto_truncate": False,
            "version": __version__,
        }
    )


def require(state: AppState, task: str, what: str) -> Any:
    """The pooling settings of a model that has the task. Raises 501."""
    config = pooling_of(state)
    if task not in config.tasks:
        raise not_here("model", f"the served model makes no {what}; it has {' and '.join(config.tasks)}")
    return config


def texts_of(inputs: Any) -> str | list[str]:
    """A text; or the texts of a batch, which is a list of lists of one text."""
    if isinstance(inputs, str):
        return inputs
    lists = inputs if any(isinstance(each, list) for each in inputs) else [inputs]
    if all(isinstance(each, list) and len(each) == 1 and isinstance(each[0], str) for each in lists):
        return [each[0] for each in lists]
    text = "inputs: must be a text, or a batch as a list of lists of one text; /rerank scores pairs"
    raise invalid("inputs", text)


async def answered(
    request: Request, body: TeiFields, kind: type[ClassifyBody], per_token: bool, answer: embeddings.Answering
) -> Response:
    """The answer to a body of our own routes with the same inputs; errors name this protocol's fields."""
    limit, side = cut_of(body)
    given: Any = body.inputs
    lists = [each for each in given if isinstance(each, list)] if isinstance(given, list) else []
    if any(isinstance(one, str) for each in lists for one in each):
        raise invalid("inputs", "inputs: lists in a list must hold token ids")
    made = kind(input=given, prompt_name=body.prompt_name, truncate_prompt_tokens=limit, truncation_side=side)
    with client_names(NAMES):
        return await embeddings.answered(request, made, "tei-", [per_token], answer)


def cut_of(body: TeiFields | SharedRerankBody) -> tuple[int | None, str | None]:
    """(truncate_prompt_tokens, truncation_side): longer inputs are cut to the context, or refused."""
    side = (body.truncation_direction or "right").lower()
    if side not in ("left", "right"):
        text = f"truncation_direction: got {quoted(body.truncation_direction or '')}; must be left or right"
        raise invalid("truncation_direction", text)
    return (-1 if body.truncate else None), side


def listed(content: Any) -> Response:
    return Response(as_json(content), media_type="application/json")


ROUTES = [
    pooling_route("/embed", embed),
    pooling_route("/embed_all", embed_all),
    pooling_route("/embed_sparse", embed_sparse),
    pooling_route("/predict", predict),
    pooling_route("/rerank", ranks),
    route("/info", info, "GET"),
]
