"""The official openai client's `responses` on a real socket: sync and async, streams, stored responses, background."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.server.live import listening, picture, without_end

pytestmark = pytest.mark.asyncio(loop_scope="session")

HELLO = {"model": "omniloop", "input": "hello", "max_output_tokens": 6, "temperature": 0}


def options(url, **fields):
    return {"base_url": f"{url}/v1", "api_key": "secret", "max_retries": 0, "timeout": 20, **fields}


async def test_sync_client_creates_streams_retrieves_and_deletes(serve):
    client = serve(server={"api_key": ("secret",)})
    without_end(client)

    def talk(url):
        with openai.OpenAI(**options(url)) as api:
            response = api.responses.create(**HELLO, metadata={"a": "b"})
            assert isinstance(response, openai.types.responses.Response)
            assert response.status == "incomplete"
            assert response.incomplete_details.reason == "max_output_tokens"
            assert response.output_text
            assert response.usage.output_tokens == 6
            assert response.metadata == {"a": "b"}
            events = list(api.responses.create(**HELLO, stream=True))
            assert [event.sequence_number for event in events] == list(range(len(events)))
            text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
            assert text == response.output_text == events[-1].response.output_text
            with api.responses.stream(**HELLO) as stream:
                kinds = [event.type for event in stream]
            assert kinds[0] == "response.created"
            assert kinds[-1] == "response.incomplete"
            again = api.responses.retrieve(response.id)
            assert again == response
            follow = api.responses.create(**{**HELLO, "input": "and then?"}, previous_response_id=response.id)
            assert follow.usage.input_tokens > response.usage.input_tokens
            api.responses.delete(response.id)
            with pytest.raises(openai.NotFoundError):
                api.responses.retrieve(response.id)
            with pytest.raises(openai.NotFoundError):
                api.responses.create(**HELLO, previous_response_id=response.id)

    async with listening(client) as url:
        await asyncio.to_thread(talk, url)


ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp", "server_label": "l"}]}


@pytest.mark.parametrize(
    "fields",
    [
        {"text": {"format": {"type": "json_schema", "schema": {"enum": [1]}}}},
        {"text": {"format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1]}}}}},
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}]},
        {"tools": [{"type": "namespace", "name": "n", "description": "d", "tools": []}]},
        {"tool_choice": ALLOWED, "tools": [{"type": "mcp", "server_label": "l"}]},
    ],
    ids=lambda fields: str(fields)[:60],
)
async def test_what_is_echoed_fits_the_clients_types(client, fields):
    reply = await client.post("/v1/responses", {**HELLO, **fields})
    openai.types.responses.Response.model_validate_json(reply.content, strict=True)


async def test_async_client_in_parallel_with_pictures_and_logprobs(client):
    image = {"type": "input_image", "image_url": "data:image/png;base64," + picture(), "detail": "auto"}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "what is it?"}, image]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "seen"},
    ]

    async def one(api, at):
        fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 1, "max_output_tokens": 8}
        stream = await api.responses.create(
            model="omniloop", input=items, instructions=f"{at}", stream=True, store=False, **fields
        )
        events = [event async for event in stream]
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        final = events[-1].response
        assert "".join(event.delta for event in deltas) == final.output_text
        assert sum(len(event.logprobs) for event in deltas) == len(final.output[0].content[0].logprobs)
        return final

    async with listening(client) as url, openai.AsyncOpenAI(**options(url)) as api:
        finals = await asyncio.gather(*(one(api, at) for at in range(12)))
        assert len({final.id for final in finals}) == 12


async def test_background_is_polled_and_cancelled(client):
    without_end(client)
    async with listening(client) as url, openai.AsyncOpenAI(**options(url)) as api:
        response = await api.responses.create(**HELLO, background=True)
        assert response.status == "queued"
        while response.status in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
            response = await api.responses.retrieve(response.id)
        assert response.status == "incomplete"
        assert response.output_text
        long = await api.responses.create(**{**HELLO, "max_output_tokens": 4000}, background=True)
        cancelled = await api.responses.cancel(long.id)
        assert cancelled.status == "cancelled"


async def test_errors_arrive_as_the_clients_own_exceptions(client):
    async with listening(client) as url, openai.AsyncOpenAI(**options(url)) as api:
        with pytest.raises(openai.NotFoundError):
            await api.responses.create(**{**HELLO, "model": "nothing"})
        with pytest.raises(openai.BadRequestError) as caught:
            await api.responses.create(**{**HELLO, "temperature": 3})
        assert caught.value.param == "temperature"
        with pytest.raises(openai.BadRequestError, match="only a response that was made with background"):
            await api.responses.cancel((await api.responses.create(**HELLO)).id)
