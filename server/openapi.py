"""The description of the API: /openapi.json, from tables of operations and the types of their bodies and answers.

Owner: loop, built once at the first request. In: the table below, the tables of server/dialects, and msgspec's JSON
schemas. Out: OpenAPI 3.1 as a dict.
Tests compare the table with the routes, and decode each answer with the type in the table. Errors have a type for each
protocol. In tests the types forbid extra fields; the document does not promise this to clients.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from server import __version__
from server.errors import TYPES
from server.schema import answers_audio as audio
from server.schema import answers_chat as chat
from server.schema import answers_messages as messages
from server.schema import answers_pooling as pooling
from server.schema import answers_responses as responses
from server.schema import answers_server as about
from server.schema import answers_tokens as tokens
from server.schema.answers_common import Error, MessagesError, TeiError, TextError
from server.schema.audio import TranscriptionForm, TranslationForm
from server.schema.chat import ChatBody
from server.schema.completion import CompletionBody
from server.schema.examples import ANSWERS, REQUESTS
from server.schema.generate import GenerateBody
from server.schema.messages import CountBody, MessagesBody
from server.schema.pooling import ClassifyBody, PoolingBody, RerankBody, VectorsBody
from server.schema.responses import InputBody, ResponsesBody
from server.schema.tokenize import AbortBody, DetokenizeBody, TokenizeBody

REFERENCE = "#/components/schemas/{name}"
READ = (200, 400, 401, 403, 404, 421, 429, 431, 500, 503)
WORK = (*READ, 408, 413, 415, 422, 501, 504)
JSON = "application/json"
TEXT = "text/plain"
HTML = "text/html"
STREAM = "text/event-stream"
FAULTS: dict[str, type[msgspec.Struct]] = {  # beginning of a path -> the form of its errors
    "/v1/messages": MessagesError, "/api/": TextError, "/embedding": Error, "/embed": TeiError, "/predict": TeiError,
    "/info": TeiError,
}  # fmt: skip

TAGS = {
    "Chat": "Conversations and texts in OpenAI's protocol",
    "Messages": "Conversations in Anthropic's protocol",
    "Responses": "Answers that are stored, in OpenAI's newer protocol",
    "Audio": "Recordings to text",
    "Embeddings": "Vectors, classes, scores: for models that pool",
    "Decisions": "Probabilities of given options, without a generated text",
    "Batches": "Uploaded files, and requests that are answered while no other request needs the engine",
    "Tokens": "Token ids in and out",
    "Models": "What is served",
    "Ollama": "Conversations and vectors in Ollama's protocol",
    "llama.cpp": "Texts and gaps in llama.cpp's protocol",
    "SGLang": "Texts and token ids in SGLang's protocol",
    "Server": "State, numbers and descriptions of the server",
    "Page": "The chat page and its files",
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of the API, a line of the table."""

    id: str
    tag: str
    summary: str
    answer: Any = None  # type of the answer; None: text, or an empty answer
    event: Any = None  # type of a stream's events
    body: type[msgspec.Struct] | None = None
    media: str = JSON  # media type of the answer
    more: tuple[str, ...] = ()  # other media types of the answer
    statuses: tuple[int, ...] = READ
    query: tuple[tuple[str, str, str], ...] = ()  # name, JSON type, description
    sent_as: str = JSON
    stream: str = STREAM  # media type of the stream
    file: str = "The recording: flac, mp3, mp4, m4a, ogg, wav or webm."  # the form's file


def work(
    id: str, tag: str, summary: str, body: type[msgspec.Struct], answer: Any = None, event: Any = None, **more: Any
) -> Operation:
    return Operation(id, tag, summary, answer, event, body, statuses=WORK, **more)


def upload(id: str, summary: str, form: type[msgspec.Struct]) -> Operation:
    return Operation(
        id,
        "Audio",
        summary,
        audio.Transcription,
        audio.SpeechStreamEvent,
        form,
        more=("text/plain", "text/vtt"),
        statuses=WORK,
        sent_as="multipart/form-data",
    )


def text(id: str, summary: str, media: str = TEXT, tag: str = "Server") -> Operation:
    return Operation(id, tag, summary, media=media)


VECTOR_BYTES = ("application/octet-stream",)
FOLLOW = (
    ("stream", "boolean", "Whether the events are sent again, from the first one or from starting_after on."),
    ("starting_after", "integer", "The number of the last event that the client has."),
)
PAGED = (
    ("after", "string", "The id of the item that the page follows."),
    ("limit", "integer", "Most items of the page: 1 to 100, of files 1 to 10000."),
    ("order", "string", "asc or desc; desc, the newest first, is the default."),
)

TABLE: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): work(
        "create_chat_completion", "Chat", "Answer a conversation", ChatBody, chat.ChatCompletion,
        chat.ChatCompletionChunk,
    ),
    ("POST", "/v1/completions"): work(
        "create_completion", "Chat", "Continue texts or token ids", CompletionBody, chat.Completion,
        chat.CompletionChunk,
    ),
    ("POST", "/v1/audio/transcriptions"): upload(
        "create_transcription", "Transcribe a recording", TranscriptionForm
    ),
    ("POST", "/v1/audio/translations"): upload(
        "create_translation", "Translate a recording into English", TranslationForm
    ),
    ("POST", "/v1/messages"): work(
        "create_message", "Messages", "Answer a conversation, in the Anthropic protocol", MessagesBody,
        messages.Message, messages.MessageEvent,
    ),
    ("POST", "/v1/messages/count_tokens"): work(
        "count_message_tokens", "Messages", "Count the tokens of a conversation", CountBody, messages.TokenCount
    ),
    ("POST", "/v1/responses"): work(
        "create_response", "Responses", "Answer, and keep the answer", ResponsesBody, responses.Response,
        responses.ResponseStreamEvent,
    ),
    ("GET", "/v1/responses/{id}"): Operation(
        "get_response", "Responses", "A stored response", responses.Response, responses.ResponseStreamEvent,
        query=FOLLOW,
    ),
    ("DELETE", "/v1/responses/{id}"): Operation(
        "delete_response", "Responses", "Forget a stored response", responses.DeletedResponse
    ),
    ("GET", "/v1/responses/{id}/input_items"): Operation(
        "list_input_items", "Responses", "What a stored response answers", responses.InputItemList, query=PAGED
    ),
    ("POST", "/v1/responses/input_tokens"): work(
        "count_response_tokens", "Responses", "Count the tokens of a response's input", InputBody,
        responses.InputTokens,
    ),
    ("POST", "/v1/responses/{id}/cancel"): Operation(
        "cancel_response", "Responses", "End a response that is being made", responses.Response
    ),
    ("GET", "/v1/models"): Operation("list_models", "Models", "The names of the served model", about.ModelList),
    ("GET", "/v1/models/{id}"): Operation("get_model", "Models", "One of them", about.Model),
    ("GET", "/model_info"): Operation(
        "get_model_info", "Models", "The first name in the words of SGLang's router", about.ModelInfo
    ),
    ("GET", "/get_server_info"): Operation(
        "get_server_info", "Models", "The same, where that router looks first", about.ModelInfo
    ),
    ("POST", "/tokenize"): work(
        "tokenize", "Tokens", "Text or conversation to token ids", TokenizeBody, tokens.Tokenized
    ),
    ("POST", "/detokenize"): work("detokenize", "Tokens", "Token ids to text", DetokenizeBody, tokens.Detokenized),
    ("GET", "/tokenizer_info"): Operation(
        "get_tokenizer_info", "Tokens", "The tokenizer's settings", tokens.TokenizerInfo
    ),
    ("POST", "/v1/chat/completions/render"): work(
        "render_chat_completion", "Tokens", "A conversation as token ids, not answered", ChatBody, tokens.Rendered
    ),
    ("POST", "/v1/completions/render"): work(
        "render_completion", "Tokens", "Texts as token ids, not continued", CompletionBody, list[tokens.Rendered]
    ),
    ("POST", "/inference/v1/generate"): work(
        "generate", "Tokens", "Token ids in, token ids out", GenerateBody, tokens.Generated, tokens.GeneratedChunk
    ),
    ("POST", "/abort_requests"): work("abort_requests", "Server", "End answers by their ids", AbortBody, media=TEXT),
    ("GET", "/health"): text("get_health", "Ready for work"),
    ("GET", "/health/ready"): text("get_readiness", "Ready for work"),
    ("GET", "/health/live"): text("get_liveness", "Alive"),
    ("GET", "/ping"): text("ping", "Ready for work"),
    ("POST", "/ping"): text("ping_by_post", "Ready for work"),
    ("GET", "/"): text("get_page", "The chat page; for clients without HTML, a greeting of Ollama's", HTML, "Page"),
    ("GET", "/playground/{digest}/{name}"): text("get_page_file", "The chat page's files", "text/javascript", "Page"),
    ("GET", "/about"): Operation("get_about", "Page", "What the chat page shows of the model", about.About),
    ("GET", "/version"): Operation("get_version", "Server", "Version", about.Version),
    ("GET", "/load"): Operation("get_load", "Server", "Choices that are prepared, wait or run", about.Load),
    ("GET", "/metrics"): text("get_metrics", "Prometheus text"),
    ("GET", "/openapi.json"): Operation("get_openapi", "Server", "This description", dict[str, Any]),
    ("GET", "/docs/"): text("list_docs", "The pages for users", HTML),
    ("GET", "/docs/{name}"): text("get_doc", "One page for users", HTML),
    ("GET", "/docs"): Operation("get_docs", "Server", "Redirects to /docs/", statuses=(307, *READ[1:])),
    ("GET", "/docs/api"): text("get_api_page", "This description, to read and to try", HTML),
    ("GET", "/docs/api/{digest}/{name}"): text("get_api_page_file", "The files of that page", "text/javascript"),
    ("POST", "/v1/embeddings"): work(
        "create_embedding", "Embeddings", "Vectors of texts", VectorsBody, pooling.EmbeddingList, more=VECTOR_BYTES
    ),
    ("POST", "/pooling"): work(
        "pool", "Embeddings", "What a pooling model makes of texts, or of their tokens", PoolingBody,
        pooling.PooledList, more=VECTOR_BYTES,
    ),
    ("POST", "/classify"): work("classify", "Embeddings", "Classes of texts", ClassifyBody, pooling.ClassifiedList),
    ("POST", "/v1/rerank"): work(
        "rerank_v1", "Embeddings", "Documents by how well they answer a query", RerankBody, pooling.RankedList
    ),
    ("POST", "/v2/rerank"): work(
        "rerank_v2", "Embeddings", "Documents by how well they answer a query", RerankBody, pooling.RankedList
    ),
}  # fmt: skip


Table = Mapping[tuple[str, str], Operation]


def openapi(root_path: str = "", table: Table = TABLE) -> dict[str, Any]:
    """The whole document of a table; `root_path` is the path where a proxy mounts this server."""
    made = Schemas(table)
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in table.items():
        paths.setdefault(path, {})[method.lower()] = described(path, operation, made)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "omniloop",
            "version": __version__,
            "description": "A server for models of text, pictures, sound and film, in the protocols of their clients.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": root_path or "/"}],
        "tags": [{"name": name, "description": description} for name, description in TAGS.items()],
        "paths": paths,
        "components": {"schemas": made.components, "securitySchemes": SECURITY},
        "security": [{}, {"bearer": []}, {"key": []}],
    }


class Schemas:
    """JSON schemas of all types of the table, made together."""

    def __init__(self, table: Table) -> None:
        types: dict[Any, None] = dict.fromkeys((Error, *FAULTS.values()))
        for operation in table.values():
            types |= {kind: None for kind in (operation.body, operation.answer, operation.event) if kind is not None}
        schemas, components = msgspec.json.schema_components(list(types), ref_template=REFERENCE)
        self.of = dict(zip(types, schemas))
        self.components = {name: opened(schema) for name, schema in components.items()}


def opened(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without the ban on extra fields; a type's tag gets a description."""
    found = {name: value for name, value in schema.items() if name != "additionalProperties" or value}
    for tag in ("type", "object"):
        found.get("properties", {}).get(tag, {}).setdefault("description", "The kind of this object.")
    return found


def described(path: str, operation: Operation, made: Schemas) -> dict[str, Any]:
    """One operation object."""
    found: dict[str, Any] = {
        "operationId": operation.id,
        "tags": [operation.tag],
        "summary": operation.summary,
        "responses": answers(path, operation, made),
    }
    for name in re.findall(r"{(\w+)}", path):
        place = {"name": name, "in": "path", "required": True, "description": IN_PATH[name]}
        found.setdefault("parameters", []).append({**place, "schema": {"type": "string"}})
    for name, kind, description in operation.query:
        place = {"name": name, "in": "query", "description": description, "schema": {"type": kind}}
        found.setdefault("parameters", []).append(place)
    if operation.body is not None:
        schema = made.of[operation.body]
        if operation.sent_as != JSON:  # the type does not contain the file
            schema = {"allOf": [schema, with_file(operation.file)]}
        content: dict[str, Any] = {"schema": schema}
        if operation.id in REQUESTS:
            content["example"] = REQUESTS[operation.id]
        found["requestBody"] = {"required": True, "content": {operation.sent_as: content}}
    return found


def answers(path: str, operation: Operation, made: Schemas) -> dict[str, Any]:
    """Status code -> the answer itself, or a possible error."""
    found: dict[str, Any] = {}
    fault = error_of(path)
    for status in sorted(operation.statuses):
        if status == 200:
            found["200"] = {"description": operation.summary, "content": content_of(operation, made, fault)}
        elif status < 400:
            found[str(status)] = {"description": operation.summary}
        else:
            name = TYPES.get(status, "Error")
            found[str(status)] = {"description": name, "content": {JSON: {"schema": made.of[fault]}}}
    return found


def error_of(path: str) -> type[msgspec.Struct]:
    """The type of a route's errors."""
    return next((fault for start, fault in FAULTS.items() if path.startswith(start)), Error)


def content_of(operation: Operation, made: Schemas, fault: type[msgspec.Struct]) -> dict[str, Any]:
    """The content of a 200, by media type."""
    if operation.answer is None:
        return {operation.media: {"schema": {"type": "string"}}}
    whole: dict[str, Any] = {"schema": made.of[operation.answer]}
    if operation.id in ANSWERS:
        whole["example"] = ANSWERS[operation.id]
    found: dict[str, Any] = {operation.media: whole}
    for media in operation.more:
        text = media.startswith("text/")
        found[media] = {"schema": {"type": "string", **({} if text else {"contentMediaType": media})}}
    if operation.event is not None:
        event = made.of[operation.event]
        if made.of[fault] not in event.get("anyOf", [event]):  # an error after the stream has begun
            event = {"anyOf": [event, made.of[fault]]}
        found[operation.stream] = {"schema": event}
    return found


IN_PATH = {
    "id": "The id: of a response, a file or a batch, or the name of a model, which may hold slashes.",
    "digest": "The digest of the page's files.",
    "name": "The name of the file.",
}


def with_file(description: str) -> dict[str, Any]:
    """The schema of a form's file."""
    file = {"type": "string", "contentMediaType": "application/octet-stream", "description": description}
    return {"type": "object", "properties": {"file": file}, "required": ["file"]}


SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key of --api-key."},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same, for Anthropic's clients."},
}
