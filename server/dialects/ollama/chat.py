"""/api/chat: Ollama's conversations over the steps of /v1/chat/completions.

Owner: loop. In: OllamaChatBody. Out: lines of JSON, or one object. A conversation without messages asks for the model
to be loaded, which it always is.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from server.dialects.names import client_names
from server.dialects.ollama.asking import Asking, answer
from server.dialects.ollama.conversation import chat_messages, client_paths
from server.dialects.ollama.frames import message
from server.dialects.ollama.options import NAMES
from server.dialects.ollama.schema import OllamaChatBody
from server.http.body import read_json
from server.http.exchange import exchange_of
from server.jobs.job import Job
from server.routes.chat import parsing_for, prepare_chat
from server.routes.chat_fields import check
from server.routes.endpoint import gateway_priority, generating_route
from server.schema.chat import ChatBody


async def chat(request: Request) -> Response | None:
    exchange = exchange_of(request)
    state = exchange.state
    body = await read_json(request, OllamaChatBody, state.config.limits.max_request_bytes, any_type=True)
    asking = await Asking.of(exchange, body)
    if not body.messages:
        return asking.loaded(message)
    ours = ChatBody(messages=chat_messages(body.messages), tools=body.tools or None, **asking.chat)
    header = gateway_priority(request)
    with client_names(NAMES):
        asked, tools = check(state, ours)

    async def jobs() -> list[Job]:
        with client_paths():
            return [asking.within(await prepare_chat(exchange, ours, asked, tools, header), "messages")]

    parsing = parsing_for(state, ours, tools) if ours.tools or not state.parsers.is_empty else None
    return await answer(request, asking, asked, jobs, message, parsing)


ROUTES = [generating_route("/api/chat", chat)]
