"""/v1/chat/completions (API.md sections 4, 5, 9): validate, render, submit, stream or gather.

Owner: loop. In: ChatBody. Out: one JSON body, or chunks pushed as the engine makes tokens. Features of the API that
this server does not have are refused by name before any work is done.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from server.answers.answer import Answer
from server.answers.respond import answer_with, json_body
from server.http.body import read_json
from server.http.exchange import Exchange, exchange_of
from server.http.watch import preparing
from server.jobs import media_options, prompt_rows
from server.jobs.job import Job, media_preload, prepare
from server.jobs.media_preload import MediaPreload
from server.jobs.sampling import Asked, priority_of, salt_of
from server.output.parser import Parsing
from server.render.prompt import Prompt
from server.routes.chat_answer import echo_of, num_top, text_of, whole
from server.routes.chat_fields import check, names_function
from server.routes.chunks import ChatChunks, ChatExtras
from server.routes.endpoint import gateway_priority, generating_route, names_of, response_id, served_model, side_of
from server.routes.tools import ToolTable
from server.schema.chat import ChatBody
from server.state import AppState


async def create(request: Request) -> Response | None:
    exchange = exchange_of(request)
    state = exchange.state
    body = await read_json(request, ChatBody, state.config.limits.max_request_bytes)
    model = await served_model(exchange, body.model)
    asked, tools = check(state, body)
    name = response_id("chatcmpl-", body.request_id, exchange)
    names, header = names_of(state, body), gateway_priority(request)

    async def jobs() -> list[Job]:
        return [await prepare_chat(exchange, body, asked, tools, header)]

    def frames(answer: Answer) -> ChatChunks:
        chat = state.config.chat
        named = names_function(body.tool_choice)
        echo = echo_of(state, body) if body.echo else ""
        shown = ChatExtras(names, num_top(body), chat.response_role, echo, chat.reasoning_field, named)
        return ChatChunks(answer, name, model, bool(body.return_token_ids), shown)

    async def response(answer: Answer) -> Response:
        return await json_body(answer, partial(whole, answer, body, name, model, names))

    parsing = parsing_for(state, body, tools) if body.tools or not state.parsers.is_empty else None
    return await answer_with(
        request,
        asked,
        jobs,
        frames,
        response,
        name=name,
        skip_special_tokens=body.skip_special_tokens is not False,
        parsing=parsing,
    )


def parsing_for(state: AppState, body: ChatBody, tools: ToolTable) -> Parsing | None:
    """The parsing of the answer's text."""
    return tools.parsing(
        state,
        continued=text_of(body.messages[-1]) if body.continue_final_message else None,
        shows_special=body.skip_special_tokens is False,
        shows_reasoning=body.include_reasoning is not False,
    )


async def prepare_chat(exchange: Exchange, body: ChatBody, asked: Asked, tools: ToolTable, header: str = "") -> Job:
    """The conversation as a Job; `header` is X-Vllm-Priority."""
    state, preload = exchange.state, None
    salt = "" if body.cache_salt is None else salt_of(body)
    if any(isinstance(message.get("content"), list) for message in body.messages):
        preload = media_preload(exchange, salt, media_options.of_request(state, body))
    async with preparing(exchange), preload or nullcontext():
        prompt = await render(state, body, tools, preload)
        priority = priority_of(body, state.config, header) if body.priority or header else 0
        return await prepare(exchange, prompt, asked, salt=salt, priority=priority, preload=preload)


async def render(state: AppState, body: ChatBody, tools: ToolTable, preload: MediaPreload | None) -> Prompt:
    """Render the conversation. Media start first: decoding takes longer than the text, and the pool runs in order.

    `preload` None: no message has parts, so there are no media.
    """
    kwargs: dict[str, Any] = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
        kwargs.setdefault("enable_thinking", body.reasoning_effort != "none")
    marks, generate = None, body.add_generation_prompt
    if preload is not None:
        marks = await prompt_rows.marked(state, body)
        await preload.begin(state.renderer.embedded(body.messages))
    return await state.renderer.chat(
        body.messages,
        tools=tools.offered,
        documents=body.documents,
        # On by default, unless the last message is to be continued; the renderer refuses both together.
        add_generation_prompt=not body.continue_final_message if generate is None else generate,
        continue_final_message=bool(body.continue_final_message),
        template_kwargs=kwargs,
        chat_template=body.chat_template,
        add_special_tokens=bool(body.add_special_tokens),
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side="left" if body.truncation_side is None else side_of(body.truncation_side),
        marks=marks,
    )


ROUTES = [generating_route("/v1/chat/completions", create)]
