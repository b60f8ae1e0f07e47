"""Answers that a length limit cuts: every transcript after every token, streamed and whole, no half of anything."""

from __future__ import annotations

import json

import httpx
import pytest

from server.output.events import Said
from server.output.tools.base import converted
from server.output.tools.formats import TOOLS
from server.render.load_tokenizer import load_tokenizer
from tests.server.live import listening
from tests.server.output import transcripts as golden
from tests.server.output.test_parsers import CASES, EMBEDDED, parser_of
from tests.server.scripted import play
from tests.server.scripted import tokenizer as marked


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(EMBEDDED)


def cut(tokenizer, pieces, wishes) -> tuple[str, str, list[tuple[str, str]]]:
    """(reasoning, content, calls) of an answer that ends by its length."""
    parser, events = parser_of(tokenizer, **wishes), []
    for piece in pieces:
        parser.feed(piece)
        events += parser.take()
    parser.finish(cut=True)
    found = Said(events + parser.take())
    return found.reasoning, found.content, [(call.name, call.arguments) for call in found.calls]


def begun(content: str, wishes) -> str:
    """The content without one last character that may begin a marker."""
    form = TOOLS.get(wishes.get("tools", ""))
    marks = ("<", "[", "{", "`", "f", *(mark for mark in (form.marks if form else ()) if mark))
    return content[:-1] if content[-1:] in {mark[0] for mark in marks} else content


CALLED = [case for case in CASES if case[3][2]]


@pytest.mark.parametrize(("wishes", "text", "meant"), [case[1:] for case in CALLED], ids=[case[0] for case in CALLED])
def test_a_cut_transcript_shows_a_part_of_the_whole(tokenizer, wishes, text, meant):
    for at in range(1, len(text)):
        found = cut(tokenizer, [text[:at]], wishes)
        assert cut(tokenizer, text[:at], wishes) == found, at
        assert len(found[2]) <= len(meant[2]), (text[:at], found)
        for (name, arguments), (whole_name, whole) in zip(found[2], meant[2]):
            assert name == whole_name, text[:at]
            assert whole.startswith(arguments), (text[:at], arguments)
        shown = found[1].strip()
        assert meant[1].strip().startswith((shown, begun(shown, wishes).strip())), (text[:at], found)


THOUGHT = [case for case in golden.REASONING_CASES if case[1] != "closed" and case[0] != "minimax_m2_append_think"]


@pytest.mark.parametrize(("name", "state", "text", "thought", "content"), THOUGHT)
def test_cut_reasoning_shows_no_half_of_a_marker(tokenizer, name, state, text, thought, content):
    wishes = {"reasoning": name, "state": state}
    for at in range(1, len(text)):
        found = cut(tokenizer, [text[:at]], wishes)
        assert cut(tokenizer, text[:at], wishes) == found, at
        whole = thought + content  # before the end marker, text may turn out to be either
        assert whole.startswith((found[0], found[0][:-1].rstrip())), (text[:at], found)


def test_without_a_whole_name_there_is_neither_call_nor_content(tokenizer):
    for name, text in (
        ("hermes", '<tool_call>\n{"name": "get_wea'),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_wea"),
        ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_wea'),
        ("qwen3_coder", "<tool_call>\n<function=get_wea"),
        ("llama3_json", '{"name": "get_wea'),
        ("pythonic", "[get_wea"),
    ):
        assert cut(tokenizer, text, {"tools": name}) == ("", "", []), name
        assert cut(tokenizer, [f"Yes. {text}"], {"tools": name})[2] == []


def test_granites_reasoning_has_no_blanks_around_it(tokenizer):
    text = "Here is my thought process: \n it is so. \n Here is my response: \n Hi "
    for pieces in ([text], text):
        assert cut(tokenizer, pieces, {"reasoning": "granite"})[:2] == ("it is so.", "Hi ")


@pytest.mark.parametrize("word", ["none", "nil", "NULL", "null", "None"])
def test_words_for_null_are_null_where_nothing_else_is_allowed(word):
    assert converted(word, frozenset(("null",))) == "null"
    if word not in ("null", "None"):
        assert converted(word, frozenset(("null", "string"))) == f'"{word}"'


@pytest.mark.asyncio(loop_scope="session")
async def test_a_call_that_max_tokens_cuts_shows_no_marker_over_a_socket(client):
    """Each number of tokens, whole and streamed; the argument has a character of four bytes."""
    text = '<tool_call>{"name": "f", "arguments": {"s": "a😀b"}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, "temperature": 0}
    play(client, *[text] * 80)
    count = len(marked().encode(text))
    assert count > 10
    async with listening(client) as url, httpx.AsyncClient(base_url=url, timeout=30) as http:
        for most in range(1, count):
            reply = await http.post("/v1/chat/completions", json={**body, "max_tokens": most})
            message = reply.json()["choices"][0]["message"]
            assert not message["content"], (most, message)
            arguments = "".join(call["function"]["arguments"] for call in message.get("tool_calls") or ())
            assert '{"s": "a😀b"}'.startswith(arguments), arguments
            streamed = await http.post("/v1/chat/completions", json={**body, "max_tokens": most, "stream": True})
            lines = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")]
            deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
            assert not "".join(delta.get("content") or "" for delta in deltas)
            calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
            assert "".join(call["function"].get("arguments") or "" for call in calls) == arguments
