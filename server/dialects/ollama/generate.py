"""/api/generate: one prompt through the chat template, as it is with `raw`, or with a `suffix` after the answer.

Owner: loop. In: OllamaGenerateBody. Out: lines of JSON, or one object. An empty prompt asks for the model to be loaded,
which it always is.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from server.dialects.names import client_names
from server.dialects.ollama.asking import Asking, answer
from server.dialects.ollama.conversation import client_paths, content_of
from server.dialects.ollama.frames import response
from server.dialects.ollama.options import NAMES
from server.dialects.ollama.schema import OllamaGenerateBody
from server.errors import invalid, not_here
from server.http.body import read_json
from server.http.exchange import exchange_of
from server.http.watch import preparing
from server.jobs.job import Job, prepare
from server.jobs.sampling import priority_of, resolve, with_ends
from server.render.fim import NO_TOKENS
from server.routes.chat import parsing_for, prepare_chat
from server.routes.chat_fields import check
from server.routes.endpoint import gateway_priority, generating_route
from server.routes.tools import NO_TOOLS
from server.schema.chat import ChatBody
from server.schema.common import SamplingFields

REFUSED = {
    "template": "this server uses the checkpoint's chat template, or --chat-template; leave the field out",
    "context": "this server keeps no conversations by tokens; send the whole conversation to /api/chat",
}


async def generate(request: Request) -> Response | None:
    exchange = exchange_of(request)
    state = exchange.state
    body = await read_json(request, OllamaGenerateBody, state.config.limits.max_request_bytes, any_type=True)
    check_fields(body)
    asking = await Asking.of(exchange, body)
    if not (body.prompt or body.images or body.suffix):
        return asking.loaded(response)
    if body.raw or body.suffix:
        return await continued(request, asking, body)
    ours = ChatBody(messages=messages_of(body), **asking.chat)
    header = gateway_priority(request)
    with client_names(NAMES):
        asked, _ = check(state, ours)

    async def jobs() -> list[Job]:
        with client_paths("prompt"):
            return [asking.within(await prepare_chat(exchange, ours, asked, NO_TOOLS, header), "prompt")]

    parsing = None if state.parsers.is_empty else parsing_for(state, ours, NO_TOOLS)
    return await answer(request, asking, asked, jobs, response, parsing)


def check_fields(body: OllamaGenerateBody) -> None:
    """Refuse what has no effect here, and what contradicts itself."""
    for name, advice in REFUSED.items():
        if getattr(body, name):
            raise invalid(name, f"{name}: {advice}")
    for name in ("raw", "suffix"):
        for other in ("images", "system"):
            if getattr(body, name) and getattr(body, other):
                raise invalid(other, f"{other}: not together with {name}, which needs no chat template; leave one out")


def messages_of(body: OllamaGenerateBody) -> list[dict[str, Any]]:
    """The conversation of a prompt."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    return [*system, {"role": "user", "content": content_of(body.prompt or "", body.images)}]


async def continued(request: Request, asking: Asking, body: OllamaGenerateBody) -> Response | None:
    """Continue the prompt as it is, or fill the gap between prompt and suffix."""
    exchange = exchange_of(request)
    state = exchange.state
    fill_in, suffix = state.renderer.fill_in, body.suffix
    if suffix and fill_in is None:
        raise not_here("suffix", f"suffix: {NO_TOKENS}; leave the field out")
    fields = SamplingFields(**asking.sampling)
    priority = priority_of(fields, state.config, gateway_priority(request))
    with client_names(NAMES):
        asked = resolve(fields, asking.top, fields.max_tokens, state.defaults, state.config, state.vocabulary)

    if suffix and fill_in is not None:
        asked = with_ends(asked, fill_in.ends, state.vocabulary)

    async def jobs() -> list[Job]:
        async with preparing(exchange):
            before = body.prompt or ""
            prompt = await (state.renderer.filled(before, suffix) if suffix else state.renderer.completion(before))
            return [asking.within(await prepare(exchange, prompt, asked, priority=priority, param="prompt"), "prompt")]

    return await answer(request, asking, asked, jobs, response, None)


ROUTES = [generating_route("/api/generate", generate)]
