"""Random requests: a stream's chunks join to the whole answer, and no changed body causes a 500."""

from __future__ import annotations

import asyncio
import copy
import random
from typing import Any

import orjson
import pytest

from tests.server.conftest import quiet

pytestmark = pytest.mark.asyncio(loop_scope="session")

ALLOWED = {200, 400, 401, 403, 404, 413, 415, 422, 429, 501}
FORBIDDEN = ("0x", " object at ", 'File "', "Traceback", "site-packages", "msgspec", "/server/", "/engine/")
TEXTS = ["hello", "é😀漢字 \u2028", " ", "a\nb\tc", "the the the", "x" * 300, "<|im_end|>", "1+1="]


def chosen(random_: random.Random, state: Any) -> dict[str, Any]:
    """Random sampling fields of one request."""
    fields: dict[str, Any] = {"max_tokens": random_.randrange(1, 14), "seed": random_.randrange(1000)}
    fields["temperature"] = random_.choice([0, 0.7, 1.5])
    if random_.random() < 0.5:  # bytes of longer characters, so that text is buffered
        fields["allowed_token_ids"] = [random_.randrange(state.vocabulary.width) for _ in range(12)] + list(
            range(128, 220)
        )
    if random_.random() < 0.5:
        fields["stop"] = random_.sample(["e", "th", "  ", "é", "o ", "a"], 2)
        fields["include_stop_str_in_output"] = random_.random() < 0.5
    if random_.random() < 0.3:
        fields["n"] = random_.randrange(1, 4)
    if random_.random() < 0.3:
        fields["ignore_eos"] = True
    if random_.random() < 0.3:
        fields["skip_special_tokens"] = False
    if random_.random() < 0.3:
        fields["return_token_ids"] = True
    if random_.random() < 0.2:
        fields["min_tokens"] = random_.randrange(fields["max_tokens"])
    return fields


@pytest.mark.parametrize("seed", range(6))
async def test_the_stream_makes_the_whole_answer(client, state, seed):
    random_ = random.Random(seed)
    for _ in range(10):
        fields = chosen(random_, state)
        text = random_.choice(TEXTS)
        if random_.random() < 0.4:
            fields["logprobs"], fields["top_logprobs"] = True, 2
        whole, streamed = await asyncio.gather(client.chat(text, **fields), client.chat(text, stream=True, **fields))
        assert whole.status == streamed.status == 200, (fields, whole.content)
        events = streamed.events()
        for choice in whole.json()["choices"]:
            mine = [e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == choice["index"]]
            text_ = "".join(piece["delta"].get("content") or "" for piece in mine)
            assert text_ == choice["message"]["content"], fields
            assert (mine[-1]["finish_reason"], mine[-1]["stop_reason"]) == (
                choice["finish_reason"],
                choice["stop_reason"],
            )
            assert [piece["finish_reason"] for piece in mine[:-1]] == [None] * (len(mine) - 1)
            assert [one for piece in mine for one in piece.get("token_ids", [])] == choice.get("token_ids", [])
            if choice["logprobs"]:
                parts = [piece["logprobs"]["content"] for piece in mine if piece["logprobs"]]
                assert [one for part in parts for one in part] == choice["logprobs"]["content"]


VALUES = [None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 1e308, -0.0, 0.5, "", "x", "é" * 500, "\x00", "\ufffe"]
VALUES += [
    [],
    [1],
    [[]],
    [None],
    {},
    {"a": 1},
    {"type": "text"},
    [{}],
    [{"type": "text"}],
    [{"role": "user"}],
    ["a"] * 40,
]

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MESSAGES = [
    {"role": "system", "content": "be"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "7"},
]
SHARED = {
    "max_tokens": 2,
    "temperature": 1,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "stop": ["x"],
    "n": 1,
    "seed": 1,
    "logit_bias": {"5": 1},
    "stream": True,
    "stream_options": {"include_usage": True},
    "user": "u",
    "allowed_token_ids": [1, 2],
    "bad_words": ["a"],
    "stop_token_ids": [3],
    "min_tokens": 0,
    "priority": 0,
    "cache_salt": "s",
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "dry_multiplier": 0.8,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": 64,
    "dry_sequence_breakers": ["\n"],
    "top_n_sigma": 1,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.1,
    "truncate_prompt_tokens": 100,
    "response_format": {"type": "text"},
    "model": "omniloop",
    "request_id": "r",
    "stream_interval": 1,
}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CHAT = {
    **SHARED,
    "messages": MESSAGES,
    "logprobs": True,
    "top_logprobs": 1,
    "chat_template_kwargs": {"a": 1},
    "tools": TOOLS,
    "tool_choice": "none",
    "documents": [],
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {**SHARED, "prompt": ["a", "b"], "logprobs": 1, "echo": True},
    "/tokenize": {"messages": MESSAGES, "tools": TOOLS, "add_generation_prompt": True, "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2, 3], "model": "omniloop"},
    "/abort_requests": {"request_ids": ["a", "b"]},
}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values in a body."""
    found = [path] if path else []
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in entries:
        found += places(item, (*path, key))
    return found


def changed(random_: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """The body with one to three values replaced or removed."""
    body = copy.deepcopy(body)
    for _ in range(random_.randrange(1, 4)):
        *way, last = random_.choice(places(body) or [("x",)])
        target: Any = body
        for key in way:
            target = target[key]
        if random_.random() < 0.2 and len(target):
            del target[last]
        else:
            target[last] = copy.deepcopy(random_.choice(VALUES))
    return body


@pytest.mark.parametrize("path", BODIES)
async def test_r5_no_body_makes_a_500(serve, state, path):
    client = serve()
    random_ = random.Random(path)
    known = (await client.complete("known", temperature=0)).json()["choices"]
    assert (await client.post(path, BODIES[path])).status == 200
    for _ in range(150):
        body = changed(random_, BODIES[path])
        reply = await client.post(path, body=orjson.dumps(body))
        assert reply.status in ALLOWED, (body, reply.content)
        assert b'"code":500' not in reply.content, body
        text = reply.content.decode()
        if reply.status != 200:
            assert set(reply.error) == {"message", "type", "param", "code", "reason"}
            assert not any(word in text for word in FORBIDDEN), text
    assert (await client.complete("known", temperature=0)).json()["choices"] == known
    assert (await quiet(state))["routes"] == 0
    assert client.state.places.taken == client.state.body_budget.used == 0


async def test_r5_cut_and_flipped_bytes_make_no_500(client):
    random_ = random.Random(5)
    data = orjson.dumps(CHAT)
    for _ in range(150):
        body = bytearray(data[: random_.randrange(1, len(data) + 1)])
        for _ in range(random_.randrange(3)):
            body[random_.randrange(len(body))] = random_.randrange(256)
        reply = await client.post("/v1/chat/completions", body=bytes(body))
        assert reply.status in ALLOWED, (body, reply.content)
