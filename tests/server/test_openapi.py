"""/openapi.json: a valid document whose operations have names, tags and typed answers; every field has a text."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

from server.dialects.table import operations as table_of
from server.openapi import TAGS, openapi
from server.schema.examples import ANSWERS, REQUESTS
from tests.server import described_answers as answers
from tests.server.live import listening, use_gaps

pytestmark = pytest.mark.asyncio(loop_scope="session")
TABLE = table_of()
DOCUMENT = openapi(table=TABLE)
SCHEMAS = DOCUMENT["components"]["schemas"]
FORMS = {  # of errors, by the beginning of the path
    "/v1/messages": "MessagesError",
    "/api/": "TextError",
    "/embedding": "Error",
    **dict.fromkeys(("/embed", "/predict", "/info"), "TeiError"),
}
GENERATING = {"Chat", "Messages", "Audio", "Embeddings", "Decisions"}
BY_ID = {operation.id: (method, path, operation) for (method, path), operation in TABLE.items()}


def operations() -> list[tuple[str, str, dict[str, Any]]]:
    return [(method, path, one) for path, entry in DOCUMENT["paths"].items() for method, one in entry.items()]


async def test_the_document_is_valid():
    from openapi_spec_validator import validate

    validate(DOCUMENT)


async def test_every_operation_has_a_name_a_tag_and_the_type_of_its_answer():
    named = [one["operationId"] for _, _, one in operations()]
    assert len(set(named)) == len(named) == len(TABLE)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in named)
    assert {tag["name"] for tag in DOCUMENT["tags"]} == set(TAGS) == {one["tags"][0] for _, _, one in operations()}
    for method, path, one in operations():
        found = one["responses"].get("200", {"content": {}})["content"]
        assert found or {"307", "501"} & one["responses"].keys(), (method, path)
        assert all(content["schema"] for content in found.values()), (method, path)
        assert one["summary"]
        assert all(parameter["description"] for parameter in one.get("parameters", ()))


async def test_every_field_has_a_sentence():
    for name, schema in SCHEMAS.items():
        assert schema["properties"] or name in ("MessageStopEvent",), name
        for field, value in schema["properties"].items():
            sentence = value.get("description", "")
            assert re.fullmatch(r"[A-Za-z].*[^.]\.", sentence, re.DOTALL), (name, field, sentence)
            assert len(sentence.split()) <= 40, (name, field)


async def test_errors_have_the_form_of_their_protocol():
    for _, path, one in operations():
        for status, answer in one["responses"].items():
            if int(status) < 400:
                continue
            wanted = next((name for start, name in FORMS.items() if path.startswith(start)), "Error")
            schema = answer["content"]["application/json"]["schema"]
            assert schema == {"$ref": f"#/components/schemas/{wanted}"}


async def test_events_of_streams_are_distinguished_by_their_type():
    for name, kinds in (("create_response", 18), ("create_message", 8), ("create_transcription", 3)):
        _, path, _ = BY_ID[name]
        schema = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
        events = next(part for part in (schema, *schema["anyOf"]) if "discriminator" in part)
        assert events["discriminator"]["propertyName"] == "type"
        assert len(events["discriminator"]["mapping"]) == kinds
    chunk = DOCUMENT["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]["text/event-stream"]
    assert [part["$ref"].rpartition("/")[2] for part in chunk["schema"]["anyOf"]] == ["ChatCompletionChunk", "Error"]


async def test_nullable_fields_say_so_and_absent_ones_are_not_required():
    choice = SCHEMAS["ChatChoice"]
    assert {"type": "null"} in choice["properties"]["logprobs"]["anyOf"]
    assert "logprobs" in choice["required"]
    assert "token_ids" not in choice["required"]
    assert not any("additionalProperties" in schema for schema in SCHEMAS.values() if schema.get("properties"))


async def test_each_generating_route_has_an_example_and_examples_have_their_types():
    wanted = {one.id for one in TABLE.values() if one.tag in GENERATING and one.answer and "count" not in one.id}
    assert wanted | {"create_response", "generate"} == set(ANSWERS)
    for name, example in ANSWERS.items():
        msgspec.convert(example, BY_ID[name][2].answer)
    for name, (_, path, operation) in BY_ID.items():
        if operation.body is not None and operation.sent_as == "application/json":
            msgspec.json.decode(orjson.dumps(REQUESTS[name]), type=operation.body)
            content = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]
            assert content["application/json"]["example"] == REQUESTS[name]


async def test_examples_are_answered(client):
    elsewhere = {
        name
        for name, (_, _, operation) in BY_ID.items()
        if operation.tag in ("Embeddings", "Batches") or re.search("embed|rerank", name)
    }
    use_gaps(client)
    for name in sorted(REQUESTS.keys() - elsewhere):
        reply = await client.post(BY_ID[name][1], REQUESTS[name])
        assert reply.status == 200, (name, reply.content)


async def test_an_answer_that_is_not_described_fails_the_test_that_got_it(client):
    """tests/server/asgi.py runs this check on each answer."""
    reply = await client.chat("hello")
    good = reply.json()
    answers.check("POST", "/v1/chat/completions", 200, "application/json", orjson.dumps(good))
    for wrong in ({**good, "new": 1}, {**good, "id": 1}, {name: good[name] for name in good if name != "usage"}):
        with pytest.raises(msgspec.ValidationError):
            answers.check("POST", "/v1/chat/completions", 200, "application/json", orjson.dumps(wrong))
    streamed = await client.chat("hello", stream=True)
    event = streamed.content.replace(b'"delta":{', b'"delta":{"new":1,', 1)
    with pytest.raises(msgspec.ValidationError):
        answers.check("POST", "/v1/chat/completions", 200, "text/event-stream", event)


@pytest.mark.full
async def test_a_client_made_from_the_document_gets_typed_objects(client, pooling, tmp_path, monkeypatch):
    from tests import pooling_kit

    made = generated(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    models = importlib.import_module(f"{made}.models")

    def call(tag: str, name: str) -> Any:
        return importlib.import_module(f"{made}.api.{tag}.{name}").asyncio

    connection = importlib.import_module(f"{made}.client").Client
    async with listening(client) as url, connection(base_url=url) as to:
        listed = await call("models", "list_models")(client=to)
        assert isinstance(listed, models.ModelList)
        assert listed.data[0].id == client.state.names[0]
        body = models.ChatBody.from_dict(REQUESTS["create_chat_completion"])
        answered = await call("chat", "create_chat_completion")(client=to, body=body)
        assert isinstance(answered, models.ChatCompletion)
        assert answered.choices[0].message.content == "42"
        assert answered.usage.prompt_tokens_details.cached_tokens >= 0
        refused = await call("chat", "create_chat_completion")(
            client=to, body=models.ChatBody.from_dict({**body.to_dict(), "max_tokens": 0})
        )
        assert isinstance(refused, models.Error)
        assert refused.error.param == "max_tokens"
    embedder = await pooling(pooling_kit.embedder("qwen3"))
    async with listening(embedder) as url, connection(base_url=url) as to:
        body = models.VectorsBody.from_dict({"input": ["a", "b"]})
        vectors = await call("embeddings", "create_embedding")(client=to, body=body)
        assert isinstance(vectors, models.EmbeddingList)
        assert [one.index for one in vectors.data] == [0, 1]
        assert all(isinstance(number, float) for number in vectors.data[0].embedding)


def generated(folder: Path) -> str:
    """Generates a client package in the folder and returns its name; the generator must report no problem."""
    document = folder / "openapi.json"
    document.write_bytes(orjson.dumps(DOCUMENT))
    name = "made_client"
    command = [sys.executable, "-m", "openapi_python_client", "generate", "--path", document, "--meta", "none"]
    command += ["--output-path", folder / name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout.upper().replace("SKIPPING", ""), done.stdout
    assert "unable" not in done.stdout.lower(), done.stdout
    return name
