"""/v1/rerank and /v2/rerank, and the answers of /rerank and /score for models of pairs and vectors (API.md section 13):
how well documents answer a query. server/dialects has the routes of /rerank (tei) and of /score (decisions).

Owner: loop. In: one query with many documents, or pairs. Out: a score for each pair; /rerank sorts them, ties by index.
A model that reads both texts at once scores pairs. For a model of vectors, the vectors of the two texts are compared;
or the vectors of their tokens, if `task` is token_embed or the model has only these (server/pooling/pairs).
"""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.base.model_config import PoolingConfig
from server.errors import invalid, not_here, quoted
from server.http.body import read_json
from server.http.exchange import Exchange, exchange_of, state_of
from server.http.watch import client_present, preparing
from server.jobs.sampling import priority_of, salt_of
from server.pooling.conversations import replaced, seen
from server.pooling.pairs import (
    Pairs,
    apart,
    cosines,
    is_parts,
    late,
    prepared,
    products,
    seen_apart,
    seen_together,
    sides,
)
from server.pooling.pictures import check_queries
from server.pooling.pictures import with_pictures as with_rows
from server.pooling.run import PooledAnswer
from server.pooling.tokens import Cut, PooledInputs, cut_of, in_pool_if, pooling_of, refuse_fields_of_messages
from server.pooling.vectors import LARGE, activated, finished, of_tokens
from server.routes.endpoint import gateway_priority, json_response, pooling_route, response_id, served_model
from server.schema.pooling import RerankBody, ScoreBody
from server.state import AppState

SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


async def score(request: Request, body: ScoreBody) -> Response:
    """A score for each pair of a body."""
    state = exchange_of(request).state
    given = [names for names in SIDES if all(getattr(body, name) is not None for name in names)]
    fields = {name for names in SIDES for name in names if getattr(body, name) is not None}
    if len(given) != 1 or len(fields) != 2:
        names = "; or ".join(" and ".join(names) for names in SIDES)
        if len(fields) == 1:
            missing = next(two if one in fields else one for one, two in SIDES if fields & {one, two})
            raise invalid(missing, f"{missing}: is missing, the other side of {fields.pop()}; send {names}")
        raise invalid("queries", f"queries: the two sides of the pairs are missing or named twice; send {names}")
    one, other = given[0]
    most = state.config.pooling.max_documents
    pairs = sides(getattr(body, one), getattr(body, other), one, other, most, sees(state))
    about, scores = await scored(request, body, "score-", pairs, None, body.instruction)
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
    return json_response({**about, "object": "list", "data": data})


async def rerank(request: Request) -> Response:
    """Read the body and sort its documents."""
    return await ranked(
        request, await read_json(request, RerankBody, state_of(request).config.limits.max_request_bytes)
    )


async def ranked(request: Request, body: RerankBody) -> Response:
    """The documents of a body, sorted by score."""
    (about, scores), pairs = await scored_documents(request, body, "documents")
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: body.top_n or None]
    with_documents = body.return_documents is not False
    results = [
        {
            "index": index,
            **({"document": {"text": pairs.documents[index]}} if with_documents else {}),
            "relevance_score": scores[index],
        }
        for index in order
    ]
    return json_response({**about, "results": results})


async def scored_documents(
    request: Request, body: RerankBody, param: str
) -> tuple[tuple[dict[str, Any], list[float]], Pairs]:
    """(The common fields of an answer and the documents' scores, the pairs); `param`: the documents' field."""
    state = exchange_of(request).state
    if body.top_n is not None and body.top_n < 0:
        raise invalid("top_n", f"top_n: got {body.top_n}; must be 0 (all) or more")
    per_document = body.max_tokens_per_doc or None
    if per_document is not None and per_document < 0:
        raise invalid("max_tokens_per_doc", f"max_tokens_per_doc: got {per_document}; must be 0 (no limit) or more")
    if isinstance(body.query, list) and len(body.query) > 1 and not is_parts(body.query):
        raise invalid("query", f"query: got {len(body.query)} texts; at most 1 are allowed")
    pairs = sides(body.query, body.documents, "query", param, state.config.pooling.max_documents, sees(state))
    return await scored(request, body, "rerank-", pairs, per_document, body.instruction), pairs


async def scored(
    request: Request,
    body: ScoreBody | RerankBody,
    prefix: str,
    pairs: Pairs,
    per_document: int | None,
    instruction: str | None,
) -> tuple[dict[str, Any], list[float]]:
    """The common fields of an answer, and the pairs' scores."""
    exchange = exchange_of(request)
    state = exchange.state
    model = await served_model(exchange, body.model)
    name = response_id(prefix, body.request_id, exchange)
    salt, priority = salt_of(body), priority_of(body, state.config, gateway_priority(request))
    cut = cut_of(state, body.truncate_prompt_tokens, body.truncation_side)
    refuse_fields_of_messages(body, "this route has no messages; the model's own template is used")
    if body.normalize is not None:
        raise invalid("normalize", "normalize: send use_activation instead, which is on by default")
    if body.add_special_tokens is False:
        raise invalid(
            "add_special_tokens", "add_special_tokens: special tokens separate the texts of a pair; leave the field out"
        )
    config = pooling_of(state)
    reads_both = config.task == "classify"
    by_tokens = compares_tokens(config, body.task)
    if instruction is not None and not reads_both:
        raise invalid("instruction", "instruction: this model makes vectors; put it before the query's text")
    state.tokenizer.require_texts("query")
    check_queries(config, pairs.parts, len(pairs.queries))
    count = len(pairs.of) if reads_both else len(pairs.queries) + len(pairs.documents)
    async with client_present(request):
        with exchange.hold(count, "inputs"):
            async with preparing(exchange, "pairs"):
                made = await inputs_of(exchange, pairs, cut, per_document, instruction, salt)
            with PooledAnswer(exchange, name) as running:
                arrays = await running.arrays(made, per_token=by_tokens, salt=salt, priority=priority)
    tokens = sum(map(len, made.ids))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    about = {"id": name, "created": int(time.time()), "model": model, "usage": usage}
    large = sum(array.size for array in arrays) > LARGE
    if by_tokens:
        return about, await in_pool_if(large, state, lambda: by_maxsim(config, made.ids, arrays, pairs, body))
    if not reads_both:
        if config.layers_first:
            return about, await in_pool_if(large, state, lambda: by_weights(config, arrays, pairs))
        return about, cosines(arrays, pairs)
    return about, [float(finished(array, config.activation, body.use_activation, None)[0]) for array in arrays]


def compares_tokens(config: PoolingConfig, task: str | None) -> bool:
    """Whether texts are compared token by token; raises 400 or 501 if the model cannot do so."""
    if config.task == "classify" and config.tokens_only:
        raise not_here(
            "model", "the served model returns classes of tokens; scores need a model of pairs or of vectors"
        )
    if task is None:
        return config.tokens_only
    known = [known for known in config.tasks if known in ("embed", "token_embed")] or ["classify"]
    if task not in known:
        raise invalid("task", f"task: got {quoted(task)}; this model compares by {' and '.join(known)}")
    return task == "token_embed"


def by_weights(config: PoolingConfig, arrays: list[Any], pairs: Pairs) -> list[float]:
    """The product or cosine of each pair's vocabulary weights (pool)."""
    compare = products if config.compares_products else cosines
    return compare([activated(array, config.activation) for array in arrays], pairs)


def by_maxsim(
    config: PoolingConfig, inputs: list[Any], arrays: list[Any], pairs: Pairs, body: ScoreBody | RerankBody
) -> list[float]:
    """MaxSim scores from the engine's vectors of the texts' tokens (pool)."""
    activation = config.heads_of_tokens["token_embed"].activation
    roles = ["query"] * len(pairs.queries) + ["document"] * len(pairs.documents)
    kept = [of_tokens(lines, ids, config, "token_embed", role) for lines, ids, role in zip(arrays, inputs, roles)]
    return late([finished(lines, activation, body.use_activation, None) for lines in kept], pairs)


def sees(state: AppState) -> bool:
    """Whether items may have media; a classifier of the tokenizer's pairs reads only texts."""
    config = pooling_of(state)
    return state.media is not None and (config.task == "embed" or config.template in ("chat", "qwen3_vl", "jina_vl"))


async def inputs_of(
    exchange: Exchange, pairs: Pairs, cut: Cut, per_document: int | None, instruction: str | None, salt: str
) -> PooledInputs:
    """Token ids of all inputs, and further data for the engine."""
    state, config = exchange.state, pooling_of(exchange.state)
    size = sum(map(len, pairs.documents)) + sum(map(len, pairs.queries))
    large = size > state.config.limits.tokenize_offload_bytes or bool(config.template) or config.messages
    if config.task == "embed":
        made = await in_pool_if(large, state, lambda: apart(state, config, pairs, cut, per_document))
    else:
        made = await in_pool_if(large, state, lambda: prepared(state, config, pairs, cut, per_document, instruction))
    if not pairs.parts:
        return made
    if config.one_each:
        return await with_rows(exchange, made, pairs.parts, cut, salt)
    found = await seen(exchange, pairs.parts, salt)
    insert = seen_apart if config.task == "embed" else seen_together
    return await in_pool_if(True, state, lambda: replaced(made, insert(state, config, pairs, found, cut, instruction)))


ROUTES = [pooling_route(path, rerank) for path in ("/v1/rerank", "/v2/rerank")]
