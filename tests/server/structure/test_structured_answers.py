"""Answers under a schema, on every route; a schema that cannot be enforced is refused before the engine works."""

import json
import re

import jsonschema
import pytest
from tokenizers import AddedToken

from engine.base.grammar import GrammarSpec
from engine.grammar.row import GrammarRow
from server.render.hf_tokenizer import HfTokenizer
from server.render.load_tokenizer import load_tokenizer
from server.start.makers import make_grammars
from tests.server.conftest import quiet
from tests.server.scripted import EMBEDDED
from tests.server.structure.test_structure import SCHEMA as NULL

pytestmark = pytest.mark.asyncio(loop_scope="session")
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
HELD = re.compile(r"([^<]*<n>[12]</n>)+[^<]*(<(n(>([12](<(/n?)?)?)?)?)?)?")  # the last tag may be cut off
FREE = {"max_tokens": 60, "ignore_eos": False}


def fits(text):
    jsonschema.validate(json.loads(text), SCHEMA)


async def test_every_route_holds_answers_to_a_schema(client):
    flat = {"type": "json_schema", "name": "n", "schema": SCHEMA}
    chat = (await client.chat(response_format=FORMAT, **FREE)).json()["choices"][0]
    assert chat["finish_reason"] == "stop"
    fits(chat["message"]["content"])
    done = (await client.complete(structured_outputs={"json": SCHEMA}, **FREE)).json()["choices"][0]
    assert done["finish_reason"] == "stop"
    fits(done["text"])
    body = {"input": "hello", "max_output_tokens": 60, "text": {"format": flat}}
    made = (await client.post("/v1/responses", body)).json()
    fits(made["output"][0]["content"][0]["text"])
    assert made["text"]["format"] == flat
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 60}
    for where in ({"output_config": {"format": flat}}, {"output_format": flat}):
        fits((await client.post("/v1/messages", {**body, **where})).json()["content"][0]["text"])
    body = {"token_ids": [5, 6, 7], "output_mode": "text", "sampling_params": {**FREE, "response_format": FORMAT}}
    fits((await client.post("/inference/v1/generate", body)).json()["choices"][0]["text"])


async def test_white_space_that_is_an_added_token_is_text_and_a_marker_is_not(client, monkeypatch):
    core = load_tokenizer(EMBEDDED).core
    core.add_tokens([AddedToken(text, normalized=False) for text in ("\n", "\n\n", "   ", "<tool>")])
    known = HfTokenizer(core, {}, {})
    monkeypatch.setattr(client.state, "tokenizer", known)
    compiler = make_grammars(client.state)
    grammar = await compiler.get(b"lines", lambda: GrammarSpec("lark", "start: /(?s:.*)/"))
    text = known.encode("a\n\nb\nc   d")
    assert text[1] == known.added_tokens["\n\n"]
    assert grammar.matcher().try_consume_tokens(text) == len(text)
    assert not grammar.matcher().consume_token(known.added_tokens["<tool>"])
    compiler.close()


async def test_a_schema_that_was_refused_before_is_refused_under_the_name_of_each_routes_field(client):
    schema = {"type": "array", "uniqueItems": True, "title": "seen on four routes"}
    flat = {"type": "json_schema", "name": "n", "schema": schema}
    say, hi = {"max_tokens": 1}, [{"role": "user", "content": "hi"}]
    for path, body, field in (
        ("/v1/messages", {"messages": hi, **say, "output_config": {"format": flat}}, "output_config.format.schema"),
        ("/v1/responses", {"input": "hi", "text": {"format": flat}}, "text.format.schema"),
        (
            "/v1/chat/completions",
            {"messages": hi, **say, "structured_outputs": {"json": schema}},
            "structured_outputs.json",
        ),
    ):
        reply = await client.post(path, body)
        assert reply.status == 400
        assert reply.error["message"].startswith(f"{field}.uniqueItems: "), path


@pytest.fixture
def patient(client, monkeypatch):
    """A long timeout of compilation: its threads have low priority, so a busy machine may take long."""
    monkeypatch.setattr(client.state.grammars, "_timeout", 60.0)


SIGNS = ["a\x7f\x00\x1b", 'b"\\', "\n\t\u2028"]


@pytest.mark.parametrize(
    "of", [[f"{n} birds" for n in range(4096)], ["a", "ab", "abc"], SIGNS], ids=["most", "prefixes", "signs"]
)
async def test_an_answer_is_one_of_the_choices(client, of, patient):
    reply = await client.chat(structured_outputs={"choice": of}, **FREE)
    assert reply.json()["choices"][0]["message"]["content"] in of


async def test_what_grows_beyond_the_limits_in_the_middle_is_no_mistake_of_the_server(client, patient):
    wide = "start: " + " | ".join(f'"{n} birds"' for n in range(4096))
    reply = await client.chat(structured_outputs={"grammar": wide}, **FREE)
    assert (reply.status, reply.error["reason"]) == (400, "grammar_conflict")
    assert "make the grammar simpler" in reply.error["message"]


async def test_text_without_a_choice_is_streamed_counted_and_stopped_in(client, monkeypatch):
    runs, jump = [], GrammarRow.jump
    monkeypatch.setattr(GrammarRow, "jump", lambda row, most: runs.append(jump(row, most)) or runs[-1])
    schema = {"type": "object", "required": ["departure"], "additionalProperties": False,
              "properties": {"departure": {"enum": ["morning", "midday"]}}}  # fmt: skip
    asked = {**FREE, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}
    whole = (await client.chat(**asked, return_token_ids=True)).json()
    content, ids = whole["choices"][0]["message"]["content"], whole["choices"][0]["token_ids"]
    assert json.loads(content)["departure"] in ("morning", "midday")
    assert whole["usage"]["completion_tokens"] == len(ids)
    events = (await client.chat(**asked, stream=True, stream_options={"include_usage": True})).events()[:-1]
    said = [event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]]
    assert "".join(said) == content
    assert events[-1]["usage"] == whole["usage"]
    assert max(map(len, runs)) > 2
    for stop in ("part", 'ure"'):
        cut = (await client.chat(**asked, stop=[stop])).json()["choices"][0]
        assert (cut["message"]["content"], cut["finish_reason"]) == (content.partition(stop)[0], "stop")


async def test_a_stream_and_a_background_answer_are_held_too(client):
    events = (await client.chat(response_format=FORMAT, stream=True, **FREE)).events()[:-1]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    fits("".join(event["choices"][0]["delta"].get("content") or "" for event in events))
    flat = {"type": "json_schema", "name": "n", "schema": SCHEMA}
    body = {"input": "hello", "max_output_tokens": 60, "text": {"format": flat}, "background": True}
    made = (await client.post("/v1/responses", body)).json()
    while made["status"] in ("queued", "in_progress"):
        made = (await client.get(f"/v1/responses/{made['id']}")).json()
    fits(made["output"][0]["content"][0]["text"])


@pytest.mark.parametrize(
    ("asked", "answers"),
    [
        ({"choice": ["yes", "no"]}, {"yes", "no"}),
        ({"regex": "[ab]{2}"}, {"aa", "ab", "ba", "bb"}),
        ({"grammar": 'root ::= "x" | "y"'}, {"x", "y"}),
        ({"json": NULL["json_schema"]["schema"]}, {"null"}),
    ],
)
async def test_each_kind_holds_all_choices(client, state, asked, answers):
    reply = await client.chat(structured_outputs=asked, n=3, temperature=1, **FREE)
    choices = reply.json()["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    assert {choice["message"]["content"] for choice in choices} <= answers
    assert (await quiet(state))["matchers"] == 0


async def test_a_trigger_opens_its_tag_in_free_text(client):
    tag = {"structures": [{"begin": "<n>", "schema": {"enum": [1, 2]}, "end": "</n>"}], "triggers": ["<"]}
    (token,) = client.state.tokenizer.encode("<")
    fields = {**FREE, "logit_bias": {str(token): 60.0}, "temperature": 0}
    for asked in (
        {"structured_outputs": {"structural_tag": tag}},
        {"response_format": {"type": "structural_tag", **tag}},
    ):
        choice = (await client.chat(**asked, **fields)).json()["choices"][0]
        assert HELD.fullmatch(choice["message"]["content"]), "whatever opens a tag is held to it, up to the cut"


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format.json_schema.schema.not",
            "grammar_invalid",
        ),
        ({"structured_outputs": {"regex": "a{2,5000}"}}, "structured_outputs.regex", "grammar_too_complex"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "grammar_invalid"),
        ({"structured_outputs": {"grammar": "start: <|im_end|>"}}, "structured_outputs.grammar", "grammar_invalid"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": False}}},
            "response_format.json_schema.schema",
            "grammar_invalid",
        ),
    ],
)
async def test_what_cannot_be_held_is_refused(client, fields, param, reason):
    reply = await client.chat(**fields)
    assert (reply.status, reply.error["param"], reply.error["reason"]) == (400, param, reason)


async def test_an_answer_without_a_token_left_ends_alone(client):
    ids = {"allowed_token_ids": [client.state.tokenizer.encode("z")[0]]}
    reply = await client.chat(structured_outputs={"choice": ["yes"]}, **ids)
    assert (reply.status, reply.error["reason"]) == (400, "grammar_conflict")


async def test_a_server_without_grammars_says_so(client, monkeypatch):
    monkeypatch.setattr(client.state, "grammars", None)
    reply = await client.chat(response_format={"type": "json_object"})
    assert (reply.status, reply.error["param"]) == (501, "response_format")
