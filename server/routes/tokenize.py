"""/tokenize, /detokenize and /tokenizer_info: what the prompt would be, without generating (API.md section 16)."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from server.errors import invalid
from server.http.body import read_json
from server.render.prompt import Prompt
from server.routes.endpoint import check_model, json_response, route
from server.sampling import token_out_of_range
from server.schema.tokenize import DetokenizeBody, TokenizeBody
from server.state import AppState, state_of


async def tokenize(request: Request) -> Response:
    state = state_of(request)
    body = await read_json(request, TokenizeBody, state.config.limits.max_request_bytes)
    check_model(state, body.model)
    prompt = await render(state, body)
    ids = prompt.token_ids.tolist()
    content: dict[str, Any] = {"count": len(ids), "max_model_len": state.engine.max_model_len, "tokens": ids}
    if body.return_token_strs:
        content["token_strs"] = [state.tokenizer.token_of(token) for token in ids]
    return json_response(content)


async def render(state: AppState, body: TokenizeBody) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "send either prompt or messages")
    if body.prompt is not None:
        return await state.renderer.completion(body.prompt, body.add_special_tokens is not False)
    assert body.messages is not None
    open_end = bool(body.continue_final_message)
    return await state.renderer.chat(
        body.messages,
        tools=body.tools,
        add_generation_prompt=not open_end if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=open_end,
        template_kwargs=body.chat_template_kwargs,
        add_special_tokens=bool(body.add_special_tokens),
    )


async def detokenize(request: Request) -> Response:
    state = state_of(request)
    body = await read_json(request, DetokenizeBody, state.config.limits.max_text_request_bytes)
    check_model(state, body.model)
    width = state.vocabulary.width
    for at, token in enumerate(body.tokens):
        if not 0 <= token < width:
            raise token_out_of_range(f"tokens[{at}]", token, width)
    return json_response({"prompt": state.tokenizer.decode(body.tokens)})


async def info(request: Request) -> Response:
    """What a client needs to build the same tokenizer's prompts; no paths."""
    return json_response(state_of(request).tokenizer.info())


ROUTES = [
    route("/tokenize", tokenize, "POST"),
    route("/detokenize", detokenize, "POST"),
    route("/tokenizer_info", info, "GET"),
]
