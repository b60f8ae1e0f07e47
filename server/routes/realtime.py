"""/v1/realtime (API.md section 15): transcription sessions over a WebSocket, in the form of OpenAI's.

Owner: loop. In: a socket that has passed the checks of the edge. Out: a session (server/speech/realtime), or a refusal
with its status before the socket is accepted.
"""

from __future__ import annotations

from urllib.parse import parse_qs

from starlette.types import Receive, Scope

from server.errors import invalid, not_here
from server.http.exchange import Exchange
from server.routes.audio import task_of
from server.routes.endpoint import POOLS, check_model, served_model
from server.schema.audio import TranscriptionForm
from server.speech.choose import transcriber_of
from server.speech.realtime import RealtimeSession
from server.speech.transcriber import Task

PATH = "/v1/realtime"


async def realtime(exchange: Exchange, scope: Scope, receive: Receive) -> None:
    """Serve a session until the client disconnects."""
    exchange.route = PATH
    if exchange.state.engine.limits.pools:
        raise not_here(None, POOLS)
    query = parse_qs(scope["query_string"].decode("latin-1"))
    intent = query.get("intent", ["transcription"])[-1]
    if intent != "transcription":
        raise invalid("intent", "intent: this server holds transcription sessions only; leave it out")
    named = query.get("model")
    form = TranscriptionForm(model=named[-1] if named else exchange.state.names[0])
    chosen = await served_model(exchange, form.model)

    def checked(form: TranscriptionForm) -> Task:
        named = check_model(exchange.state, form.model)
        if named != chosen and (exchange.adapter is not None or named not in exchange.state.names):
            raise invalid("model", f"model: this session is served by {chosen}; open another for another model")
        task = task_of(exchange, form, "")
        transcriber_of(exchange, task)  # raises if the model takes no audio, or not in this way
        return task

    checked(form)
    client = exchange.client
    with exchange.state.sessions.hold(client):
        await receive()  # websocket.connect
        await exchange.accept(scope)
        await RealtimeSession(exchange, receive, form, checked, client).run()
