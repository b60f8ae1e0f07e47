"""Damaged bodies of /v1/messages and /v1/responses: refused in words or answered, never a server error."""

from __future__ import annotations

import copy
import random

import pytest

from tests.server.conftest import quiet
from tests.server.live import picture

pytestmark = pytest.mark.asyncio(loop_scope="session")

PICTURE = picture()
MESSAGES = {
    "model": "omniloop",
    "max_tokens": 2,
    "system": [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "hi"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}},
                {"type": "document", "title": "t", "source": {"type": "text", "data": "story"}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hmm", "signature": "s"},
                {"type": "redacted_thinking", "data": "z"},
                {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "1"}]}],
        },
        {"role": "system", "content": "more"},
        {"role": "assistant", "content": "so"},
    ],
    "stop_sequences": ["x"],
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "stream": False,
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}, {"type": "web_search_20250305"}],
    "tool_choice": {"type": "none"},
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "output_config": {"effort": "low"},
    "metadata": {"user_id": "u"},
    "cache_salt": "s",
    "chat_template_kwargs": {"a": 1},
}
RESPONSES = {
    "model": "omniloop",
    "instructions": "be",
    "max_output_tokens": 2,
    "input": [
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": "hi"},
                {"type": "input_image", "image_url": f"data:image/png;base64,{PICTURE}"},
            ],
        },
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "content": []},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "namespace": "n"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "1"}]},
        {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "y"},
        {"type": "web_search_call", "id": "w"},
        {"role": "developer", "content": "more"},
    ],
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "tools": [
        {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
        {"type": "custom", "name": "g", "description": "d"},
        {"type": "web_search"},
    ],
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "stream": False,
    "store": True,
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 1,
    "truncation": "auto",
    "metadata": {"a": "b"},
    "user": "u",
}
ODD = [None, True, False, 0, -1, 2.5, 1e300, 2**62, "", "x", "tool", "\u0000", "<|IMAGE|>", [], [[]], {}, {"type": []}]
ODD += [{"type": "text"}, {"type": "message"}, [{"type": "tool_result"}], "item_reference", "ä🎈", [None], [1, "a"]]


def places(value, path=()):
    """Paths of all values inside, at any depth."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*path, key))


def damaged(body, random):
    """The body with one to three values replaced, removed or duplicated."""
    body = copy.deepcopy(body)
    for _ in range(random.randint(1, 3)):
        *path, last = random.choice([path for path in places(body) if path])
        holder = body
        for key in path:
            holder = holder[key]
        kind = random.random()
        if kind < 0.15:
            del holder[last]
        elif kind < 0.3 and isinstance(holder, list):
            holder.insert(last, holder[last])
        else:
            holder[last] = copy.deepcopy(random.choice(ODD))
    return body


@pytest.mark.parametrize(
    ("path", "whole"),
    [("/v1/messages", MESSAGES), ("/v1/messages/count_tokens", MESSAGES), ("/v1/responses", RESPONSES)],
)
async def test_no_damage_is_a_fault_of_the_server(client, path, whole):
    reply = await client.post(path, whole)
    assert reply.status == 200, reply.content
    dice = random.Random(path)
    seen = set()
    for _ in range(250):
        body = damaged(whole, dice)
        if not isinstance(body.get("max_tokens", 0), int) or body.get("max_tokens", 0) > 2:
            body["max_tokens"] = 2  # shorter, because long answers take time
        if path == "/v1/responses":
            body["max_output_tokens"] = 1
        reply = await client.post(path, body)
        assert reply.status in (200, 400, 403, 404, 422, 501), (reply.content, body)
        seen.add(reply.status)
    assert {200, 400} <= seen
    await quiet(client.state)
    assert client.state.places.taken == 0
