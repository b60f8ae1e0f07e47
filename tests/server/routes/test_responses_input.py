"""The input of a response: its input items as the official client lists them, and its number of tokens."""

from __future__ import annotations

import openai
import pytest

from tests.server.live import listening, picture

pytestmark = pytest.mark.asyncio(loop_scope="session")

HELLO = {"model": "omniloop", "input": "hello", "max_output_tokens": 4}
CALLS = [
    {"role": "developer", "content": "be brief"},
    {"role": "user", "content": [{"type": "input_text", "text": "look"}]},
    {"role": "assistant", "content": "let me see"},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "a cat"},
]


async def test_input_items_are_those_of_the_whole_conversation_and_fit_the_clients_types(client):
    async with (
        listening(client) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as api,
    ):
        first = await api.responses.create(**{**HELLO, "input": CALLS})
        again = await api.responses.create(
            **{**HELLO, "input": [first.output[0].model_dump(), {"role": "user", "content": "so?"}]},
            previous_response_id=first.id,
        )
        page = await api.responses.input_items.list(again.id)
        kinds = [item.type for item in page.data]
        calls = ["function_call_output", "function_call"]
        assert kinds == ["message"] * 3 + calls + ["message"] * 3
        assert not page.has_more
        assert page.data[0].content[0].text == "so?"
        assert page.data[2].id == first.output[0].id != page.data[1].id  # the client repeated an item that was stored
        for item in page.data:
            type(item).model_validate_json(item.model_dump_json(exclude_unset=True, by_alias=True), strict=True)
        oldest_first = [item async for item in api.responses.input_items.list(again.id, limit=3, order="asc")]
        assert [item.id for item in oldest_first] == [item.id for item in page.data][::-1]
        assert [item.id for item in (await api.responses.input_items.list(first.id)).data] != []
        with pytest.raises(openai.NotFoundError):
            await api.responses.input_items.list("resp_other")


@pytest.mark.parametrize(
    ("query", "param"), [("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=a", "after")]
)
async def test_bad_pages_are_named(client, query, param):
    name = (await client.post("/v1/responses", HELLO)).json()["id"]
    reply = await client.get(f"/v1/responses/{name}/input_items?{query}")
    assert (reply.status, reply.error["param"]) == (400, param)


async def test_input_tokens_are_those_of_the_response(client):
    """Counted are instructions, tools, earlier turns and pictures; the client's own helper gets the same number."""
    first = (await client.post("/v1/responses", HELLO)).json()["id"]
    image = {"type": "input_image", "image_url": "data:image/png;base64," + picture()}
    fields = {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "what?"}, image]}],
        "instructions": "be brief",
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "previous_response_id": first,
        "reasoning": {"effort": "low"},
    }
    usage = (await client.post("/v1/responses", {**HELLO, **fields})).json()["usage"]
    counted = await client.post("/v1/responses/input_tokens", fields)
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": usage["input_tokens"]}
    async with (
        listening(client) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as api,
    ):
        assert (await api.responses.input_tokens.count(model="omniloop", input="hello")).input_tokens > 0


async def test_input_tokens_may_be_more_than_the_context(client):
    most = client.state.engine.max_model_len + 1000
    for truncation in ("auto", "disabled"):
        body = {"input": "word " * most, "truncation": truncation}
        assert (await client.post("/v1/responses/input_tokens", body)).json()["input_tokens"] > most
    assert (await client.post("/v1/responses", {"input": "word " * most})).status == 400


async def test_what_cannot_be_counted_is_refused_by_name(client):
    bad = {"conversation": (501, "c"), "previous_response_id": (404, "resp_x"), "truncation": (400, "some")}
    for param, (status, value) in bad.items():
        reply = await client.post("/v1/responses/input_tokens", {"input": "hi", param: value})
        assert (reply.status, reply.error["param"]) == (status, param)
