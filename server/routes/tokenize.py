"""/tokenize, /detokenize and /tokenizer_info: the tokens of a prompt, without generating (API.md section 16).

Owner: loop; long lists of ids are checked, decoded and formatted in the pool. In: TokenizeBody or DetokenizeBody, in
our form or in llama.cpp's. Out: one JSON body. Both routes hold a place while they work, like a request that generates.
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
OF_CONTENT = ("add_special", "parse_special", "with_pieces")  # options of llama.cpp's clients


async def tokenize(request: Request) -> Response:
    exchange = exchange_of(request)
    state = exchange.state
    body = await read_json(request, TokenizeBody, state.config.limits.max_request_bytes, any_type=True)
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
    listed = [{"id": token, "piece": piece_of(state, token)} for token in ids] if body.with_pieces else ids
    content: dict[str, Any] = {"count": len(ids), "max_model_len": state.engine.max_model_len, "tokens": listed}
    if body.return_token_strs:
        content["token_strs"] = [state.tokenizer.token_of(token) for token in ids]
    return orjson.dumps(content)


def piece_of(state: AppState, token: int) -> str | list[int]:
    """A token's text, or its bytes if they are no whole characters."""
    data = state.tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def ids_of(state: AppState, body: TokenizeBody) -> np.ndarray:
    """int32 ids; they may exceed the context, since clients use this to count them."""
    if sum(given is not None for given in (body.prompt, body.messages, body.content)) != 1:
        raise invalid("prompt", "prompt: send exactly one of prompt, messages and content")
    if body.content is None:
        for name in OF_CONTENT:
            if getattr(body, name) is not None:
                raise invalid(name, f"{name}: goes with content; with prompt or messages send add_special_tokens")
    if (text := body.prompt) is not None:
        special = body.add_special_tokens is not False
        return await ids_in_text(state, text, "prompt", special)
    if (text := body.content) is not None:
        return await ids_in_text(state, text, "content", body.add_special is True, body.parse_special is not False)
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


async def ids_in_text(state: AppState, text: str, param: str, special: bool, parses: bool = True) -> np.ndarray:
    """The ids of a bare text. `special`: with the tokens that the tokenizer adds; `parses`: spellings of special tokens
    in the text are tokens.
    """
    state.tokenizer.require_texts(param)
    require_counted(state, len(text), param)  # before the text is encoded: it may have 60 MB

    def work() -> np.ndarray:
        state.renderer.media.refuse_in_text(text, param)
        require_counted(state, len(text.encode()), param)
        if parses:
            return id_array(state.tokenizer.encode(text, special))
        return id_array(state.tokenizer.encode_segments([(text, True)], special))

    return await in_pool_if_long(state, len(text) // 4, work)


def require_counted(state: AppState, size: int, param: str) -> None:
    """Raise if a text has more bytes than this server counts."""
    most = state.renderer.config.prompt_bytes
    if size > most:
        note = f" (estimated from {size} bytes; at most {most} are counted)"
        raise context_error(state.engine.max_model_len, -(-size // 16), param, note)


async def detokenize(request: Request) -> Response:
    exchange = exchange_of(request)
    state = exchange.state
    body = await read_json(request, DetokenizeBody, state.config.limits.max_text_request_bytes, any_type=True)
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
        text = state.tokenizer.decode(tokens)
        return orjson.dumps({"prompt": text, "content": text})  # the names of vLLM's clients and of llama.cpp's
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
