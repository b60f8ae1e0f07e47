"""Text, pictures, sound and film through real sockets with the official client: the same tokens as the bare engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from tests.end_to_end.conftest import MODEL
from tests.end_to_end.known import TOKENS, conversations

NAMES = list(conversations())
FIXED = {"temperature": 0, "max_tokens": TOKENS, "extra_body": {"ignore_eos": True, "return_token_ids": True}}


@pytest.fixture
def client(port: int) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
        yield client


def asked(name: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": conversations()[name], **FIXED, **fields}


class Gathered:
    """The chunks of one stream, merged."""

    def __init__(self) -> None:
        self.chunks: list[Any] = []

    def add(self, chunk: Any) -> None:
        self.chunks.append(chunk)

    def deltas(self, index: int) -> list[Any]:
        return [choice for chunk in self.chunks for choice in chunk.choices if choice.index == index]

    def text(self, index: int = 0) -> str:
        return "".join(choice.delta.content or "" for choice in self.deltas(index))

    def tokens(self, index: int = 0) -> list[int]:
        return [token for choice in self.deltas(index) for token in getattr(choice, "token_ids", None) or ()]

    def finish(self, index: int = 0) -> list[str]:
        return [choice.finish_reason for choice in self.deltas(index) if choice.finish_reason]


@pytest.mark.parametrize("name", NAMES)
def test_whole_and_streamed_answers_are_the_engine_s_tokens(client, known, name):
    wanted = known[name]
    whole = client.chat.completions.create(**asked(name))
    assert whole.prompt_token_ids == wanted.prompt_token_ids
    assert whole.choices[0].token_ids == wanted.token_ids
    assert whole.choices[0].message.content == wanted.text
    assert whole.choices[0].finish_reason == "length"
    got = Gathered()
    with client.chat.completions.create(**asked(name, stream=True)) as stream:
        for chunk in stream:
            got.add(chunk)
    assert got.tokens() == wanted.token_ids
    assert got.text() == wanted.text
    assert got.finish() == ["length"]
    assert got.deltas(0)[0].delta.role == "assistant"
    assert len({chunk.id for chunk in got.chunks}) == 1
    assert len(got.chunks) > TOKENS // 2, "it came in one piece"


@pytest.mark.parametrize("name", NAMES)
def test_usage_counts_prompt_media_and_cached_tokens(client, known, name):
    wanted, total = known[name], len(known[name].prompt_token_ids)
    for turn in range(2):
        got = Gathered()
        for chunk in client.chat.completions.create(**asked(name, stream=True, stream_options={"include_usage": True})):
            got.add(chunk)
        last = got.chunks[-1]
        assert last.choices == []
        usage = last.usage
        assert usage.prompt_tokens == total
        assert usage.completion_tokens == TOKENS
        assert usage.total_tokens == total + TOKENS
        details = usage.prompt_tokens_details
        assert (details.multimodal_tokens or {}) == wanted.media_tokens
        assert 0 <= details.cached_tokens <= total - 1
        if turn:
            assert details.cached_tokens >= (total - 1) // 16 * 16, "the second time, all whole blocks are there"


@pytest.mark.parametrize("name", ["text", "image", "all three"])
def test_choices_agree_and_count_the_prompt_once(client, known, name):
    wanted = known[name]
    whole = client.chat.completions.create(**asked(name, n=3))
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert [choice.token_ids for choice in whole.choices] == [wanted.token_ids] * 3
    assert whole.usage.prompt_tokens == len(wanted.prompt_token_ids)
    assert whole.usage.completion_tokens == 3 * TOKENS
    got = Gathered()
    for chunk in client.chat.completions.create(**asked(name, n=3, stream=True)):
        got.add(chunk)
    for index in range(3):
        assert got.tokens(index) == wanted.token_ids
        assert got.finish(index) == ["length"]


def test_a_seed_draws_the_same_streamed_or_not_and_choices_differ(client):
    fields = asked("image", n=2, temperature=1.0, seed=11)
    whole = client.chat.completions.create(**fields)
    got = Gathered()
    for chunk in client.chat.completions.create(**fields, stream=True):
        got.add(chunk)
    first, second = (choice.token_ids for choice in whole.choices)
    assert got.tokens(0) == first
    assert got.tokens(1) == second
    assert first != second


async def one_stream(client: AsyncOpenAI, name: str) -> Gathered:
    got = Gathered()
    async with await client.chat.completions.create(**asked(name, stream=True)) as stream:
        async for chunk in stream:
            got.add(chunk)
    return got


async def test_32_parallel_streams_of_every_kind(port, known):
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
        names = [NAMES[number % len(NAMES)] for number in range(32)]
        streams = await asyncio.gather(*[one_stream(client, name) for name in names])
    for name, got in zip(names, streams):
        assert got.tokens() == known[name].token_ids, name
        assert got.text() == known[name].text, name


def test_completions_stream_text_and_tokens(client, known):
    wanted = known["several turns"]
    fields = {"model": MODEL, "prompt": wanted.prompt_token_ids, **FIXED}
    whole = client.completions.create(**fields)
    assert whole.choices[0].token_ids == wanted.token_ids
    assert whole.choices[0].text == wanted.text
    chunks = list(client.completions.create(**fields, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == wanted.text


def test_a_stop_string_ends_the_stream_and_is_not_sent(client, known):
    text = known["text"].text
    middle = len(text) // 2
    stop = text[middle : middle + 2]
    got = Gathered()
    for chunk in client.chat.completions.create(**asked("text", stream=True, stop=stop)):
        got.add(chunk)
    assert got.text() == text[: text.index(stop)]
    assert got.finish() == ["stop"]


def test_models_lists_the_served_name(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).max_model_len == 2048
