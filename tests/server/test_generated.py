"""Requests generated from /openapi.json: each answer has a documented status and is not a server error.

The generator walks the schema: each field is absent, valid, at a limit, of another type, or strange. 500 requests in
every run, 2,000 with schemathesis in the mark `full`. 501 is allowed: it names an unsupported feature.
"""

from __future__ import annotations

import json
import random
from typing import Any

import orjson
import pytest

from tests.server.conftest import quiet

pytestmark = pytest.mark.asyncio(loop_scope="session")

STRANGE = [None, True, 0, -1, 1, 2**31, 2**63 - 1, -(2**63), 0.5, 1e308, "", "x", "é\x00😀", [], [0], {}, {"a": [None]}]
NUMBERS = {"integer": [0, 1, 2, 5, -1, 20, 21, 128, 2**31, 2**63 - 1], "number": [0, 1, 0.5, -2, 2, 2.1, 1e-9, 1e308]}
WORDS = ["", "a", "auto", "none", "required", "left", "user", "{{ x }}", "é漢😀", "tool", "x" * 300, "\x00", "7"]
WORDS += ["<|im_end|>", "data:image/png;base64,AAAA", "http://127.0.0.1/x.png", "file:///etc/passwd"]
# Valid values for fields whose schema is open.
KNOWN: dict[str, list[Any]] = {
    "messages": [
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        [{"role": "assistant", "content": None, "tool_calls": []}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}],
    ],
    "prompt": ["hello", ["a", "b"], [1, 2, 3], [[1], [2, 3]], "hi", "a b", [[]]],
    "input": ["hello", [{"role": "user", "content": "hi"}], [{"type": "function_call_output", "call_id": "c"}]],
    "token_ids": [[1, 2, 3], [319], [5], [320], [-1]],
    "tokens": [[1, 2], [5], [320]],
    "model": [None, None, None, "none"],
    "response_format": [{"type": "text"}, {"type": "json_object"}],
    "tools": [[{"type": "function", "function": {"name": "f"}}], [{"name": "f", "input_schema": {}}]],
    "logit_bias": [{"5": 1}, {"x": 1}, {"999999": 1}],
    "max_tokens": [1, 3, 3],
    "max_output_tokens": [1, 3],
    "stream_options": [None, {"include_usage": True}],
    "n": [1, 2, 3, 0],
    "top_k": [1, 5, -1, 400],
    "logprobs": [True, 1, 0, 21],
    "stop": ["a", ["a", "b"], [], [""]],
}


class Maker:
    """Random values for the schemas of one document."""

    def __init__(self, document: dict[str, Any], seed: int) -> None:
        self.draw = random.Random(seed)
        self.schemas = document["components"]["schemas"]

    def value(self, schema: dict[str, Any], depth: int = 0) -> Any:
        draw = self.draw
        if "$ref" in schema:
            return self.value(self.schemas[schema["$ref"].rpartition("/")[2]], depth)
        if "anyOf" in schema:
            return self.value(draw.choice(schema["anyOf"]), depth)
        if "enum" in schema:
            return draw.choice(schema["enum"])
        kind = schema.get("type")
        if kind in NUMBERS:
            return draw.choice(NUMBERS[kind])
        if kind == "string":
            return draw.choice(WORDS)
        if kind == "boolean":
            return draw.random() < 0.5
        if kind == "array":
            items = schema.get("items") or {}
            return [self.value(items, depth + 1) for _ in range(draw.randrange(4))]
        if kind == "object" and "properties" in schema:
            return self.body(schema, depth)
        if kind == "object":
            return {draw.choice(WORDS): self.strange() for _ in range(draw.randrange(3))}
        return None if kind == "null" else self.strange()

    def strange(self) -> Any:
        return self.draw.choice(STRANGE)

    def body(self, schema: dict[str, Any], depth: int = 0) -> dict[str, Any]:
        """A body in which most fields are absent and most others valid."""
        draw, found = self.draw, {}
        for name, kind in schema["properties"].items():
            alone = name == "prompt" and not {"messages", "input"} & schema["properties"].keys()
            needed = name in (*schema.get("required", ()), "input", "max_tokens") or alone
            if draw.random() > (0.97 if needed else 0.07):
                continue
            chance = draw.random()
            if chance < 0.04:
                found[name] = self.strange()
            elif name in KNOWN and chance < 0.97:
                found[name] = draw.choice(KNOWN[name])
            else:
                found[name] = self.value(kind, depth + 1)
        return found


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """(method, path, operation) of all operations of the document."""
    return [
        (method.upper(), path, operation)
        for path, entry in document["paths"].items()
        for method, operation in entry.items()
    ]


def bounded(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Limits the answer's length, because only the checks of requests are tested."""
    field = {"/v1/responses": "max_output_tokens", "/v1/chat/completions": "max_completion_tokens"}.get(
        path, "max_tokens"
    )
    value = body.get(field)
    if path in ("/v1/responses", "/v1/chat/completions", "/v1/messages", "/v1/completions") and (
        value is None or (isinstance(value, int) and value > 4)
    ):
        body[field] = 3
    return body


@pytest.mark.parametrize("seed", range(5))
async def test_500_requests_from_the_schema(tiny_client, tiny_state, seed):
    document = (await tiny_client.get("/openapi.json")).json()
    maker = Maker(document, seed)
    with_body = [entry for entry in operations(document) if "requestBody" in entry[2]]
    forms = [entry for entry in with_body if "application/json" not in entry[2]["requestBody"]["content"]]
    assert {path for _, path, _ in forms} == {"/v1/audio/transcriptions", "/v1/audio/translations", "/v1/files"}
    with_body = [entry for entry in with_body if entry not in forms]
    bare = [entry for entry in operations(document) if "requestBody" not in entry[2]]
    statuses = set()
    for _ in range(100):
        method, path, operation = maker.draw.choice(with_body if maker.draw.random() < 0.85 else bare)
        data = b""
        if "requestBody" in operation:
            name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            data = orjson.dumps(bounded(path, maker.body(maker.schemas[name])))
        url = path.replace("{id}", maker.draw.choice(["tiny", "resp_1", "a/b", "%00"]))
        reply = await tiny_client.call(method, url, body=data).finish()
        assert str(reply.status) in operation["responses"], (path, data, reply.content)
        assert reply.status < 500 or reply.status == 501, (path, data, reply.content)
        assert b'"code":500' not in reply.content, (path, data)
        statuses.add(reply.status)
    assert {200, 400} <= statuses
    assert (await quiet(tiny_state))["routes"] == tiny_client.state.places.taken == 0


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_2000_requests_from_schemathesis(tiny_client, tiny_state):
    schemathesis = pytest.importorskip("schemathesis")
    document = (await tiny_client.get("/openapi.json")).json()
    cases = [case for operation in made_by(schemathesis, document) for case in operation]
    assert len(cases) >= 2000
    for case in cases:
        described = document["paths"][case.path][case.method.lower()]
        data = b"" if "requestBody" not in described else json.dumps(short(case.path, case.body)).encode()
        reply = await tiny_client.call(case.method, case.formatted_path, body=data).finish()
        assert str(reply.status) in described["responses"], (case.path, data, reply.content)
        assert reply.status < 500 or reply.status == 501, (case.path, data, reply.content)
    assert (await quiet(tiny_state))["routes"] == tiny_client.state.places.taken == 0


def made_by(schemathesis: Any, document: dict[str, Any]) -> list[list[Any]]:
    """Cases for every operation; operations with a body get more."""
    from hypothesis import HealthCheck, Phase, given, settings

    found = []
    for result in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = result.ok()
        cases: list[Any] = []

        @settings(
            max_examples=200 if operation.body else 10, deadline=None, database=None, derandomize=True,
            phases=[Phase.generate], suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=operation.as_strategy())
        def keep(case: Any) -> None:
            cases.append(case)  # noqa: B023 - called within this turn

        keep()
        found.append(cases)
    return found


def short(path: str, body: Any) -> Any:
    return bounded(path, dict(body)) if isinstance(body, dict) else body
