"""Tool calls and reasoning in chat completions: streamed and whole answers are equal and have the clients' form."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import orjson
import pytest

from server.output.parser_choice import choose_parsers
from tests.server.live import listening
from tests.server.scripted import play

pytestmark = pytest.mark.asyncio(loop_scope="session")

USER = [{"role": "user", "content": "hi"}]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("look", "count", "tell")
]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


BOTH = f"<think>\nLet me see.\n</think>\n\nI look.\n{call('look', at='né')}\n{call('count')}"


async def ask(client, **fields):
    return await client.post("/v1/chat/completions", {"messages": USER, "max_tokens": 500, **fields})


def put_together(events: list[Any], index: int = 0) -> dict[str, Any]:
    """The message that a client puts together from its chunks."""
    message: dict[str, Any] = {"content": None, "reasoning": None, "reasoning_content": None, "tool_calls": []}
    finish = []
    for event in events[:-1]:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            for key in ("content", "reasoning", "reasoning_content"):
                if delta.get(key):
                    message[key] = (message[key] or "") + delta[key]
            for part in delta.get("tool_calls", ()):
                if part["index"] == len(message["tool_calls"]):
                    assert part["type"] == "function"
                    assert part["function"]["arguments"] == ""
                    message["tool_calls"].append(part)
                else:
                    assert set(part) == {"index", "function"}
                    message["tool_calls"][part["index"]]["function"]["arguments"] += part["function"]["arguments"]
            if choice["finish_reason"]:
                finish.append(choice["finish_reason"])
    assert len(finish) == 1
    return {**message, "finish_reason": finish[0]}


@pytest.mark.parametrize("piece", [1, 3, 1000])
async def test_a_stream_and_a_body_say_the_same(serve, piece):
    client = serve()
    play(client, BOTH, BOTH, piece=piece)
    body = (await ask(client, tools=TOOLS)).json()
    (choice,) = body["choices"]
    message = choice["message"]
    assert (message["reasoning"], message["reasoning_content"]) == ("Let me see.", "Let me see.")
    assert message["content"] == "I look."
    assert [entry["function"] for entry in message["tool_calls"]] == [
        {"name": "look", "arguments": '{"at": "né"}'},
        {"name": "count", "arguments": "{}"},
    ]
    assert all(entry["id"].startswith("chatcmpl-tool-") for entry in message["tool_calls"])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", None)
    assert 0 < body["usage"]["completion_tokens_details"]["reasoning_tokens"] < body["usage"]["completion_tokens"]
    streamed = await ask(client, tools=TOOLS, stream=True, stream_options={"include_usage": True})
    events = streamed.events()
    found = put_together(events)
    assert events[-2]["usage"]["completion_tokens_details"] == body["usage"]["completion_tokens_details"]
    assert found["finish_reason"] == "tool_calls"
    for key in ("content", "reasoning", "reasoning_content"):
        assert found[key] == message[key]
    assert [part["function"] for part in found["tool_calls"]] == [part["function"] for part in message["tool_calls"]]
    deltas = [choice["delta"] for event in events[:-2] for choice in event["choices"]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert [delta for delta in deltas if not delta] == [{}]


async def test_what_is_not_asked_for_stays_text(serve):
    client = serve()
    play(client, BOTH, BOTH, BOTH)
    (choice,) = (await ask(client)).json()["choices"]  # no tools
    assert choice["message"]["content"].startswith("I look.\n<tool_call>\n{")
    assert choice["finish_reason"] == "stop"
    (choice,) = (await ask(client, tools=TOOLS, tool_choice="none")).json()["choices"]
    assert choice["message"]["content"].endswith("</tool_call>")
    assert "tool_calls" not in choice["message"]
    client = serve(chat={"tool_call_parser": "none"})
    play(client, BOTH, BOTH, tools="none", reasoning="none")
    strict = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    for tools in (TOOLS, strict):
        (choice,) = (await ask(client, tools=tools)).json()["choices"]
        assert choice["message"]["content"] == BOTH
    assert client.state.engine.requests


async def test_reasoning_is_hidden_or_named_as_asked(serve):
    client = serve(chat={"reasoning_field": "reasoning"})
    play(client, *[BOTH] * 4)
    (choice,) = (await ask(client)).json()["choices"]
    assert choice["message"]["reasoning"] == "Let me see."
    assert "reasoning_content" not in choice["message"]
    events = (await ask(client, stream=True)).events()[:-1]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert any("reasoning" in delta for delta in deltas)
    assert not any("reasoning_content" in delta for delta in deltas)
    body = (await ask(client, include_reasoning=False)).json()
    assert "reasoning" not in body["choices"][0]["message"]
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    assert b"reasoning" not in (await ask(client, include_reasoning=False, stream=True)).content


async def test_the_prompt_says_whether_the_model_thinks(serve):
    client = serve()
    play(client, "hm\n</think>\n\nHi", "Hi </think>", "hm", "<think>\nhm</think>", " more</think>Hi")
    opened = {"chat_template_kwargs": {"open_thinking": True}}
    message = (await ask(client, **opened)).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("hm", "Hi")
    message = (await ask(client, chat_template_kwargs={"enable_thinking": False})).json()["choices"][0]["message"]
    assert (message.get("reasoning"), message["content"]) == (None, "Hi </think>")
    choice = (await ask(client, max_tokens=1, **opened)).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "length")
    assert choice["message"]["reasoning"]
    message = (await ask(client)).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("hm", None)
    continued = [*USER, {"role": "assistant", "content": "<think>\nI wonder"}]
    fields = {"messages": continued, "continue_final_message": True, "max_tokens": 50}
    message = (await client.post("/v1/chat/completions", fields)).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (" more", "Hi")


async def test_a_call_that_is_cut_keeps_its_beginning(serve):
    client = serve()
    text = call("look", at="somewhere far away, over the hills")
    play(client, text, text)
    (choice,) = (await ask(client, tools=TOOLS, max_tokens=25)).json()["choices"]
    (found,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "length"
    assert found["function"]["arguments"].startswith('{"at": "s')
    assert not found["function"]["arguments"].endswith("}")
    streamed = put_together((await ask(client, tools=TOOLS, max_tokens=25, stream=True)).events())
    assert streamed["tool_calls"][0]["function"] == found["function"]
    assert streamed["finish_reason"] == "length"


async def test_one_call_and_several_choices(serve):
    client = serve()
    play(client, BOTH, BOTH)
    body = (await ask(client, tools=TOOLS, parallel_tool_calls=False, n=3)).json()
    assert [len(choice["message"]["tool_calls"]) for choice in body["choices"]] == [1, 1, 1]
    ids = {choice["message"]["tool_calls"][0]["id"] for choice in body["choices"]}
    assert len(ids) == 3
    events = (await ask(client, tools=TOOLS, n=3, stream=True)).events()
    assert len({len(put_together(events, index)["tool_calls"]) for index in range(3)}) == 1


async def test_stop_strings_token_ids_and_bounds_meet_parsers(serve):
    client = serve()
    play(client, *[BOTH] * 3)
    (choice,) = (await ask(client, tools=TOOLS, stop=["</think>"], return_token_ids=True)).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "</think>")
    assert choice["message"]["reasoning"] == "Let me see."
    assert choice["message"]["content"] is None
    (choice,) = (await ask(client, tools=TOOLS, stop=["look"])).json()["choices"]
    assert choice["message"]["content"] == "I "
    events = (await ask(client, tools=TOOLS, stream=True, return_token_ids=True)).events()
    ids = [token for event in events[:-1] for choice in event["choices"] for token in choice.get("token_ids", [])]
    assert client.state.tokenizer.decode(ids) == BOTH + "<|im_end|>"


async def test_tools_of_a_model_without_a_known_format_are_refused(serve):
    client = serve()
    client.state.parsers = choose_parsers(client.state.tokenizer, [], "")
    reply = await ask(client, tools=TOOLS)
    assert (reply.status, reply.error["param"]) == (501, "tools")
    assert "--tool-call-parser" in reply.error["message"]


async def test_a_parser_is_gone_with_its_answer(serve):
    import gc
    import weakref

    from server.output.parser import OutputParser

    made = []
    client = serve()
    play(client, *[BOTH] * 2)
    init = OutputParser.__init__

    def noted(self, source, *rest):
        init(self, source, *rest)
        made.append(weakref.ref(self._run))

    OutputParser.__init__ = noted
    gc.disable()
    try:
        await ask(client, tools=TOOLS, stream=True)
        gone = client.call("POST", "/v1/chat/completions", {"messages": USER, "tools": TOOLS, "stream": True}).start()
        await gone.wrote.wait()
        gone.leave()
        await gone.finish()
        assert len(made) == 2
        assert not any(reference() for reference in made)
    finally:
        gc.enable()
        OutputParser.__init__ = init


async def test_the_official_client_reads_calls_as_they_come(serve):
    client = serve()
    play(client, BOTH, BOTH)
    async with listening(client) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as api:
        tools: Any = TOOLS
        async with api.chat.completions.stream(model="omniloop", messages=USER, tools=tools) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
        assert "tool_calls.function.arguments.delta" in kinds
        found = final.choices[0].message.tool_calls
        assert [(one.function.name, one.function.arguments) for one in found] == [
            ("look", '{"at": "né"}'),
            ("count", "{}"),
        ]
        whole = await api.chat.completions.create(model="omniloop", messages=USER, tools=tools)
        assert whole.choices[0].finish_reason == "tool_calls"
        assert whole.choices[0].message.reasoning_content == "Let me see."


async def test_an_agent_goes_twenty_turns_with_three_tools(serve):
    client = serve()
    names = [TOOLS[at % 3]["function"]["name"] for at in range(19)]
    texts = [f"<think>\nturn {at}\n</think>\n\n{call(name, at=at, s='<é>')}" for at, name in enumerate(names)]
    script = play(client, *texts, "All done.")
    messages: list[Any] = list(USER)
    async with listening(client) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as api:
        for at in range(20):
            options: Any = {"model": "omniloop", "messages": messages, "tools": TOOLS, "max_tokens": 200}
            if at % 2:
                async with api.chat.completions.stream(**options) as stream:
                    (choice,) = (await stream.get_final_completion()).choices
            else:
                (choice,) = (await api.chat.completions.create(**options)).choices
            messages.append(choice.message.model_dump(exclude_none=True))
            if choice.finish_reason == "stop":
                break
            (found,) = choice.message.tool_calls
            assert (found.function.name, orjson.loads(found.function.arguments)) == (names[at], {"at": at, "s": "<é>"})
            messages.append({"role": "tool", "tool_call_id": found.id, "content": f"result {at}"})
    assert (at, messages[-1]["content"]) == (19, "All done.")
    prompt = script.prompt()
    for turn in range(19):
        assert f"<think>turn {turn}</think>" in prompt
        assert f"result {turn}" in prompt
        assert f'{{"name": "{names[turn]}", "arguments": {{"at": {turn}, "s": "' in prompt
    await asyncio.sleep(0)
    assert script.open == 0


async def test_s31_calls_and_arguments_beyond_the_limits_are_content(serve):
    client = serve(limits={"max_tool_calls": 1})
    play(client, BOTH, BOTH, piece=3)
    (choice,) = (await ask(client, tools=TOOLS)).json()["choices"]
    assert [entry["function"]["name"] for entry in choice["message"]["tool_calls"]] == ["look"]
    assert choice["message"]["content"].endswith(call("count"))
    message = put_together((await ask(client, tools=TOOLS, stream=True)).events())
    assert (message["content"], message["finish_reason"]) == (choice["message"]["content"], choice["finish_reason"])
    client = serve(limits={"max_tool_argument_bytes": 64})
    play(client, call("look", at="x" * 100) + call("count"), piece=3)
    (choice,) = (await ask(client, tools=TOOLS)).json()["choices"]
    first, second = (entry["function"] for entry in choice["message"]["tool_calls"])
    assert 60 < len(first["arguments"]) <= 64
    assert second["arguments"] == "{}"
    assert choice["message"]["content"].startswith("xxx")
