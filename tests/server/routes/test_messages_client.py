"""The official anthropic client on a real socket: sync and async, streams, pictures, counts, errors."""

from __future__ import annotations

import asyncio

import anthropic
import pytest

from server.output.parser_choice import choose_parsers
from tests.server.live import listening, picture, without_end

pytestmark = pytest.mark.asyncio(loop_scope="session")

HELLO = {"model": "omniloop", "max_tokens": 6, "messages": [{"role": "user", "content": "hello"}]}


COLD = {"extra_body": {"temperature": 0}}  # newer clients have no parameter for temperature


def options(url, **fields):
    return {"base_url": url, "api_key": "secret", "max_retries": 0, "timeout": 20, **fields}


async def test_sync_client_creates_streams_and_counts(serve):
    client = serve(server={"api_key": ("secret",)})
    without_end(client)

    def talk(url):
        with anthropic.Anthropic(**options(url)) as api:
            message = api.messages.create(**HELLO, **COLD)
            assert isinstance(message, anthropic.types.Message)
            assert message.stop_reason == "max_tokens"
            assert message.usage.output_tokens == 6
            assert message._request_id == message.id.removeprefix("msg_")
            with api.messages.stream(**HELLO, **COLD) as stream:
                texts = list(stream.text_stream)
                final = stream.get_final_message()
            assert "".join(texts) == final.content[0].text == message.content[0].text
            assert final.stop_reason == "max_tokens"
            assert final.usage.output_tokens == 6
            kinds = [event.type for event in api.messages.create(**HELLO, stream=True)]
            assert kinds[:2] == ["message_start", "content_block_start"]
            assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
            counted = api.messages.count_tokens(model=HELLO["model"], messages=HELLO["messages"])
            total = message.usage.input_tokens + message.usage.cache_read_input_tokens
            assert counted.input_tokens == total

    async with listening(client) as url:
        await asyncio.to_thread(talk, url)


async def test_async_client_in_parallel_with_pictures_and_history(client):
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": picture()}}
    use = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "it"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "seen"}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "what is it?"}, block]},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]

    async def one(api, at):
        async with api.messages.stream(model="omniloop", max_tokens=8, messages=messages, system=f"{at}") as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert final.content[0].text == text
        return final

    async with listening(client) as url, anthropic.AsyncAnthropic(**options(url)) as api:
        finals = await asyncio.gather(*(one(api, at) for at in range(12)))
        assert len({final.id for final in finals}) == 12
        beta = await api.beta.messages.create(
            **HELLO, betas=["context-management-2025-06-27"], context_management={"edits": []}
        )
        assert beta.content[0].type == "text"


async def test_the_tool_runner_sends_the_whole_conversation(client, monkeypatch):
    """A server that stores conversations would get only new turns; this one stores none, so the runner sends all."""
    sent = []
    real = __import__("server.routes.messages", fromlist=["read_blocks"]).read_blocks

    def spy(system, messages):
        sent.append([message["role"] for message in messages])
        return real(system, messages)

    monkeypatch.setattr("server.routes.messages.read_blocks", spy)

    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """The weather of a city."""
        return f"rain in {city}"

    asked = {**HELLO, "max_tokens": 80, "tool_choice": {"type": "any"}}
    async with listening(client) as url, anthropic.AsyncAnthropic(**options(url)) as api:
        runner = api.beta.messages.tool_runner(**asked, tools=[weather], max_iterations=2)
        answers = [message async for message in runner]
        assert [answer.content[0].type for answer in answers] == ["tool_use", "tool_use"]
        assert sent == [["user"], ["user", "assistant", "user"]]
        with pytest.raises(anthropic.BadRequestError) as caught:
            await api.beta.messages.thread(model="omniloop", max_tokens=4).send({"role": "user", "content": "hi"})
        assert caught.value.error_code == "thread_unsupported_request"


async def test_errors_arrive_as_the_clients_own_exceptions(client):
    async with listening(client) as url, anthropic.AsyncAnthropic(**options(url)) as api:
        with pytest.raises(anthropic.NotFoundError):
            await api.messages.create(**{**HELLO, "model": "nothing"})
        with pytest.raises(anthropic.BadRequestError) as caught:
            await api.messages.create(**HELLO, extra_body={"temperature": 3})
        assert caught.value.body["error"]["type"] == "invalid_request_error"
        assert caught.value.request_id == caught.value.body["request_id"]
        most = client.state.engine.max_model_len
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ maximum"):
            await api.messages.create(**{**HELLO, "messages": [{"role": "user", "content": "word " * most}]})
        client.state.parsers = choose_parsers(client.state.tokenizer, [], "")
        with pytest.raises(anthropic.InternalServerError) as caught:
            await api.messages.create(**HELLO, tools=[{"name": "f", "input_schema": {"type": "object"}}])
        assert caught.value.status_code == 501


async def test_wrong_key_is_refused(serve):
    client = serve(server={"api_key": ("other",)})
    async with listening(client) as url, anthropic.AsyncAnthropic(**options(url)) as api:
        with pytest.raises(anthropic.AuthenticationError):
            await api.messages.create(**HELLO)


async def test_models_are_refused_in_the_client_s_own_words(client):
    def talk(url):
        with anthropic.Anthropic(**options(url)) as api:
            assert [model.id for model in api.models.list()] == ["omniloop"]
            assert api.models.retrieve("omniloop").display_name == "omniloop"
            with pytest.raises(anthropic.NotFoundError) as refused:
                api.models.retrieve("other")
        return refused.value.body

    async with listening(client) as url:
        body = await asyncio.to_thread(talk, url)
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
    assert (await client.get("/v1/models/other")).error["type"] == "NotFoundError"
