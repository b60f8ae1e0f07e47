"""Reasoning and tool calls in answers of /v1/responses and /v1/messages, also through the official clients."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import openai
import orjson
import pytest

from server.answers.response_items import free_text
from server.output.completed import completed
from tests.server.live import listening, named_events
from tests.server.routes.test_tool_calls import BOTH, TOOLS, USER, call
from tests.server.scripted import play

pytestmark = pytest.mark.asyncio(loop_scope="session")

FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
BLOCKS = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS]
LAST = "<think>a</think>Then: " + call("tell", to=["x"]) + " after"


async def respond(client, **fields):
    return await client.post("/v1/responses", {"input": "hi", "tools": FLAT, "max_output_tokens": 500, **fields})


async def message(client, **fields):
    return await client.post("/v1/messages", {"messages": USER, "tools": BLOCKS, "max_tokens": 500, **fields})


# -- responses


def brief(item: dict[str, Any]) -> tuple[Any, ...]:
    if item["type"] == "function_call":
        return item["type"], item["name"], item["arguments"], item["status"]
    return item["type"], item["content"][0]["text"], item["status"]


ITEMS = [
    ("reasoning", "Let me see.", "completed"),
    ("message", "I look.", "completed"),
    ("function_call", "look", '{"at": "né"}', "completed"),
    ("function_call", "count", "{}", "completed"),
]


@pytest.mark.parametrize("piece", [1, 4, 1000])
async def test_a_response_holds_an_item_for_each_part(serve, piece):
    client = serve()
    play(client, BOTH, BOTH, piece=piece)
    body = (await respond(client)).json()
    assert [brief(item) for item in body["output"]] == ITEMS
    assert [item["id"].split("_")[0] for item in body["output"]] == ["rs", "msg", "fc", "fc"]
    assert all(item["call_id"].startswith("call_") for item in body["output"][2:])
    assert body["status"] == "completed"
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    streamed = await respond(client, stream=True)
    events = named_events(streamed.content)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    last = events[-1][1]["response"]
    assert [brief(item) for item in last["output"]] == ITEMS
    for at, item in enumerate(last["output"]):
        mine = [data for _, data in events if data.get("output_index") == at]
        assert mine[0]["type"] == "response.output_item.added"
        assert mine[0]["item"]["id"] == item["id"]
        assert mine[-1] == {**mine[-1], "type": "response.output_item.done", "item": item}
        deltas = "".join(data["delta"] for data in mine if data["type"].endswith(".delta"))
        assert deltas == brief(item)[2 if item["type"] == "function_call" else 1]
        assert {data["item_id"] for data in mine if "item_id" in data} == {item["id"]}
        done = [data for data in mine if data["type"].endswith(("text.done", "arguments.done"))]
        assert len(done) == 1
    told = await client.get(f"/v1/responses/{last['id']}?stream=true")
    assert told.content == streamed.content
    for after in (0, 3, 8, len(events) - 3):
        rest = b"".join(event + b"\n\n" for event in streamed.content.split(b"\n\n")[after + 1 : -1])
        assert (await client.get(f"/v1/responses/{last['id']}?stream=true&starting_after={after}")).content == rest


async def test_a_background_response_calls_and_is_followed(serve):
    client = serve()
    play(client, LAST)
    streamed = await respond(client, background=True, stream=True)
    events = named_events(streamed.content)
    kinds = [brief(item)[0] for item in events[-1][1]["response"]["output"]]
    assert kinds == ["reasoning", "message", "function_call", "message"]
    name = events[0][1]["response"]["id"]
    assert (await client.get(f"/v1/responses/{name}?stream=true")).content == streamed.content


async def test_reasoning_that_is_sealed_where_asked_for_goes_back_alone(serve):
    client = serve()
    play(client, LAST, LAST, LAST, "Done.")
    fields = {"include": ["reasoning.encrypted_content"]}
    assert "encrypted_content" not in (await respond(client)).json()["output"][0]
    first = (await respond(client, **fields)).json()["output"][0]
    streamed = await respond(client, stream=True, **fields)
    events = named_events(streamed.content)
    last = events[-1][1]["response"]
    assert last["output"][0]["encrypted_content"] == first["encrypted_content"]
    assert next(data["item"] for kind, data in events if kind.endswith("item.added"))["encrypted_content"] == ""
    assert (await client.get(f"/v1/responses/{last['id']}?stream=true")).content == streamed.content
    seal = {"type": "reasoning", "summary": [], "encrypted_content": first["encrypted_content"]}
    use = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    said = [{"role": "user", "content": "hi"}, seal, use, {**use, "type": "function_call_output", "output": "x"}]
    await respond(client, input=said)
    assert "<think>a</think>" in client.state.engine.prompt()


async def test_a_response_that_is_cut_in_a_call_is_incomplete(serve):
    client = serve()
    play(client, call("look", at="somewhere far away"))
    body = (await respond(client, max_output_tokens=24)).json()
    (item,) = body["output"]
    assert (body["status"], item["status"], item["name"]) == ("incomplete", "incomplete", "look")
    assert item["arguments"].startswith('{"at"')


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "+a\\n-b"}', "+a\n-b"),
        ('{"input": "+a', "+a"),
        ('{"input": ', ""),
        ('{"inp', ""),
        ("", ""),
        ('{"command": "ls"}', '{"command": "ls"}'),
        ('"ls"', '"ls"'),
    ],
)
async def test_the_input_of_a_custom_tool_is_its_text_also_where_it_is_cut(arguments, text):
    assert free_text(arguments) == text


async def test_custom_tools_and_namespaces_are_called_by_their_own_names(serve):
    client = serve()
    tools = [
        {"type": "custom", "name": "patch"},
        {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "b"}]},
    ]
    text = call("patch", input="+a\n-b") + call("ns__b", x=1)
    play(client, text, text, "Done.")
    body = (await respond(client, tools=tools)).json()
    first, second = body["output"]
    assert (first["type"], first["name"], first["input"]) == ("custom_tool_call", "patch", "+a\n-b")
    assert (second["name"], second["namespace"], second["arguments"]) == ("b", "ns", '{"x": 1}')
    events = named_events((await respond(client, tools=tools, stream=True)).content)
    assert "".join(data["delta"] for kind, data in events if kind.endswith("input.delta")) == "+a\n-b"
    assert next(data for kind, data in events if kind.endswith("input.done"))["input"] == "+a\n-b"
    results = [
        {"type": "custom_tool_call_output", "call_id": first["call_id"], "output": "patched"},
        {"type": "function_call_output", "call_id": second["call_id"], "output": "seen"},
    ]
    again = await respond(client, tools=tools, input=results, previous_response_id=body["id"])
    assert again.json()["output"][0]["content"][0]["text"] == "Done."
    assert '{"name": "ns__b", "arguments": {"x": 1}}' in client.state.engine.prompt()


async def test_tools_of_free_text_may_stand_in_a_namespace(serve):
    client = serve()
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    inner = [{"type": "custom", "name": "patch", "format": grammar}, {"type": "function", "name": "b"}]
    tools = [{"type": "namespace", "name": "ns", "description": "", "tools": [*inner, {"type": "web_search"}]}]
    play(client, call("ns__patch", input="+a"), "Done.")
    reply = await respond(client, tools=tools)
    assert reply.reply_headers["x-structured-relaxed"] == "format"
    body = reply.json()
    openai.types.responses.Response.model_validate_json(reply.content, strict=True)
    (item,) = body["output"]
    assert (item["type"], item["name"], item["namespace"], item["input"]) == ("custom_tool_call", "patch", "ns", "+a")
    assert [tool["type"] for tool in body["tools"][0]["tools"]] == ["custom", "function"]
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "patched"}
    again = await respond(client, tools=tools, input=[result], previous_response_id=body["id"])
    assert again.json()["output"][0]["content"][0]["text"] == "Done."
    assert '{"name": "ns__patch", "arguments": {"input": "+a"}}' in client.state.engine.prompt()


async def test_an_agent_goes_twenty_turns_by_responses(serve):
    client = serve()
    names = [FLAT[at % 3]["name"] for at in range(19)]
    texts = [f"<think>\nturn {at}\n</think>\n\n{call(name, at=at)}" for at, name in enumerate(names)]
    script = play(client, *texts, "All done.")
    async with listening(client) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as api:
        asked: Any = {"input": "hi"}
        for at in range(20):
            options: Any = {"model": "omniloop", "tools": FLAT, **asked}
            if at % 2:
                async with api.responses.stream(**options) as stream:
                    async for _ in stream:
                        pass
                    response = await stream.get_final_response()
            else:
                response = await api.responses.create(**options)
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                break
            assert (calls[0].name, json.loads(calls[0].arguments)) == (names[at], {"at": at})
            output = {"type": "function_call_output", "call_id": calls[0].call_id, "output": f"result {at}"}
            asked = {"input": [output], "previous_response_id": response.id}
        assert (at, response.output_text) == (19, "All done.")
    check_history(script, names)


def check_history(script, names):
    prompt = script.prompt()
    for turn, name in enumerate(names):
        assert f"<think>turn {turn}</think>" in prompt
        assert f"result {turn}" in prompt
        assert f'{{"name": "{name}", "arguments": {{"at": {turn}}}}}' in prompt


# -- messages


def parts(body: dict[str, Any]) -> list[tuple[Any, ...]]:
    keys = {"thinking": ("thinking",), "text": ("text",), "tool_use": ("name", "input")}
    return [(block["type"], *(block[key] for key in keys[block["type"]])) for block in body["content"]]


def gathered(content: bytes) -> dict[str, Any]:
    """The message of a stream's events; checks that one block is open at a time."""
    blocks: list[dict[str, Any]] = []
    opened, found = None, {}
    for kind, data in named_events(content):
        if kind == "content_block_start":
            assert opened is None
            opened = data["index"]
            assert opened == len(blocks)
            blocks.append({**data["content_block"], "json": ""})
        elif kind == "content_block_delta":
            assert data["index"] == opened
            delta, block = data["delta"], blocks[-1]
            if delta["type"] == "input_json_delta":
                block["json"] += delta["partial_json"]
            else:
                key = delta["type"].removesuffix("_delta")
                block[key] += delta[key]
        elif kind == "content_block_stop":
            opened = None
        elif kind == "message_delta":
            found = data
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = orjson.loads(text)
    return {"content": blocks, **found["delta"], "usage": found["usage"]}


@pytest.mark.parametrize("piece", [1, 5, 1000])
@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (
            BOTH,
            [
                ("thinking", "Let me see."),
                ("text", "I look."),
                ("tool_use", "look", {"at": "né"}),
                ("tool_use", "count", {}),
            ],
        ),
        (LAST, [("thinking", "a"), ("text", "Then:"), ("tool_use", "tell", {"to": ["x"]}), ("text", " after")]),
    ],
)
async def test_a_message_holds_a_block_for_each_part(serve, text, meant, piece):
    client = serve()
    play(client, text, text, piece=piece)
    body = (await message(client)).json()
    assert parts(body) == meant
    assert (body["stop_reason"], body["stop_sequence"]) == ("tool_use", None)
    assert all(block["id"].startswith("toolu_") for block in body["content"] if block["type"] == "tool_use")
    assert all(block["signature"] for block in body["content"] if block["type"] == "thinking")
    found = gathered((await message(client, stream=True)).content)
    assert parts(found) == meant
    assert found["stop_reason"] == "tool_use"
    assert found["content"][0]["signature"] == body["content"][0]["signature"]


async def test_messages_without_tools_or_with_one_call(serve):
    client = serve()
    play(client, "Plain.", BOTH, call("look", at="somewhere far away", n=[1, 2]), "<think>\nhm")
    assert parts((await message(client)).json()) == [("text", "Plain.")]
    body = (await message(client, tool_choice={"type": "auto", "disable_parallel_tool_use": True})).json()
    assert [block["type"] for block in body["content"]] == ["thinking", "text", "tool_use"]
    body = (await message(client, max_tokens=24)).json()
    assert body["stop_reason"] == "max_tokens"
    assert set(body["content"][0]["input"]) <= {"at"}
    body = (await message(client)).json()
    assert parts(body) == [("thinking", "hm")]


async def test_a_prefill_inside_thinking_goes_on_there(serve):
    client = serve()
    play(client, " more</think>Hi")
    turns = [*USER, {"role": "assistant", "content": "<think>\nI wonder"}]
    assert parts((await message(client, messages=turns)).json()) == [("thinking", " more"), ("text", "Hi")]


async def test_an_agent_goes_twenty_turns_by_messages(serve):
    client = serve()
    names = [BLOCKS[at % 3]["name"] for at in range(19)]
    texts = [f"<think>\nturn {at}\n</think>\n\n{call(name, at=at)}" for at, name in enumerate(names)]
    script = play(client, *texts, "All done.")
    async with listening(client) as url, anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0) as api:
        turns: list[Any] = list(USER)
        for at in range(20):
            options: Any = {"model": "omniloop", "max_tokens": 200, "messages": turns, "tools": BLOCKS}
            if at % 2:
                async with api.messages.stream(**options) as stream:
                    found = await stream.get_final_message()
            else:
                found = await api.messages.create(**options)
            turns.append({"role": "assistant", "content": [block.model_dump() for block in found.content]})
            if found.stop_reason != "tool_use":
                break
            use = found.content[-1]
            assert (use.name, use.input) == (names[at], {"at": at})
            turns.append(
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": use.id, "content": f"result {at}"}],
                }
            )
        assert (at, found.content[0].text) == (19, "All done.")
    check_history(script, names)
    await asyncio.sleep(0)
    assert script.open == 0


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ('{"a": 1, "b": [1, {"c": "x', {"a": 1, "b": [1, {"c": "x"}]}),
        ('{"a": 1, "b', {"a": 1}),
        ('{"a": 1, "b": tr', {"a": 1}),
        ('{"a": "x\\', {}),
        ('{"a": 1, "b": ', {"a": 1}),
        ('{"a": 1}', {"a": 1}),
        ("{", {}),
        ("", {}),
        ("[1", {}),
    ],
)
async def test_cut_arguments_are_completed_without_their_broken_end(text, meant):
    assert completed(text) == meant
