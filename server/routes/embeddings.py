"""/v1/embeddings, /pooling and /classify: an array for each input (API.md section 13).

Owner: loop. In: texts, token ids or a conversation. Out: vectors, token-wise matrices or classes, as JSON or as bytes.

    body -> token ids (server/pooling/tokens) -> the engine (run) -> activation, fewer dimensions (vectors) -> answer
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from engine.base.model_config import PoolingConfig
from server.errors import invalid, not_here, quoted
from server.http.body import read_json
from server.http.exchange import Exchange, exchange_of
from server.http.watch import client_present, preparing
from server.jobs.job import media_preload, with_media
from server.jobs.sampling import priority_of, salt_of
from server.pooling.conversations import Conversations, Parts, message, messages_of, replaced, seen
from server.pooling.pairs import INSTEAD, items
from server.pooling.pictures import check_queries, text_or_picture, with_pictures
from server.pooling.roles import prompt_named
from server.pooling.run import PooledAnswer
from server.pooling.tokens import (
    WITH_MEDIA,
    Cut,
    PooledInputs,
    cut_of,
    in_pool_if,
    inputs_of,
    no_room,
    pooling_of,
    refuse_fields_of_messages,
    tokenized,
    where,
)
from server.pooling.vectors import LARGE, as_bytes, as_json, check_dimensions, finished, format_of, of_tokens, written
from server.routes.endpoint import gateway_priority, one_of, pooling_route, response_id, served_model
from server.schema.pooling import ClassifyBody, EmbeddingBody, PoolingBody, VectorsBody
from server.state import AppState

Body = TypeVar("Body", bound=ClassifyBody)
Arrays = list[np.ndarray]  # one array per input
Answering = Callable[[Arrays, list[Arrays], dict[str, Any]], Response]  # (token ids, arrays per pass, fields)
TASKS = ("embed", "classify", "token_embed", "token_classify", "embed&token_classify")


async def embeddings(request: Request) -> Response:
    """A vector for each input."""
    return await vectors(request, VectorsBody, "embd-", "embedding")


async def pooling(request: Request) -> Response:
    """The model's vector or scores for each input, or for each of its tokens."""
    return await vectors(request, PoolingBody, "pool-", "data")


async def vectors(request: Request, kind: type[EmbeddingBody], prefix: str, key: str) -> Response:
    """The handler of both routes; `key` is an array's field in the answer."""
    state = exchange_of(request).state
    body = await read_json(request, kind, state.config.limits.max_request_bytes)
    tasks = tasks_of(state, body)
    config = pooling_of(state)
    body.prompt_name = role_of(body, config)
    form, dtype = format_of(body.encoding_format, body.embed_dtype, body.endianness)
    check_dimensions(config, body.dimensions, state.engine.limits.pooled_width)

    role = body.prompt_name or config.default_prompt or ""

    def made_of(task: str, inputs: Arrays, arrays: Arrays) -> Arrays:
        head = config.heads_of_tokens.get(task)
        if head is None:  # all in one call of NumPy, as a call takes longer than a vector's arithmetic
            dimensions = body.dimensions or config.usual_dimensions
            return list(finished(np.stack(arrays), config.activation, body.use_activation, dimensions))
        ending = head.activation, body.use_activation, body.dimensions
        return [finished(of_tokens(lines, ids, config, task, role), *ending) for lines, ids in zip(arrays, inputs)]

    def answer(inputs: Arrays, passes: list[Arrays], about: dict[str, Any]) -> Response:
        made, *more = [made_of(task, inputs, arrays) for task, arrays in zip(tasks, passes)]
        if more:  # the numbers of one task follow those of the other
            made = [np.concatenate([part.reshape(-1) for part in parts]) for parts in zip(made, *more)]
        if form == "bytes":
            content, metadata = as_bytes(made, dtype, about)
            headers = {"metadata": metadata.decode("ascii")}
            return Response(content, media_type="application/octet-stream", headers=headers)
        word = "embedding" if key == "embedding" else "pooling"
        data = [{"index": k, "object": word, key: written(one, form, dtype)} for k, one in enumerate(made)]
        return Response(as_json({**about, "data": data}), media_type="application/json")

    return await answered(request, body, prefix, [task in config.heads_of_tokens for task in tasks], answer)


def role_of(body: EmbeddingBody, config: PoolingConfig) -> str | None:
    """The prompt's name: the request's, or the one for its input_type or task."""
    asked = {"input_type": body.input_type, "task": body.task if isinstance(body, VectorsBody) else None}
    meant = {
        param: prompt_named(param, word, config.prompts, bool(config.adapters))
        for param, word in asked.items()
        if word is not None
    }
    return next(filter(None, meant.values()), None) if body.prompt_name is None else body.prompt_name


def tasks_of(state: AppState, body: EmbeddingBody) -> list[str]:
    """The requested tasks; raises 400 for a task that the model does not have."""
    tasks = pooling_of(state).tasks
    if not isinstance(body, PoolingBody):
        if tasks[0] != "embed":
            made, ask = {
                "token_embed": ("vectors of tokens", "/pooling, /score or /rerank"),
                "token_classify": ("classes of tokens", "/pooling"),
            }.get(tasks[0], ("classes", "/pooling, /classify or /score"))
            raise not_here("model", f"the served model makes {made}, not embeddings of inputs; ask {ask}")
        return ["embed"]
    one_of("task", body.task, TASKS)
    asked = [tasks[0]] if body.task is None else body.task.split("&")
    if not set(asked) <= set(tasks):
        raise invalid("task", f"task: got {quoted(body.task)}; this model has {' and '.join(tasks)}")
    return asked


async def classify(request: Request) -> Response:
    """Classes of each input."""
    state = exchange_of(request).state
    body = await read_json(request, ClassifyBody, state.config.limits.max_request_bytes)
    config = pooling_of(state)
    if config.task != "classify":
        made, ask = ("vectors of tokens", "/pooling") if config.tokens_only else ("embeddings", "/v1/embeddings")
        raise not_here("model", f"the served model makes {made}, not classes; ask {ask}")
    if config.tokens_only:
        raise not_here("model", "the served model makes classes of tokens, not of inputs; ask /pooling")

    def answer(inputs: Arrays, passes: list[Arrays], about: dict[str, Any]) -> Response:
        data = []
        for index, array in enumerate(passes[0]):
            probs = finished(array, config.activation, body.use_activation, None)
            label = config.labels[int(probs.argmax())]
            data.append({"index": index, "label": label, "probs": probs, "num_classes": len(probs)})
        return Response(as_json({**about, "data": data}), media_type="application/json")

    return await answered(request, body, "classify-", [False], answer)


async def answered(
    request: Request, body: ClassifyBody, prefix: str, per_token: list[bool], answer: Answering
) -> Response:
    """Answer a checked body with the response that `answer` makes of the arrays; one pass per entry of `per_token`."""
    exchange = exchange_of(request)
    state = exchange.state
    model = await served_model(exchange, body.model)
    name = response_id(prefix, body.request_id, exchange)
    if body.normalize is not None:
        raise invalid("normalize", "normalize: is called use_activation here, and is on where it is not sent")
    salt, priority = salt_of(body), priority_of(body, state.config, gateway_priority(request))
    count = 1 if body.messages is not None or not isinstance(body.input, list) else len(body.input)
    async with client_present(request):
        with exchange.hold(max(1, min(count, state.config.pooling.max_inputs)), "inputs"):
            async with preparing(exchange, "inputs"):
                made = adapted(pooling_of(state), body.prompt_name, await prepared(exchange, body, salt))
                inputs = made.ids
                check_steps(state, inputs)
            passes = []
            for by_token in per_token:
                with PooledAnswer(exchange, name) as running:
                    passes.append(await running.arrays(made, per_token=by_token, salt=salt, priority=priority))
            tokens = sum(map(len, inputs))
            about = {
                "id": name,
                "object": "list",
                "created": int(time.time()),
                "model": model,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }
            large = sum(array.size for arrays in passes for array in arrays) > LARGE
            return await in_pool_if(large, state, lambda: answer(inputs, passes, about))


def adapted(config: PoolingConfig, name: str | None, made: PooledInputs) -> PooledInputs:
    """The inputs with the adapter for their prompt, if the model has adapters."""
    if not config.adapters:
        return made
    number = config.adapter_of(config.default_prompt if name is None else name)
    return replace(made, adapters=np.full(len(made.ids), number, np.int32))


async def prepared(exchange: Exchange, body: ClassifyBody, salt: str) -> PooledInputs:
    """The token ids of each input."""
    state = exchange.state
    cut = cut_of(state, body.truncate_prompt_tokens, body.truncation_side)
    if body.messages is None:
        refuse_fields_of_messages(body, "is read together with messages only, and this request has input")
        return await inputs_made(exchange, body, cut, salt)
    if body.input is not None:
        raise invalid("input", "input: not together with messages; send one of the two")
    config, opens = pooling_of(state), body.add_generation_prompt
    before = prompt_of(state, body.prompt_name)
    if config.one_each:
        refuse_fields_of_messages(body, "this model reads one text or one picture, without a chat template")
        return await text_or_picture(exchange, body.messages, cut, salt, before, body.prompt_name)
    if body.prompt_name is not None and not config.adapters and (before or body.prompt_name in config.markers):
        raise invalid("prompt_name", "prompt_name: begins texts of input; a conversation holds it in its own messages")
    if opens is None:
        opens = config.messages and config.template_opens_answer and not body.continue_final_message
    prompt = await state.renderer.chat(
        body.messages,
        add_generation_prompt=opens,
        continue_final_message=bool(body.continue_final_message),
        chat_template=body.chat_template,
        template_kwargs=body.chat_template_kwargs,
        add_special_tokens=body.add_special_tokens is True,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=cut.side,
    )
    if not len(prompt):
        raise invalid("messages", "messages: make no tokens; send at least one", "empty_prompt")
    if not prompt.media:
        return PooledInputs([prompt.token_ids])
    async with media_preload(exchange, salt) as preload:
        spliced = await with_media(exchange, prompt, preload)
    if len(spliced.prompt_token_ids) > cut.limit:
        raise no_room(Cut(cut.limit), len(spliced.prompt_token_ids), "messages", WITH_MEDIA)
    return PooledInputs([spliced.prompt_token_ids], media=spliced.media, positions=spliced.positions)


async def inputs_made(exchange: Exchange, body: ClassifyBody, cut: Cut, salt: str) -> PooledInputs:
    """The token ids of each entry of `input`; objects may hold media if the model reads media."""
    state, config = exchange.state, pooling_of(exchange.state)
    given, most = body.input, state.config.pooling.max_inputs
    parts: dict[int, Parts] = {}
    if isinstance(given, list) and any(isinstance(one, dict) for one in given):
        texts, parts = items(given, "input", most, state.media is not None)
        given = [INSTEAD if at in parts else text for at, text in enumerate(texts)]
    inputs = inputs_of(given, most)
    before = prompt_of(state, body.prompt_name)
    if config.messages and isinstance(inputs[0], str):
        made = await in_pool_if(True, state, lambda: as_messages(state, inputs, before, cut))
    else:
        role = body.prompt_name or config.default_prompt or ""
        made = await tokenized(state, inputs, cut, body.add_special_tokens is not False, before, role=role)
    if not parts:
        return made
    if config.one_each:
        check_queries(config, parts, len(inputs) if body.prompt_name == "query" else 0)
        return await with_pictures(exchange, made, parts, cut, salt)
    found, prompts = await seen(exchange, parts, salt), dict.fromkeys(parts, before)
    return await in_pool_if(True, state, lambda: replaced(made, messages_of(state, config, found, parts, prompts, cut)))


def as_messages(state: AppState, texts: Sequence[Any], prompt: str, cut: Cut) -> PooledInputs:
    """Each text as a user's message; the prompt is the system message (pool)."""
    made = Conversations(state, message(prompt), 1, pooling_of(state).template_opens_answer)
    state.tokenizer.require_texts("input")
    return PooledInputs(
        [made.ids([text], cut, None, name := where("input", at, len(texts)), name) for at, text in enumerate(texts)]
    )


def check_steps(state: AppState, inputs: list[np.ndarray]) -> None:
    """Raise 400 for an input without a step token if the model scores steps."""
    tag = pooling_of(state).step_tag
    for at, ids in enumerate(inputs):
        if tag is not None and tag not in ids:
            name = where("input", at, len(inputs))
            raise invalid(name, f"{name}: has no token {tag}, at which the model judges a step; end each step with it")


def prompt_of(state: AppState, name: str | None) -> str:
    """The checkpoint's text before an input, by its name."""
    config = pooling_of(state)
    if name is None:
        return config.prompts.get(config.default_prompt or "", "")
    if name not in config.prompts:
        known = ", ".join(config.prompts) or "none"
        raise invalid("prompt_name", f"prompt_name: got {quoted(name) or 'an empty name'}; this model has {known}")
    return config.prompts[name]


ROUTES = [
    pooling_route("/v1/embeddings", embeddings),
    pooling_route("/pooling", pooling),
    pooling_route("/classify", classify),
]
