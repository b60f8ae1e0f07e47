"""Targets for text in requests and answers: bodies, templates, events, tool calls, reasoning, grammars.

As in targets.py, a target takes bytes and may raise a refusal, nothing else. Events and answers are parsed whole and in
pieces; both must give the same result.
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from engine.grammar.compile import compile_now
from server.bench.reply import EventReader, Reply
from server.errors import ApiError
from server.flags.limits_flags import LimitsConfig
from server.http.body import decode
from server.render.load_tokenizer import load_tokenizer
from server.render.template import ChatTemplate, TemplateLimits
from server.schema.chat import ChatBody
from server.schema.completion import CompletionBody
from server.schema.generate import GenerateBody
from server.schema.messages import MessagesBody
from server.schema.pooling import EmbeddingBody, RerankBody, ScoreBody
from server.schema.responses import ResponsesBody
from server.schema.tokenize import TokenizeBody
from server.structure.structure import structure_of
from tests.engine.grammar.kit import vocabulary
from tests.fuzz.values import edited
from tests.server.output.test_parsers import CASES, parser_of, said
from tests.server.render.templates import STRING_TEMPLATES

LIMITS = LimitsConfig()
KINDS = (
    ChatBody, CompletionBody, ResponsesBody, MessagesBody, GenerateBody, TokenizeBody, EmbeddingBody, RerankBody,
    ScoreBody,
)  # fmt: skip
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi <s>"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "2"},
]
EMBEDDED = Path(__file__).parents[2] / "server" / "embedded"


def pieces(data: bytes) -> Iterator[bytes]:
    """The data cut into pieces at places that depend on the data."""
    at = 0
    while at < len(data):
        size = 1 + zlib.crc32(data[at : at + 8]) % 7
        yield data[at : at + size]
        at += size


def read_body(data: bytes) -> None:
    """Decodes the body for each route that takes JSON, and builds the grammar that the body requests."""
    for kind in KINDS:
        try:
            body, _ = decode(data, kind, LIMITS)
            if isinstance(body, ChatBody | CompletionBody) and (structure := structure_of(body, LIMITS)) is not None:
                structure.make()
        except ApiError:
            continue


def render_template(data: bytes) -> None:
    template = ChatTemplate(data.decode("utf-8", "ignore"), SPECIAL)
    template.render(MESSAGES, add_generation_prompt=True, limits=TemplateLimits(timeout=1.0, max_output_bytes=1 << 20))


def read_events(data: bytes) -> None:
    """A client's reader parses a stream of server-sent events, whole and in pieces."""

    def reply(parts: list[bytes]) -> Reply:
        reader = EventReader(Reply(0, 0), keeps_text=True)
        for part in parts:
            reader.feed(part, 0.0)
        reader.close(0.0)
        return reader.answer

    assert reply(list(pieces(data))) == reply([data])


@functools.cache
def tokenizer() -> Any:
    return load_tokenizer(EMBEDDED)


def read_answer(data: bytes) -> None:
    """An answer of a model; its first two bytes select the parser."""
    wishes = CASES[int.from_bytes(data[:2].ljust(2), "big") % len(CASES)][1]
    text = data[2:].decode("utf-8", "ignore")
    whole = said(parser_of(tokenizer(), **wishes), [text])
    cut = said(parser_of(tokenizer(), **wishes), text_pieces(text))
    assert cut == whole, (cut, whole)


def text_pieces(text: str) -> Iterator[str]:
    at = 0
    for piece in pieces(text.encode("utf-8", "replace")):
        yield text[at : at + len(piece)]
        at += len(piece)


def compile_grammar(data: bytes) -> None:
    """A grammar as text; its first byte selects the kind."""
    kind, text = ("grammar", "regex", "json")[data[0] % 3] if data else "json", data[1:].decode("utf-8", "ignore")
    compile_field({kind: text})


def compile_schema(data: bytes) -> None:
    """A grammar as a JSON value: a seed, edited."""
    compile_field(edited(VALUES[data[0] % len(VALUES)] if data else VALUES[0], data[1:]))


def json_bytes(value: Any) -> bytes:
    """JSON bytes of a value with integers of any size."""
    return json.dumps(value).encode("utf-8", "replace")


def compile_field(asked: Any) -> None:
    """Compiles a request's field up to the first mask."""
    body, _ = decode(json_bytes({"prompt": "b", "structured_outputs": asked}), CompletionBody, LIMITS)
    structure = structure_of(body, LIMITS)
    if structure is not None:
        compile_now(structure.make(), vocabulary())


def read_values(data: bytes) -> None:
    """A body that is valid JSON: a seed, edited."""
    read_body(json_bytes(edited(BODIES[data[0] % len(BODIES)] if data else BODIES[0], data[1:])))


SCHEMA = {
    "type": "object", "properties": {"a": {"type": "integer", "minimum": 2}, "b": {"enum": ["x", None, 1.5]}},
    "required": ["a"], "additionalProperties": False, "$defs": {"c": {"pattern": "^a+$", "type": "string"}},
    "patternProperties": {"^n": {"$ref": "#/$defs/c"}},
}  # fmt: skip
TAG = {
    "type": "structural_tag", "triggers": ["<f"],
    "structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}],
}  # fmt: skip
VALUES: tuple[dict[str, Any], ...] = (
    {"json": SCHEMA},
    {"json": {"type": "array", "items": {"anyOf": [{"type": "boolean"}, {"$ref": "#"}]}, "maxItems": 3}},
    {"choice": ["yes", "no"]},
    {"json_object": True, "disable_any_whitespace": True},
    {"structural_tag": TAG},
)
BODIES: tuple[dict[str, Any], ...] = (
    {
        "model": "a", "messages": [*MESSAGES[:2], {"role": "user", "content": [{"type": "text", "text": "b"}]}],
        "max_tokens": 4, "temperature": 0.5, "stop": ["a"], "logit_bias": {"5": 1}, "stream": True,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    },
    {"model": "a", "input": [{"role": "user", "content": [{"type": "input_text", "text": "b"}]}], "store": False},
    {"model": "a", "prompt": [[1, 2, 3]], "n": 2, "seed": 1, "echo": True},
    {"model": "a", "max_tokens": 2, "system": "s", "messages": [{"role": "user", "content": "b"}]},
    {"model": "a", "query": "q", "documents": ["b", "c"]},
    {"model": "a", "text_1": "q", "text_2": ["b"]},
    {"model": "a", "input": list(range(600))},
    {"model": "a", "token_ids": [1, 2], "sampling_params": {}},
    *({"prompt": "b", "structured_outputs": each} for each in VALUES),
    {
        "messages": MESSAGES[:2],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    },
)  # fmt: skip


def bodies() -> list[bytes]:
    return [*map(orjson.dumps, BODIES)]


def numbers_of(values: tuple[Any, ...]) -> list[bytes]:
    return [bytes([at]) for at in range(len(values))]


def grammars() -> list[bytes]:
    texts = ('\0start: "a" b+\nb: /[0-9]{2}/ | start', '\0root ::= "x" item*\nitem ::= [a-z]+ "\\n"')
    texts += ("\1(a|bc){1,3}[^d]\\d+", "\1[\\w.]{2,8}@(?:x|y)\\.z?", "\2" + orjson.dumps(SCHEMA).decode())
    return [text.encode() for text in texts]


def templates() -> list[bytes]:
    return [source.encode() for source in STRING_TEMPLATES.values()]


ODD = (b"data: 5\n\n", b'data: {"choices": 5}\n\n', b'data: {"choices": [{"delta": 5}, null], "usage": 5}\n\n')


def events() -> list[bytes]:
    first = {"choices": [{"delta": {"content": "é"}, "finish_reason": None}]}
    last = {"choices": [{"text": "b", "finish_reason": "stop"}], "usage": {"completion_tokens": 2}}
    whole = [b"data: " + orjson.dumps(each) + b"\n\n" for each in (first, last, {"error": {"message": "c"}})]
    return [b"".join(whole[:2]) + b"data: [DONE]\n\n", b": ping\r\n\r\n" + whole[2], b"event: a\n" + whole[0], *ODD]


def answers() -> list[bytes]:
    return [at.to_bytes(2, "big") + case[2].encode() for at, case in enumerate(CASES)]
