"""langchain-openai as a client on a real socket: answers, streams with usage, batches, log-probabilities, errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.server.conftest import Client
from tests.server.live import listening

pytest.importorskip("langchain_openai")
pytestmark = pytest.mark.asyncio(loop_scope="session")
GO_ON = {"ignore_eos": True}


@asynccontextmanager
async def models(client: Client) -> AsyncIterator[Any]:
    """Yields a function that makes langchain models of this client's app: model(ChatOpenAI, temperature=0)."""
    async with listening(client) as url, httpx.AsyncClient() as http:

        def model(kind: Any, **fields: Any) -> Any:
            fields = {"max_tokens": 6, "temperature": 0, "max_retries": 0, "extra_body": GO_ON, **fields}
            return kind(base_url=f"{url}/v1", api_key="none", model="omniloop", http_async_client=http, **fields)

        yield model


async def test_a_chat_answers_streams_and_batches(client):
    from langchain_openai import ChatOpenAI

    async with models(client) as model:
        chat = model(ChatOpenAI)
        whole = await chat.ainvoke([("system", "be brief"), ("human", "hi")])
        assert whole.response_metadata["finish_reason"] == "length"
        assert whole.response_metadata["model_name"] == "omniloop"
        assert whole.usage_metadata["output_tokens"] == 6
        wanted = (
            await client.chat(
                messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
                max_tokens=6,
                temperature=0,
            )
        ).json()
        assert whole.content == wanted["choices"][0]["message"]["content"]
        pieces = [
            piece
            async for piece in model(ChatOpenAI, stream_usage=True).astream([("system", "be brief"), ("human", "hi")])
        ]
        assert "".join(piece.content for piece in pieces) == whole.content
        assert sum(piece.usage_metadata["output_tokens"] for piece in pieces if piece.usage_metadata) == 6
        answers = await chat.abatch([[("human", text)] for text in ("one", "two", "three")])
        assert len({answer.id for answer in answers}) == 3


async def test_logprobs_seeds_and_stops_go_through(client):
    from langchain_openai import ChatOpenAI

    async with models(client) as model:
        told = await model(ChatOpenAI, logprobs=True, top_logprobs=2, seed=4, temperature=1).ainvoke("hi")
        entries = told.response_metadata["logprobs"]["content"]
        assert len(entries) == 6
        assert len(entries[0]["top_logprobs"]) == 2
        again = await model(ChatOpenAI, seed=4, temperature=1).ainvoke("hi")
        assert again.content == told.content
        first = told.content[:1]
        assert (await model(ChatOpenAI, seed=4, temperature=1).ainvoke("hi", stop=[first])).content == ""


async def test_completions_of_several_prompts(client):
    from langchain_openai import OpenAI

    async with models(client) as model:
        texts = model(OpenAI, max_tokens=4)
        made = await texts.agenerate(["one", "two two"])
        wanted = (await client.complete(["one", "two two"], temperature=0)).json()
        assert [found[0].text for found in made.generations] == [choice["text"] for choice in wanted["choices"]]
        assert made.llm_output["token_usage"]["completion_tokens"] == 8
        pieces = [piece async for piece in texts.astream("one")]
        assert "".join(pieces) == wanted["choices"][0]["text"]


async def test_an_error_keeps_its_words(client):
    from langchain_openai import ChatOpenAI
    from openai import BadRequestError

    async with models(client) as model:
        with pytest.raises(BadRequestError, match="maximum context length"):
            await model(ChatOpenAI).ainvoke("word " * 20_000)
