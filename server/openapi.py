"""The description of the API: /openapi.json from the types of schema/, and /docs, a page made of the same.

Owner: loop, built once at the first request. In: the route table below and msgspec's JSON schemas. Out: OpenAPI 3.1 as
a dict, and one HTML page without scripts that needs no other server. A test compares the table with the routes.
"""

from __future__ import annotations

import html
import json
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from server import __version__
from server.errors import TYPES
from server.schema.audio import TranscriptionForm, TranslationForm
from server.schema.chat import ChatBody
from server.schema.completion import CompletionBody
from server.schema.generate import GenerateBody
from server.schema.messages import CountBody, MessagesBody
from server.schema.pooling import ClassifyBody, PoolingBody, RerankBody, ScoreBody, VectorsBody
from server.schema.responses import InputBody, ResponsesBody
from server.schema.tokenize import AbortBody, DetokenizeBody, TokenizeBody

REFERENCE = "#/components/schemas/{name}"
READ = (200, 400, 401, 403, 404, 421, 429, 431, 500, 503)
WORK = (*READ, 408, 413, 415, 422, 501, 504)


@dataclass(frozen=True, slots=True)
class Operation:
    """One line of the table."""

    summary: str
    body: type[msgspec.Struct] | None = None
    streams: bool = False
    media: str = "application/json"  # of the answer
    statuses: tuple[int, ...] = READ
    query: tuple[str, ...] = ()
    sent_as: str = "application/json"


def work(summary: str, body: type[msgspec.Struct], streams: bool = False) -> Operation:
    return Operation(summary, body, streams, statuses=WORK)


def upload(summary: str, form: type[msgspec.Struct]) -> Operation:
    return Operation(summary, form, streams=True, statuses=WORK, sent_as="multipart/form-data")


TABLE: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): work("Answer a conversation", ChatBody, True),
    ("POST", "/v1/completions"): work("Continue texts or token ids", CompletionBody, True),
    ("POST", "/v1/audio/transcriptions"): upload("Transcribe a recording", TranscriptionForm),
    ("POST", "/v1/audio/translations"): upload("Translate a recording into English", TranslationForm),
    ("POST", "/v1/messages"): work("Answer a conversation, in the Anthropic protocol", MessagesBody, True),
    ("POST", "/v1/messages/count_tokens"): work("Count the tokens of a conversation", CountBody),
    ("POST", "/v1/responses"): work("Answer, and keep the answer", ResponsesBody, True),
    ("GET", "/v1/responses/{id}"): Operation("A stored response", streams=True, query=("stream", "starting_after")),
    ("DELETE", "/v1/responses/{id}"): Operation("Forget a stored response"),
    ("GET", "/v1/responses/{id}/input_items"): Operation(
        "What a stored response answers", query=("after", "limit", "order")
    ),
    ("POST", "/v1/responses/input_tokens"): work("Count the tokens of a response's input", InputBody),
    ("POST", "/v1/responses/{id}/cancel"): Operation("End a response that is being made"),
    ("GET", "/v1/models"): Operation("The names of the served model"),
    ("GET", "/v1/models/{id}"): Operation("One of them"),
    ("GET", "/model_info"): Operation("The first name in the words of SGLang's router"),
    ("GET", "/get_server_info"): Operation("The same, where that router looks first"),
    ("POST", "/tokenize"): work("Text or conversation to token ids", TokenizeBody),
    ("POST", "/detokenize"): work("Token ids to text", DetokenizeBody),
    ("GET", "/tokenizer_info"): Operation("The tokenizer's settings"),
    ("POST", "/v1/chat/completions/render"): work("A conversation as token ids, not answered", ChatBody),
    ("POST", "/v1/completions/render"): work("Texts as token ids, not continued", CompletionBody),
    ("POST", "/inference/v1/generate"): work("Token ids in, token ids out", GenerateBody, True),
    ("POST", "/abort_requests"): work("End answers by their ids", AbortBody),
    ("GET", "/health"): Operation("Ready for work", media="text/plain"),
    ("GET", "/health/ready"): Operation("Ready for work", media="text/plain"),
    ("GET", "/health/live"): Operation("Alive", media="text/plain"),
    ("GET", "/ping"): Operation("Ready for work", media="text/plain"),
    ("POST", "/ping"): Operation("Ready for work", media="text/plain"),
    ("GET", "/"): Operation("The chat page; with --disable-playground name and version", media="text/html"),
    ("GET", "/playground/{digest}/{name}"): Operation("The chat page's files", media="text/javascript"),
    ("GET", "/about"): Operation("What the chat page shows of the model"),
    ("GET", "/version"): Operation("Version"),
    ("GET", "/load"): Operation("Choices that are prepared, wait or run"),
    ("GET", "/metrics"): Operation("Prometheus text", media="text/plain"),
    ("GET", "/openapi.json"): Operation("This description"),
    ("GET", "/docs"): Operation("This description, to read", media="text/html"),
    ("GET", "/docs/"): Operation("The pages for users", media="text/html"),
    ("GET", "/docs/{name}"): Operation("One page for users", media="text/html"),
    ("POST", "/v1/embeddings"): work("Vectors of texts", VectorsBody),
    ("POST", "/pooling"): work("What a pooling model makes of texts, or of their tokens", PoolingBody),
    ("POST", "/classify"): work("Classes of texts", ClassifyBody),
    ("POST", "/score"): work("Scores of pairs", ScoreBody),
    ("POST", "/v1/score"): work("Scores of pairs", ScoreBody),
    ("POST", "/rerank"): work("Documents by how well they answer a query", RerankBody),
    ("POST", "/v1/rerank"): work("Documents by how well they answer a query", RerankBody),
    ("POST", "/v2/rerank"): work("Documents by how well they answer a query", RerankBody),
}


def openapi(root_path: str = "") -> dict[str, Any]:
    """The whole document; `root_path` is where a proxy mounts this server."""
    bodies = list({operation.body: None for operation in TABLE.values() if operation.body is not None})
    _, schemas = msgspec.json.schema_components(bodies, ref_template=REFERENCE)
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in TABLE.items():
        paths.setdefault(path, {})[method.lower()] = described(path, operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "omniloop", "version": __version__},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {"schemas": {**schemas, "Error": ERROR}, "securitySchemes": SECURITY},
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def described(path: str, operation: Operation) -> dict[str, Any]:
    """One operation object."""
    found: dict[str, Any] = {"summary": operation.summary, "responses": answers(operation)}
    for name in re.findall(r"{(\w+)}", path):
        place = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        found.setdefault("parameters", []).append(place)
    for name in operation.query:
        found.setdefault("parameters", []).append({"name": name, "in": "query", "schema": {"type": "string"}})
    if operation.body is not None:
        schema: dict[str, Any] = {"$ref": REFERENCE.format(name=operation.body.__name__)}
        if operation.sent_as != "application/json":  # the file is no field of the type
            schema = {"allOf": [schema, UPLOAD]}
        found["requestBody"] = {"required": True, "content": {operation.sent_as: {"schema": schema}}}
    return found


def answers(operation: Operation) -> dict[str, Any]:
    """By status: the answer itself, and the errors it can be."""
    found: dict[str, Any] = {}
    for status in sorted(operation.statuses):
        if status == 200:
            content: dict[str, Any] = {operation.media: {}}
            if operation.streams:
                content["text/event-stream"] = {}
            found["200"] = {"description": operation.summary, "content": content}
        else:
            schema = {"$ref": REFERENCE.format(name="Error")}
            text = TYPES.get(status, "Error")
            found[str(status)] = {"description": text, "content": {"application/json": {"schema": schema}}}
    return found


UPLOAD = {
    "type": "object",
    "properties": {"file": {"type": "string", "contentMediaType": "application/octet-stream"}},
    "required": ["file"],
}
ERROR = {
    "title": "Error",
    "type": "object",
    "description": "What every refusal looks like; /v1/messages has its own protocol's form.",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "code": {"type": "integer"},
                "reason": {"type": "string"},
            },
        }
    },
}
SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def page(document: dict[str, Any]) -> str:
    """The document to read: operations, and the fields of every body."""
    parts = [HEAD]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<section><h2><b>{method.upper()}</b> {html.escape(path)}</h2>")
            parts.append(f"<p>{html.escape(operation['summary'])}</p>")
            if "requestBody" in operation:
                ((_, sent),) = operation["requestBody"]["content"].items()
                name = sent["schema"].get("allOf", [sent["schema"]])[0]["$ref"].rpartition("/")[2]
                parts.append(f'<p>Body: <a href="#{name}">{name}</a></p>')
            parts.append(f"<p>Answers: {', '.join(operation['responses'])}</p></section>")
    for name, schema in document["components"]["schemas"].items():
        parts.append(f'<section id="{name}"><h2>{name}</h2><p>{html.escape(schema.get("description", ""))}</p><table>')
        required = schema.get("required", ())
        for field, kind in schema.get("properties", {}).items():
            mark = " (required)" if field in required else ""
            parts.append(f"<tr><td>{field}{mark}</td><td>{worded(kind)}</td></tr>")
        parts.append("</table></section>")
    return "".join(parts)


def worded(kind: dict[str, Any]) -> str:
    """A type in words."""
    if "anyOf" in kind:
        return " or ".join(worded(one) for one in kind["anyOf"] if one.get("type") != "null")
    if "$ref" in kind:
        name = kind["$ref"].rpartition("/")[2]
        return f'<a href="#{name}">{name}</a>'
    if "enum" in kind:
        return " or ".join(html.escape(json.dumps(one)) for one in kind["enum"] if one is not None)
    if kind.get("type") == "array":
        return f"list of {worded(kind['items'])}" if kind.get("items") else "list"
    return html.escape(str(kind.get("type", "anything")))


HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>omniloop: API</title>
<meta name="viewport" content="width=device-width"><style>
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
h2{font-size:1.05rem;margin:1.5rem 0 .2rem}b{display:inline-block;min-width:4.5rem}p{margin:.2rem 0}
td{padding:.1rem 1.5rem .1rem 0;border-bottom:1px solid #ddd;vertical-align:top}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}a{color:#8bf}td{border-color:#444}}
</style><h1>omniloop</h1><p>The same for programs: <a href="openapi.json">openapi.json</a></p>"""
