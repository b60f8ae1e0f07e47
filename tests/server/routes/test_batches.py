"""/v1/batches: answers equal those of single requests, by key, behind all other requests; with the official client."""

from __future__ import annotations

import asyncio

import openai
import orjson
import pytest

from engine.base.request import IDLE
from server.batches import run
from server.start.batches import begin_batches
from tests import pooling_kit
from tests.server.asgi import Client
from tests.server.live import listening
from tests.server.routes.test_files import form as file_form
from tests.server.routes.test_files import upload

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT = "/v1/chat/completions"
ASK = [{"role": "user", "content": "What is 12 + 30?"}]
DEGREE = {"type": "score", "instructions": "How?", "levels": [{"label": "low"}, {"label": "high"}]}
BODIES = {
    CHAT: [
        {"messages": ASK, "temperature": 0},
        {"messages": ASK, "n": 2, "seed": 5, "max_tokens": 4, "logprobs": True},
    ],
    "/v1/completions": [{"prompt": "hello", "temperature": 0, "max_tokens": 5}, {"prompt": ["a", "b"], "seed": 1}],
    "/v1/responses": [{"input": "hello", "temperature": 0, "store": False}, {"input": "", "max_output_tokens": 0}],
    "/v1/decisions": [{"input": "hi", "questions": [DEGREE]}, {"input": "hi", "questions": []}],
}
VARY = {"id", "created", "created_at", "completed_at", "usage", "request_id", "message"}


def same(body):
    """An answer without what differs between two equal requests."""
    if isinstance(body, dict):
        return {key: same(value) for key, value in body.items() if key not in VARY - {"message"}}
    return [same(each) for each in body] if isinstance(body, list) else body


def lines(url, bodies):
    return b"".join(
        orjson.dumps({"custom_id": f"l{k}", "method": "POST", "url": url, "body": body}) + b"\n"
        for k, body in enumerate(bodies)
    )


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    monkeypatch.setattr(run, "FLUSH_S", 0.001)


@pytest.fixture
def batching(serve):
    """Makes clients of servers that answer batches: batching(**groups)."""
    made = []

    def make(**groups):
        client = serve(**groups)
        begin_batches(client.state)
        made.append(client)
        return client

    return make


async def finished(client, name, **headers):
    async with asyncio.timeout(20):
        while True:
            batch = (await client.get(f"/v1/batches/{name}", headers=headers)).json()
            if batch["status"] in ("failed", "completed", "expired", "cancelled"):
                return batch
            await asyncio.sleep(0.002)


async def begun(client, url, content, status=200, headers=None, **fields):
    """A new batch of the content's lines."""
    file = (await upload(client, file_form(content), **(headers or {}))).json()
    body = {"input_file_id": file["id"], "endpoint": url, "completion_window": "24h", **fields}
    reply = await client.post("/v1/batches", body, headers=headers)
    assert reply.status == status, reply.content
    return reply.json()


async def answers(client, batch, which="output_file_id"):
    content = (await client.get(f"/v1/files/{batch[which]}/content")).content
    return {line["custom_id"]: line for line in map(orjson.loads, content.splitlines())}


async def test_the_official_client_makes_lists_reads_and_cancels(batching):
    client = batching(server={"api_key": ("secret",)})
    async with listening(client) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret") as api:
        file = await api.files.create(file=("in.jsonl", lines(CHAT, BODIES[CHAT])), purpose="batch")
        named = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        batch = await api.batches.create(**named, metadata={"a": "b"})
        assert (batch.status, batch.metadata, batch.expires_at) == ("validating", {"a": "b"}, batch.created_at + 86400)
        with pytest.raises(openai.BadRequestError, match="still reads this file"):
            await api.files.delete(file.id)
        await finished(client, batch.id, authorization="Bearer secret")
        batch = await api.batches.retrieve(batch.id)
        assert batch.status == "completed"
        assert (batch.request_counts.total, batch.request_counts.completed) == (2, 2)
        assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens > 0
        assert batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
        out = (await api.files.content(batch.output_file_id)).text.splitlines()
        assert "42" in {orjson.loads(line)["response"]["body"]["choices"][0]["message"]["content"] for line in out}
        assert (await api.files.retrieve(batch.output_file_id)).purpose == "batch_output"
        client.state.engine.pause()
        held = [await api.batches.create(**named) for _ in range(3)]
        assert (await api.batches.cancel(held[2].id)).status == "cancelled"
        assert (await api.batches.cancel(held[0].id)).status in ("cancelling", "cancelled")
        client.state.engine.resume()
        assert [each.id async for each in await api.batches.list(limit=2)] == [
            *(each.id for each in reversed(held)), batch.id,
        ]  # fmt: skip
        await finished(client, held[1].id, authorization="Bearer secret")
        ended = await finished(client, held[0].id, authorization="Bearer secret")
        assert (ended["status"], ended["output_file_id"]) == ("cancelled", None)
        assert (await api.files.delete(file.id)).deleted
    await client.state.batches.stop()


@pytest.mark.parametrize("url", BODIES)
async def test_lines_are_answered_as_single_requests(batching, url):
    client = batching()
    batch = await finished(client, (await begun(client, url, lines(url, BODIES[url])))["id"])
    assert batch["status"] == "completed"
    found = {
        name: line
        for which in ("output_file_id", "error_file_id")
        if batch[which]
        for name, line in (await answers(client, batch, which)).items()
    }
    for number, body in enumerate(BODIES[url]):
        alone = await client.post(url, body)
        line = found[f"l{number}"]
        assert (line["error"], line["response"]["status_code"]) == (None, alone.status)
        assert same(line["response"]["body"]) == same(alone.json())
    assert batch["request_counts"]["failed"] == (0 if url in (CHAT, "/v1/completions") else 1)


async def test_vectors_are_those_of_single_requests(pooling):
    client = await pooling(pooling_kit.embedder("qwen3"))
    served = Client(client.app)
    begin_batches(client.state)
    bodies = [{"input": "hello"}, {"input": ["a", "b c"], "encoding_format": "base64"}]
    bytes_too = [*bodies, {"input": "a", "encoding_format": "bytes"}]
    batch = await finished(served, (await begun(served, "/v1/embeddings", lines("/v1/embeddings", bytes_too)))["id"])
    assert (await answers(served, batch, "error_file_id"))["l2"]["error"]["code"] == "invalid_body"
    found = await answers(served, batch)
    for number, body in enumerate(bodies):
        alone = (await served.post("/v1/embeddings", body)).json()
        assert same(found[f"l{number}"]["response"]["body"]) == same(alone)
    await client.state.batches.stop()


async def test_lines_are_idle_and_take_no_place_of_clients(batching, monkeypatch):
    client = batching(limits={"max_inflight_per_key": 1, "queue_timeout": 0.1})
    state, seen = client.state, []
    submit = state.engine.submit

    def noted(request):
        seen.append((request.priority, request.deadline, state.places.taken, state.batches.places.taken))
        return submit(request)

    monkeypatch.setattr(state.engine, "submit", noted)
    bodies = [{"messages": ASK, "max_tokens": 3}] * 3
    batch = await begun(client, CHAT, lines(CHAT, bodies))
    assert (await finished(client, batch["id"]))["request_counts"]["completed"] == 3
    assert [line[:3] for line in seen] == [(IDLE, float("inf"), 0)] * 3
    assert seen[-1][3] >= 1
    assert (await client.chat()).status == 200
    assert seen[3][0] == 0
    assert state.ledger()["lines"] == state.ledger()["places"] == 0


async def test_responses_of_lines_are_stored_only_on_request(batching):
    client = batching()
    bodies = [{"input": "a", "max_output_tokens": 1}, {"input": "a", "max_output_tokens": 1, "store": True}]
    batch = await finished(client, (await begun(client, "/v1/responses", lines("/v1/responses", bodies)))["id"])
    found = await answers(client, batch)
    names = [found[f"l{number}"]["response"]["body"]["id"] for number in range(2)]
    assert [(await client.get(f"/v1/responses/{name}")).status for name in names] == [404, 200]


async def test_a_wrong_file_fails_with_its_lines(batching):
    client = batching()
    content = lines(CHAT, BODIES[CHAT]) + b"{\n" + lines("/v1/completions", [{"prompt": "a", "model": "other"}])
    batch = await finished(client, (await begun(client, CHAT, content))["id"])
    assert (batch["status"], batch["request_counts"]["total"]) == ("failed", 0)
    assert [(each["line"], each["code"]) for each in batch["errors"]["data"]] == [
        (3, "invalid_json_line"), (4, "duplicate_custom_id"), (4, "mismatched_url"), (4, "model_not_found"),
    ]  # fmt: skip


async def test_s07_a_key_has_its_own_batches(batching):
    client = batching(server={"api_key": ("one", "two")})
    ours, theirs = {"x-api-key": "one"}, {"x-api-key": "two"}
    batch = await begun(client, CHAT, lines(CHAT, BODIES[CHAT]), headers=ours)
    done = await finished(client, batch["id"], **ours)
    for method, path in (("GET", ""), ("POST", "/cancel")):
        reply = await client.call(method, f"/v1/batches/{batch['id']}{path}", headers=theirs).finish()
        assert (reply.status, reply.error["reason"]) == (404, "not_found")
    assert (await client.get("/v1/batches", headers=theirs)).json()["data"] == []
    assert (await client.get(f"/v1/files/{done['output_file_id']}/content", headers=theirs)).status == 404
    body = {"input_file_id": batch["input_file_id"], "endpoint": CHAT, "completion_window": "24h"}
    assert (await client.post("/v1/batches", body, headers=theirs)).status == 404


async def test_wrong_bodies_are_refused_by_name(batching):
    client = batching()
    file = (await upload(client, file_form(lines(CHAT, BODIES[CHAT])))).json()["id"]
    good = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    expiry = {"anchor": "created_at", "seconds": 3600}
    for fields, status, param in (
        ({"input_file_id": "file-x"}, 404, "input_file_id"),
        ({"endpoint": "/v1/audio/transcriptions"}, 400, "endpoint"),
        ({"completion_window": "soon"}, 400, "completion_window"),
        ({"completion_window": "169h"}, 400, "completion_window"),
        ({"metadata": {f"k{k}": "" for k in range(17)}}, 400, "metadata"),
        ({"metadata": {"a": "b" * 513}}, 400, "metadata"),
        ({"output_expires_after": {**expiry, "anchor": "later"}}, 400, "output_expires_after.anchor"),
        ({"output_expires_after": {**expiry, "seconds": 1}}, 400, "output_expires_after.seconds"),
    ):
        reply = await client.post("/v1/batches", good | fields)
        assert (reply.status, reply.error["param"]) == (status, param)
    batch = (await client.post("/v1/batches", good | {"output_expires_after": expiry, "metadata": {"a": "b"}})).json()
    done = await finished(client, batch["id"])
    made = (await client.get(f"/v1/files/{done['output_file_id']}")).json()
    assert made["expires_at"] == made["created_at"] + 3600
    assert done["metadata"] == {"a": "b"}
    output = await client.post("/v1/batches", good | {"input_file_id": done["output_file_id"]})
    assert (output.status, output.error["param"]) == (400, "input_file_id")


async def test_a_client_cannot_call_itself_a_line(batching, submitted):
    client = batching()
    reply = await client.chat(headers={"omniloop.line_of": "someone", "x-omniloop-line-of": "someone"})
    assert reply.status in (200, 400)
    assert client.state.batches.places.requests == 0
