"""/score and /v1/score: pairs for a model that pools; for a model that generates, probabilities of given tokens.

Owner: loop, the handler's task. In: LabelScoreBody. Out: one JSON body. A prompt is the query followed by an item, or
the item followed by the query, without a chat template. Where a query comes first, it is computed once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from server.dialects.decisions.ask import ONE_STEP, Labelled, is_shared, measured, softmax
from server.dialects.decisions.schema import LabelScoreBody
from server.errors import invalid, not_here
from server.http.body import read_json
from server.http.exchange import Exchange, exchange_of
from server.http.watch import client_present, preparing
from server.jobs.job import prepare
from server.jobs.sampling import priority_of, salt_of, token_ids
from server.render.prompt import Prompt
from server.routes import rerank
from server.routes.endpoint import gateway_priority, json_response, route, served_model, side_of
from server.state import AppState

OWN = ("query", "label_token_ids", "apply_softmax", "item_first")
Joined = str | list[int]


async def score(request: Request) -> Response:
    """Scores by the kind of the served model."""
    state = exchange_of(request).state
    body = await read_json(request, LabelScoreBody, state.config.limits.max_request_bytes, any_type=True)
    if not state.engine.limits.pools:
        return await label_scores(request, body)
    given = next((name for name in OWN if getattr(body, name) is not None), None)
    if given is not None:
        text = f"{given}: is for models that generate; the served model scores pairs, such as text_1 and text_2"
        raise invalid(given, text)
    items = body.items if isinstance(body.items, list) else []
    if any(isinstance(each, int) for item in items for each in (item if isinstance(item, list) else [item])):
        raise invalid("items", "items: token ids are for models that generate; send texts")
    return await rerank.score(request, body)


async def label_scores(request: Request, body: LabelScoreBody) -> Response:
    """The probabilities of the labels behind each prompt."""
    exchange = exchange_of(request)
    state = exchange.state
    model = await served_model(exchange, body.model)
    if body.label_token_ids is None:
        raise not_here("model", "the served model generates text: send query, items and label_token_ids for its scores")
    check_unused(body)
    labels = token_ids("label_token_ids", body.label_token_ids, state.config.limits.max_logprob_ids, state.vocabulary)
    if not labels:
        raise invalid("label_token_ids", "label_token_ids: is empty; send at least one token id")
    as_logits = state.config.model.logprobs_mode.endswith("_logits")
    if as_logits and not body.apply_softmax:
        raise invalid("apply_softmax", "apply_softmax: must be true on a server with --logprobs-mode of logits")
    prompts = prompts_of(state, body)
    async with client_present(request):
        with exchange.hold(len(prompts)):
            async with preparing(exchange, "items"):
                jobs = await labelled(request, body, prompts, labels)
            first, rest = split(state, body, jobs)

            async def later() -> list[Labelled]:
                return rest

            found = await measured(exchange, first, later, f"score-{exchange.request_id}")
    rows = [[one.logprobs[token] for token in labels] for one in found]
    scores = [softmax(row).tolist() if body.apply_softmax else [math.exp(value) for value in row] for row in rows]
    tokens = sum(one.job.num_tokens for one in found)
    cached = {"cached_tokens": sum(one.cached_tokens for one in found)}
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "prompt_tokens_details": cached}
    return json_response({"object": "scoring", "model": model, "scores": scores, "usage": usage})


def check_unused(body: LabelScoreBody) -> None:
    """Refuse fields of pairs, which would have no effect."""
    others = ("text_1", "text_2", "queries", "documents", "data_1", "data_2", "instruction", "task")
    for name in (*others, "use_activation", "normalize"):
        if getattr(body, name) is not None:
            raise invalid(name, f"{name}: is for models that score pairs; the served model takes query and items")


def prompts_of(state: AppState, body: LabelScoreBody) -> list[Joined]:
    """Query and item of each prompt joined: texts, or token ids."""
    query, items = body.query, body.items
    if query is None or items is None:
        name = "query" if query is None else "items"
        raise invalid(name, f"{name}: is missing and required together with label_token_ids")
    listed = items if isinstance(items, list) and not all(isinstance(one, int) for one in items) else [items]
    most = state.config.pooling.max_documents
    if len(listed) > most or items == []:
        raise invalid("items", f"items: got {len(items)}; 1 to {most} are allowed")
    if isinstance(query, str):
        texts = [one for one in listed if isinstance(one, str)]
        if len(texts) < len(listed):
            raise invalid("items", "items: must be texts, as the query is")
        return [text + query if body.item_first else query + text for text in texts]
    ids = [[each for each in one if isinstance(each, int)] for one in listed if isinstance(one, list)]
    if list(map(len, ids)) != [len(one) if isinstance(one, list) else -1 for one in listed]:
        raise invalid("items", "items: must be lists of token ids, as the query is")
    return [one + query if body.item_first else query + one for one in ids]


async def labelled(
    request: Request, body: LabelScoreBody, prompts: Sequence[Joined], labels: Sequence[int]
) -> list[Labelled]:
    """The job of each prompt, with the labels."""
    exchange: Exchange = exchange_of(request)
    state = exchange.state
    salt, priority = salt_of(body), priority_of(body, state.config, gateway_priority(request))
    found: list[Labelled] = []
    for at, text in enumerate(prompts):
        param = "items" if len(prompts) == 1 else f"items[{at}]"
        prompt: Prompt = await state.renderer.completion(
            text,
            body.add_special_tokens is not False,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            truncation_side=side_of(body.truncation_side),
            param=param,
        )
        found.append((await prepare(exchange, prompt, ONE_STEP, salt=salt, priority=priority, param=param), labels))
    return found


def split(state: AppState, body: LabelScoreBody, jobs: list[Labelled]) -> tuple[list[Labelled], list[Labelled]]:
    """The jobs to submit first, and those that find the query in the cache."""
    if body.item_first or len(jobs) == 1:
        return jobs, []
    return (jobs[:1], jobs[1:]) if is_shared(state, common(jobs)) else (jobs, [])


def common(jobs: Sequence[Labelled]) -> int:
    """The number of tokens with which all prompts begin."""
    first = jobs[0][0].request.prompt_token_ids
    size = len(first)
    for job, _ in jobs[1:]:
        ids = job.request.prompt_token_ids[:size]
        differs = (ids != first[: len(ids)]).nonzero()[0]
        size = int(differs[0]) if len(differs) else len(ids)
    return size


ROUTES = [route(path, score, "POST") for path in ("/score", "/v1/score")]
