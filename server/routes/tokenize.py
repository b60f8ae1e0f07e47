"""/tokenize, /detokenize and /tokenizer_info: the tokens of a prompt, without generating (API.md section 16).

Owner: loop; long lists of ids are checked, decoded and formatted in the pool. In: TokenizeBody or DetokenizeBody. Out:
one JSON body. Both routes hold a place while they work, like a request that generates.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import Response

from server.errors import invalid
from server.http.body import read_json
from server.http.exchange import exchange_of, state_of
from server.http.watch import client_present, preparing
from server.jobs.sampling import token_out_of_range
from server.render.prompt import context_error, empty, id_array
from server.routes.chat_fields import check_function
from server.routes.endpoint import check_model, json_response, route
from server.schema.tokenize import DetokenizeBody, TokenizeBody
from server.state import AppState

T = TypeVar("T")


async def tokenize(request: Request) -> Response:
    exchange = exchange_of(request)
    state = exchange.state
    body = await read_json(request, TokenizeBody, state.config.limits.max_request_bytes)
    check_model(state, body.model)
    async with client_present(request):
        with exchange.hold(1, "texts"):
            async with preparing(exchange, "tokens"):
                ids = await ids_of(state, body)
                data = await in_pool_if_long(state, len(ids), lambda: tokens_of(state, body, ids))
    return Response(data, media_type="application/json")


async def in_pool_if_long(state: AppState, count: int, work: Callable[[], T]) -> T:
    """Run `work` on `count` token ids, in the pool if it would block the loop."""
    if 4 * count <= state.config.limits.tokenize_offload_bytes:
        return work()
    return await asyncio.get_running_loop().run_in_executor(state.pool, work)


def tokens_of(state: AppState, body: TokenizeBody, made: np.ndarray) -> bytes:
    ids = made.tolist()
    content: dict[str, Any] = {"count": len(ids), "max_model_len": state.engine.max_model_len, "tokens": ids}
    if body.return_token_strs:
        content["token_strs"] = [state.tokenizer.token_of(token) for token in ids]
    return orjson.dumps(content)


async def ids_of(state: AppState, body: TokenizeBody) -> np.ndarray:
    """int32 ids; they may exceed the context, since clients use this to count them."""
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "send either prompt or messages")
    if (text := body.prompt) is not None:
        state.tokenizer.require_texts("prompt")
        require_counted(state, len(text))  # before the text is encoded: it may have 60 MB
        special = body.add_special_tokens is not False
        return await in_pool_if_long(state, len(text) // 4, lambda: ids_in(state, text, special))
    assert body.messages is not None
    for at, tool in enumerate(body.tools or ()):
        check_function(tool, f"tools[{at}]")
    open_end = bool(body.continue_final_message)
    prompt = await state.renderer.counting().chat(
        body.messages,
        tools=body.tools,
        add_generation_prompt=not open_end if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=open_end,
        template_kwargs=body.chat_template_kwargs,
        chat_template=body.chat_template,
        add_special_tokens=bool(body.add_special_tokens),
    )
    return prompt.token_ids


def ids_in(state: AppState, text: str, special: bool) -> np.ndarray:
    """The ids of a text whose number of characters is within the limit."""
    state.renderer.media.refuse_in_text(text, "prompt")
    require_counted(state, len(text.encode()))
    return id_array(state.tokenizer.encode(text, special))


def require_counted(state: AppState, size: int) -> None:
    """Raise if a text has more bytes than this server counts."""
    most = state.renderer.config.prompt_bytes
    if size > most:
        note = f" (estimated from {size} bytes; at most {most} are counted)"
        raise context_error(state.engine.max_model_len, -(-size // 16), "prompt", note)


async def detokenize(request: Request) -> Response:
    exchange = exchange_of(request)
    state = exchange.state
    body = await read_json(request, DetokenizeBody, state.config.limits.max_text_request_bytes)
    check_model(state, body.model)
    state.tokenizer.require_texts("tokens")
    async with client_present(request):
        with exchange.hold(1, "texts"):
            async with preparing(exchange, "tokens"):
                data = await in_pool_if_long(state, len(body.tokens), lambda: text_of(state, body.tokens))
    return Response(data, media_type="application/json")


def text_of(state: AppState, tokens: list[int]) -> bytes:
    """The answer of /detokenize. Empties the list in pieces, since freeing a long list at once blocks every thread."""
    width = state.vocabulary.width
    try:
        for at, token in enumerate(tokens):
            if not 0 <= token < width:
                raise token_out_of_range(f"tokens[{at}]", token, width)
        return orjson.dumps({"prompt": state.tokenizer.decode(tokens)})
    finally:
        empty(tokens)


async def info(request: Request) -> Response:
    """The settings that a client needs to build the same prompts; no paths."""
    return json_response(state_of(request).tokenizer.info())


ROUTES = [
    route("/tokenize", tokenize, "POST"),
    route("/detokenize", detokenize, "POST"),
    route("/tokenizer_info", info, "GET"),
]
