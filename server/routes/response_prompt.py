"""The prompt of a response: earlier turns and new items become a conversation, and the conversation becomes a Job.

Owner: loop; items are read in the pool. In: InputBody, and the turn that it continues. Out: a Job, and the new turn.
With truncation "auto" the oldest items are left out until the prompt fits.
"""

from __future__ import annotations

import asyncio

import orjson

from server.errors import ApiError, invalid, not_found
from server.http.exchange import Exchange
from server.http.watch import preparing
from server.jobs.job import Job, media_preload, prepare
from server.jobs.sampling import Asked
from server.output.response_store import Turn
from server.render.chat import Renderer
from server.render.conversation import Conversation
from server.render.errors import RenderError
from server.render.items import as_items, read_items, references, resolved
from server.routes.stored_responses import missing
from server.routes.tools import ToolTable
from server.schema.responses import InputBody
from server.state import AppState


def earlier(state: AppState, key: str, name: str | None) -> Turn | None:
    """The turn that the new one continues."""
    if name is None:
        return None
    entry = state.responses.get(key, name)
    if entry is None:
        raise not_found(f"previous_response_id: {missing(name)}", "previous_response_id")
    if entry.running is not None:
        raise invalid("previous_response_id", "previous_response_id: that response still runs; wait for its end")
    return entry.turn


async def prompt_of(
    exchange: Exchange,
    body: InputBody,
    parent: Turn | None,
    tools: ToolTable,
    asked: Asked,
    renderer: Renderer,
    priority: int = 0,
    salt: str = "",
    keeps: bool = False,
) -> tuple[Turn, Job]:
    """The Job of a response's items with their media, and the new turn; errors name the client's own fields."""
    state = exchange.state
    named = state.responses.items(exchange.key_name, references(as_items(body.input)))

    def read() -> tuple[Conversation, Turn]:
        before = parent.items() if parent else []
        conversation = read_items(body.instructions, before, body.input, named)
        conversation.root = "input"
        inputs = orjson.dumps(resolved(body.input, named)) if keeps else b"[]"
        return conversation, Turn(inputs, parent)

    async with preparing(exchange):
        conversation, turn = await asyncio.get_running_loop().run_in_executor(state.pool, read)
        await conversation.settle(state.renderer)
        cuts = conversation.cuts() if body.truncation == "auto" else iter((conversation,))
        too_long: Exception | None = None
        for shorter in cuts:
            try:
                return turn, await render(exchange, shorter, body, tools, asked, renderer, priority, salt)
            except (RenderError, ApiError) as error:
                if error.reason != "context_length_exceeded":
                    raise
                too_long = error
        assert too_long is not None
        raise too_long


async def render(
    exchange: Exchange,
    conversation: Conversation,
    body: InputBody,
    tools: ToolTable,
    asked: Asked,
    renderer: Renderer,
    priority: int,
    salt: str,
) -> Job:
    effort = body.reasoning.effort if body.reasoning else None
    said = {"reasoning_effort": effort, "enable_thinking": effort != "none"} if effort is not None else {}
    kwargs = {**said, **(body.chat_template_kwargs or {})}
    messages = conversation.messages()
    with conversation.client_paths():
        async with media_preload(exchange, salt) as preload:
            await preload.begin(renderer.embedded(messages))
            prompt = await renderer.chat(messages, tools=tools.offered, template_kwargs=kwargs)
            return await prepare(exchange, prompt, asked, salt=salt, priority=priority, param="input", preload=preload)
