"""Tokens that a grammar forces, on every route: streamed and whole answers are equal and count each token once."""

from __future__ import annotations

import json

import jsonschema
import orjson
import pytest

from engine.grammar.row import GrammarRow
from server.output.parser_choice import choose_parsers, made
from server.output.reasoning import ReasoningFormat
from tests.server.live import named_events
from tests.server.structure.test_forced_calls import PATHS, SCHEMA, calls_of, forced

pytestmark = pytest.mark.asyncio(loop_scope="session")
RULED = "ABC (in the year 日本語 😀 naïve) XYZ"
COUNTS = {
    "/v1/chat/completions": ("prompt_tokens", "completion_tokens"),
    "/v1/responses": ("input_tokens", "output_tokens"),
    "/v1/messages": ("input_tokens", "output_tokens"),
}


@pytest.fixture
def runs(monkeypatch):
    """A list of the runs of forced tokens that rows have appended."""
    found, jump = [], GrammarRow.jump

    def remaining(row, most):
        tokens = jump(row, most)
        if tokens:
            found.append(tokens)
        return tokens

    monkeypatch.setattr(GrammarRow, "jump", remaining)
    return found


def received(path, content):
    """The tool calls of a streamed answer, and its usage."""
    calls, usage = {}, {}
    if path == "/v1/chat/completions":
        for line in content.decode().split("\n\n"):
            if not line.startswith("data: {"):
                continue
            event = orjson.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                for call in choice["delta"].get("tool_calls") or ():
                    mine = calls.setdefault(call["index"], ["", ""])
                    mine[0] += call["function"].get("name") or ""
                    mine[1] += call["function"].get("arguments") or ""
    for kind, data in named_events(content) if path != "/v1/chat/completions" else ():
        if kind == "response.output_item.added":
            calls[data["output_index"]] = [data["item"]["name"], ""]
        elif kind == "response.function_call_arguments.delta":
            calls[data["output_index"]][1] += data["delta"]
        elif kind == "response.completed":
            usage = data["response"]["usage"]
        elif kind == "content_block_start":
            calls[data["index"]] = [data["content_block"]["name"], ""]
        elif kind == "content_block_delta":
            calls[data["index"]][1] += data["delta"]["partial_json"]
        elif kind in ("message_start", "message_delta"):
            usage |= data.get("message", data)["usage"]
    return [(name, orjson.loads(arguments or "{}")) for name, arguments in calls.values()], usage


@pytest.mark.parametrize("path", PATHS)
async def test_a_forced_call_is_streamed_as_it_is_whole_and_its_tokens_are_counted(serve, runs, path):
    client = serve()
    client.state.parsers = choose_parsers(client.state.tokenizer, [], "", tools="hermes", reasoning="none")
    body = forced(path, "weather") | {"temperature": 0}
    whole = await client.post(path, body)
    assert whole.status == 200, whole.content
    assert max(map(len, runs)) > 4, "the name of the call and its first field are forced"
    calls, usage = calls_of(path, whole.json()), whole.json()["usage"]
    for _, arguments in calls:
        jsonschema.validate(arguments, SCHEMA)
    more = {"stream_options": {"include_usage": True}} if path == "/v1/chat/completions" else {}
    streamed = await client.post(path, body | {"stream": True} | more)
    told, counted = received(path, streamed.content)
    assert told == calls
    names = COUNTS[path]
    assert [counted[name] for name in names] == [usage[name] for name in names]
    assert usage[names[1]] > sum(map(len, runs)) // 2


async def test_characters_of_several_tokens_are_whole_at_every_length(client, runs):
    asked = {"structured_outputs": {"regex": RULED.replace("(", r"\(").replace(")", r"\)") + "[0-9]"}, "temperature": 0}
    whole = (await client.chat(max_tokens=200, **asked)).json()
    said, count = whole["choices"][0]["message"]["content"], whole["usage"]["completion_tokens"]
    assert said[:-1] == RULED
    assert runs
    for most in range(1, count, 3):
        events = (
            await client.chat(max_tokens=most, stream=True, stream_options={"include_usage": True}, **asked)
        ).events()[:-1]
        pieces = [event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]]
        assert not any("\ufffd" in piece for piece in pieces[:-2])
        assert RULED.startswith("".join(pieces).rstrip("\ufffd"))
        assert events[-1]["usage"]["completion_tokens"] == most


async def test_an_answer_behind_spent_thinking_is_forced_and_counted_apart(client, runs):
    thoughts = ReasoningFormat(("<|vision_bos|>",), ("<|vision_eos|>",), always=True, lines=(0, 0, 0))
    client.state.parsers = made(client.state.tokenizer, "none", None, "thoughts", thoughts)
    schema = {"type": "object", "required": ["departure"], "additionalProperties": False,
              "properties": {"departure": {"enum": ["morning", "midday"]}}}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    asked = {"thinking_token_budget": 4, "max_tokens": 80, "response_format": form, "temperature": 0}
    body = (await client.chat(**asked)).json()
    content = body["choices"][0]["message"]["content"]
    assert json.loads(content)["departure"] in ("morning", "midday")
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 4
    assert runs
    events = (await client.chat(**asked, stream=True, stream_options={"include_usage": True})).events()[:-1]
    said = [event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]]
    assert "".join(said) == content
    assert events[-1]["usage"] == body["usage"]


async def test_beams_choose_every_token(client, runs):
    asked = {"structured_outputs": {"choice": ["a long way to say yes", "another long way"]}, "max_tokens": 30}
    reply = await client.chat(use_beam_search=True, n=2, **asked)
    assert reply.status == 200, reply.content
    said = {choice["message"]["content"] for choice in reply.json()["choices"]}
    assert said <= set(asked["structured_outputs"]["choice"])
    assert not runs
