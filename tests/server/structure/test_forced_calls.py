"""Required calls and calls of strict tools: the grammar enforces their schemas, and the same parser reads them."""

# ruff: noqa: E501

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Literal

import jsonschema
import openai
import orjson
import pydantic
import pytest

from engine.base.errors import GrammarError
from engine.base.grammar import GrammarSpec
from engine.grammar.compile import compile_now
from engine.grammar.vocabulary import GrammarVocabulary
from server.flags.config import LimitsConfig
from server.output.parser_choice import choose_parsers, made
from server.output.reasoning import ReasoningFormat
from server.output.tools.formats import TOOLS as FORMATS
from server.start import makers
from server.structure.call_shapes import grammar_of
from server.structure.call_values import Tool
from server.structure.structure import relaxed
from tests.server.live import listening
from tests.server.output.test_parsers import parser_of, said
from tests.server.scripted import play, tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="session")

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
F = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
G = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}


# -- every format's grammar allows what its parser reads


def vocabulary() -> GrammarVocabulary:
    if not MADE:
        known = tokenizer()
        MADE.append(
            GrammarVocabulary(known.token_bytes, set(known.added_tokens.values()).__contains__, known.vocab_size)
        )
    return MADE[0]


MADE: list[GrammarVocabulary] = []
M3 = "]<]minimax[>["
CALLS = {
    "f": {"s": "x y", "n": 4, "o": {"k": [1]}},
    "g": {},
}
PROPERTIES = {"s": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}}


def text_of(schema: Any, path: str) -> str:
    return relaxed(schema, path, LimitsConfig())[0]


def left(keyword: str, path: str) -> None:
    raise AssertionError(f"{path}: {keyword} is not held")


SHAPED = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"s": "x y", "n": 4, "o": {"k": [1]}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=s>\nx y\n</parameter>\n<parameter=n>\n4\n</parameter>\n"
    '<parameter=o>\n{"k": [1]}\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>',
    "seed_oss": "<seed:tool_call>\n<function=f>\n<parameter=s>\nx y\n</parameter>\n<parameter=n>\n4\n</parameter>\n"
    '<parameter=o>\n{"k": [1]}\n</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=g>\n</function>\n'
    "</seed:tool_call>",
    "glm45": "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>x y</arg_value>\n<arg_key>n</arg_key>\n<arg_value>4</arg_value>"
    '\n<arg_key>o</arg_key>\n<arg_value>{"k": [1]}</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>',
    "glm47": "<tool_call>f<arg_key>s</arg_key><arg_value>x y</arg_value><arg_key>n</arg_key><arg_value>4</arg_value>"
    '<arg_key>o</arg_key><arg_value>{"k": [1]}</arg_value></tool_call><tool_call>g</tool_call>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">\nx y\n</parameter>\n<parameter name="n">\n4\n'
    '</parameter>\n<parameter name="o">\n{"k": [1]}\n</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n'
    "</minimax:tool_call>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"s": "x y", "n": 4, "o": {"k": [1]}}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n'
    "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"s": "x y", "n": 4, "o": {"k": [1]}}'
    "<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="s" string="true">x y'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="n" string="false">4</｜DSML｜parameter>\n<｜DSML｜parameter name="o" '
    'string="false">{"k": [1]}</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="g">\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"s": "x y", "n": 4, "o": {"k": [1]}}<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}'
    "<|tool_call_end|><|tool_calls_section_end|>",
    "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": {"s": "x y", "n": 4, "o": {"k": [1]}}}, '
    '{"name": "g", "arguments": {}}]',
    "llama3_json": '{"name": "f", "parameters": {"s": "x y", "n": 4, "o": {"k": [1]}}}; {"name": "g", "parameters": {}}',
    "pythonic": '[f(s="x y", n=4, o={"k": [1]}), g()]',
    "olmo3": '<function_calls>f(s="x y", n=4, o={"k": [1]})\ng()</function_calls>',
    "jamba": '<tool_calls>[{"name": "f", "arguments": {"s": "x y", "n": 4, "o": {"k": [1]}}}, '
    '{"name": "g", "arguments": {}}]</tool_calls>',
    "phi4_mini_json": 'functools[{"name": "f", "arguments": {"s": "x y", "n": 4, "o": {"k": [1]}}}, '
    '{"name": "g", "arguments": {}}]',
    "cohere_command3": '<|START_ACTION|>[{"tool_name": "f", "parameters": {"s": "x y", "n": 4, "o": {"k": [1]}}}, '
    '{"tool_name": "g", "parameters": {}}]<|END_ACTION|>',
    "apertus": '<|tools_prefix|>[{"f": {"s": "x y", "n": 4, "o": {"k": [1]}}}, {"g": {}}]<|tools_suffix|>',
    "gemma4": '<|tool_call>call:f{n:4,o:{k:[1]},s:<|"|>x y<|"|>}<tool_call|><|tool_call>call:g{}<tool_call|>',
    "functiongemma": "<start_function_call>call:f{n:4,o:{k:[1]},s:<escape>x y<escape>}<end_function_call>"
    "<start_function_call>call:g{}<end_function_call>",
    "minimax_m3": f'{M3}<tool_call>\n{M3}<invoke name="f">{M3}<s>x y{M3}</s>{M3}<n>4{M3}</n>{M3}<o>{M3}<k>[1]{M3}</k>'
    f'{M3}</o>{M3}</invoke>\n{M3}<invoke name="g">{M3}</invoke>\n{M3}</tool_call>',
    "step3": '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">\n'
    '<steptml:parameter name="s">\nx y\n</steptml:parameter>\n<steptml:parameter name="n">\n4\n</steptml:parameter>\n'
    '<steptml:parameter name="o">\n{"k": [1]}\n</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>'
    '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="g"></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>',
}


@pytest.mark.parametrize("name", SHAPED)
async def test_the_grammar_takes_what_the_parser_reads(name):
    known = tokenizer()
    ids = {marker: known.added_tokens[marker] for marker in ("<tool_call>", "</tool_call>")}
    required = {"type": "object", "properties": PROPERTIES, "required": list(PROPERTIES)}
    empty = {"type": "object", "properties": {}}
    tools = [Tool("f", required, "f", text_of, left), Tool("g", empty, "g", text_of, left)]
    lark = grammar_of(FORMATS[name], ids, tools, must=True, most=0)
    assert lark is not None
    matcher = compile_now(GrammarSpec("lark", lark), vocabulary()).matcher()
    text = SHAPED[name]
    tokens = known.encode(text)
    for at, token in enumerate(tokens):
        assert matcher.consume_token(token), (known.decode(tokens[:at]), known.decode(tokens[at : at + 1]), lark)
    assert matcher.is_accepting()
    calls = said(parser_of(known, name), text)[2]
    assert [(found, orjson.loads(arguments)) for found, arguments in calls] == list(CALLS.items())


async def test_in_free_text_calls_of_strict_tools_follow_their_schemas():
    known = tokenizer()
    ids = {marker: known.added_tokens[marker] for marker in ("<tool_call>", "</tool_call>")}
    lark = grammar_of(FORMATS["hermes"], ids, [Tool("weather", SCHEMA, "p", text_of, left)], must=False, most=0)
    grammar = compile_now(GrammarSpec("lark", lark), vocabulary())

    def takes(text: str) -> bool:
        matcher = grammar.matcher()
        return all(matcher.consume_token(token) for token in known.encode(text)) and matcher.is_accepting()

    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
    assert takes("no call at all")
    assert takes(f"first {call} then")
    assert takes(f"{call}\n{call}")
    assert not takes(call.replace("2", "20"))
    assert not takes(call.replace("weather", "other"))


HELD = '{"name": "weather", "parameters": {"city": "Rome", "days": 2}}'
CODE = '[weather(city="Rome", days=2)]'
CODED = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)


@pytest.mark.parametrize(
    ("form", "taken", "refused"),
    [
        (
            "llama3_json",
            ("", "Hi {x}", HELD, f"{HELD}; {HELD}"),
            (f" \n{HELD[:-3]}20}}", f"<|python_tag|>{HELD}", "{}"),
        ),
        ("pythonic", ("see [1]", CODE), (CODE.replace("2", "20"), f"\n{CODE[:-1]}, g()]", "[1]")),
        ("llama4_pythonic", ("text", CODE), (CODE.replace("2", "20"), f"<|python_start|>{CODE}")),
        ("xlam", ("Hi", f"[{HELD.replace('parameters', 'arguments')}]"), ('[{"name": "g", "arguments": {}}]',)),
        ("qwen3_coder", ("Hi <b>", CODED), (CODED[11:], CODED.replace("2", "20"), "Hi <function=g>\n</function>")),
    ],
)
async def test_calls_that_begin_without_a_marker_are_held_too(form, taken, refused):
    known = tokenizer()
    ids = {marker: known.added_tokens[marker] for marker in ("<tool_call>", "</tool_call>") if form == "qwen3_coder"}
    tool = Tool("weather", SCHEMA, "p", text_of, left)
    for most in (0, 1):
        lark = grammar_of(FORMATS[form], ids, [tool], must=False, most=most)
        grammar = compile_now(GrammarSpec("lark", lark), vocabulary())
        for text, wanted in [*((text, True) for text in taken), *((text, False) for text in refused)]:
            matcher = grammar.matcher()
            takes = all(matcher.consume_token(token) for token in known.encode(text)) and matcher.is_accepting()
            assert takes == (wanted and (most == 0 or "; {" not in text)), text


async def test_no_call_slips_in_behind_a_call_that_is_held():
    known = tokenizer()
    form = replace(FORMATS["llama3_json"], begins=("<tool_call>",))  # a token of this vocabulary
    ids = {"<tool_call>": known.added_tokens["<tool_call>"]}
    lark = grammar_of(form, ids, [Tool("weather", SCHEMA, "p", text_of, left)], must=False, most=0)
    grammar = compile_now(GrammarSpec("lark", lark), vocabulary())
    for behind, wanted in (("", 1), (f"; {HELD}", 1), (" ok {x}", 1), ("\n{x", 0), ('; {"name": "weather", ', 0)):
        matcher, tokens = grammar.matcher(), known.encode(f"<tool_call>{HELD}{behind}")
        takes = all(matcher.consume_token(token) for token in tokens) and matcher.is_accepting()
        assert takes == bool(wanted), behind


@pytest.mark.parametrize("most", [0, 1])
async def test_in_free_text_a_marker_may_be_text(most):
    known, tools = tokenizer(), [Tool("weather", SCHEMA, "p", text_of, left), Tool("now", SCHEMA, "p", text_of, left)]
    lark = grammar_of(FORMATS["hermes"], {}, tools, must=False, most=most)
    grammar = compile_now(GrammarSpec("lark", lark), vocabulary())

    def takes(text: str) -> bool:
        matcher = grammar.matcher()
        return all(matcher.consume_token(known.encode(char)[0]) for char in text) and matcher.is_accepting()

    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
    assert all(map(takes, ("", "no call at all", "a <tool is not one", call, f"first {call} then")))
    assert takes(f"{call}\n{call.replace('weather', 'now')}") == (most == 0)
    for wrong in (call.replace("2", "20"), call.replace("weather", "other"), "the <tool_call> alone", call[:-1]):
        assert not takes(wrong)
        assert not takes(f"first {wrong}")


# -- over HTTP, with a model that emits random tokens


def forced(path: str, choice: str, tools: list[Any] = [F, G]) -> dict[str, Any]:  # noqa: B006
    user = [{"role": "user", "content": "hi"}]
    name = None if choice in ("required", "auto") else choice
    if path == "/v1/messages":
        kinds = {"required": {"type": "any"}, "auto": {"type": "auto"}}
        flat = [{"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in tools]
        return {
            "messages": user,
            "max_tokens": 200,
            "tools": flat,
            "tool_choice": kinds.get(choice) or {"type": "tool", "name": name},
        }
    if path == "/v1/responses":
        flat = [{"type": "function", **t["function"]} for t in tools]
        picked: Any = choice if name is None else {"type": "function", "name": name}
        return {
            "input": "hi",
            "max_output_tokens": 200,
            "tools": flat,
            "tool_choice": picked,
            "parallel_tool_calls": False,
        }
    picked = choice if name is None else {"type": "function", "function": {"name": name}}
    return {"messages": user, "max_tokens": 200, "tools": tools, "tool_choice": picked, "parallel_tool_calls": False}


def calls_of(path: str, body: dict[str, Any]) -> list[tuple[str, Any]]:
    if path == "/v1/messages":
        return [(block["name"], block["input"]) for block in body["content"]]
    if path == "/v1/responses":
        return [(item["name"], orjson.loads(item["arguments"])) for item in body["output"]]
    calls = body["choices"][0]["message"]["tool_calls"]
    return [(call["function"]["name"], orjson.loads(call["function"]["arguments"])) for call in calls]


PATHS = ["/v1/chat/completions", "/v1/responses", "/v1/messages"]


@pytest.fixture
def calling(serve):
    """The embedded model with its own format, hermes; the markers are text."""
    client = serve()
    client.state.parsers = choose_parsers(client.state.tokenizer, [], "", tools="hermes", reasoning="none")
    return client


@pytest.mark.parametrize("path", PATHS)
async def test_a_call_that_must_come_comes_and_fits_its_schema(calling, path):
    for choice in ("required", "weather", "now"):
        reply = await calling.post(path, forced(path, choice))
        assert reply.status == 200, reply.content
        found = calls_of(path, reply.json())
        assert len(found) == 1 or path == "/v1/messages"
        for name, arguments in found:
            assert name in ("weather", "now") if choice == "required" else name == choice
            jsonschema.validate(arguments, SCHEMA if name == "weather" else {"type": "object"})


async def test_a_call_that_must_come_and_is_cut_before_its_name_shows_no_markup(calling):
    for most in (1, 4, 8):
        body = forced("/v1/chat/completions", "weather", [F]) | {"max_tokens": most}
        (choice,) = (await calling.post("/v1/chat/completions", body)).json()["choices"]
        assert (choice["message"]["content"] or "", choice["finish_reason"]) == ("", "length")
        streamed = (await calling.post("/v1/chat/completions", {**body, "stream": True})).events()[:-1]
        assert not any(choice["delta"].get("content") for event in streamed for choice in event["choices"])
        body = forced("/v1/messages", "weather", [F]) | {"max_tokens": most}
        assert (await calling.post("/v1/messages", body)).json()["content"] == [{"type": "text", "text": ""}]


@pytest.mark.parametrize("path", PATHS)
async def test_strict_tools_may_be_called_by_a_model_whose_marker_is_text(calling, path):
    strict = {"type": "function", "function": {**F["function"], "strict": True}}
    reply = await calling.post(path, forced(path, "auto", [strict]))
    assert reply.status == 200, reply.content


async def test_strict_tools_may_be_called_by_a_model_that_needs_no_marker(serve):
    client = serve()
    client.state.parsers = choose_parsers(client.state.tokenizer, [], "", tools="llama3_json", reasoning="none")
    strict = {"type": "function", "function": {**F["function"], "strict": True}}
    assert (await client.post(PATHS[0], forced(PATHS[0], "auto", [strict]))).status == 200


@pytest.mark.parametrize("form", ["gemma4", "functiongemma", "minimax_m3", "qwen3_coder"])
async def test_a_call_comes_in_the_models_own_form(serve, form):
    client = serve()
    client.state.parsers = choose_parsers(client.state.tokenizer, [], "", tools=form, reasoning="none")
    dated = {
        **SCHEMA,
        "properties": {**SCHEMA["properties"], "on": {"type": "string", "format": "time", "maxLength": 5}},
    }
    tool = {"type": "function", "function": {"name": "weather", "parameters": dated}}
    for stream in (False, True):
        reply = await client.post(PATHS[0], {**forced(PATHS[0], "weather", [tool]), "stream": stream})
        assert (reply.status, reply.reply_headers["x-structured-relaxed"]) == (200, "format"), reply.content
        if not stream:
            ((_, arguments),) = calls_of(PATHS[0], reply.json())
            jsonschema.validate(arguments, dated)
    tool["function"]["strict"] = True
    reply = await client.post(PATHS[0], forced(PATHS[0], "weather", [tool]))
    assert (reply.status, reply.error["param"]) == (400, "tools[0].function.parameters.properties.on.format")


async def test_gpt_oss_calls_in_harmony(serve, monkeypatch):
    client = serve()
    client.state.parsers = choose_parsers(client.state.tokenizer, [], "", tools="openai", reasoning="openai_gptoss")
    made: list[GrammarSpec] = []

    async def get(key: bytes, make: Any, field: str | None, client: str) -> Any:
        made.append(make())
        raise GrammarError("grammar_invalid", "this vocabulary has no channels")

    monkeypatch.setattr(client.state.grammars, "get", get)
    for choice in ("required", "weather", "auto"):
        tools = [{"type": "function", "function": {**F["function"], "strict": True}}]
        assert (await client.post(PATHS[0], forced(PATHS[0], choice, tools))).status == 400
    required, named, auto = made
    assert required == named
    assert "commentary to=functions.weather" in required.text
    assert ("said" in required.around, "said" in auto.around) == (False, True)


async def test_a_named_choice_ends_with_stop_and_others_with_tool_calls(calling):
    path = PATHS[0]
    for choice, reason in (("weather", "stop"), ("required", "tool_calls")):
        body = (await calling.post(path, forced(path, choice))).json()
        assert body["choices"][0]["finish_reason"] == reason
        events = (await calling.post(path, {**forced(path, choice), "stream": True})).events()
        assert events[-2]["choices"][0]["finish_reason"] == reason


async def test_a_keyword_that_cannot_be_enforced_is_reported_or_with_strict_refused(calling):
    loose = {**SCHEMA, "not": {"required": ["unit"]}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": loose}}
    reply = await calling.post(PATHS[0], forced(PATHS[0], "required", [tool]))
    assert (reply.status, reply.reply_headers["x-structured-relaxed"]) == (200, "not")
    assert b'structured_relaxed_total{keyword="not"} 1' in (await calling.get("/metrics")).content
    tool["function"]["strict"] = True
    reply = await calling.post(PATHS[0], forced(PATHS[0], "required", [tool]))
    assert (reply.status, reply.error["param"]) == (400, "tools[0].function.parameters.not")


async def test_the_input_of_a_custom_tool_follows_its_expression(calling):
    async def asked(choice="required", **form):
        tool = {"type": "custom", "name": "run", "format": form}
        return await calling.post(PATHS[1], {**forced(PATHS[1], choice), "tools": [tool]})

    held = await asked(type="grammar", syntax="regex", definition="^[ab]{3}$")
    (item,) = held.json()["output"]
    assert item["type"] == "custom_tool_call"
    assert len(item["input"]) == 3
    assert set(item["input"]) <= set("ab")
    assert held.json()["tools"][0]["format"]["definition"] == "^[ab]{3}$"
    assert "x-structured-relaxed" not in held.reply_headers
    free = await asked(type="grammar", syntax="lark", definition='start: "x"')
    assert free.reply_headers["x-structured-relaxed"] == "format"
    assert "x-structured-relaxed" not in (await asked(type="text")).reply_headers
    for form, told in (
        ({"type": "json"}, "format.type: got 'json'; must be text or grammar"),
        ({"type": "grammar"}, "format.syntax: got nothing; must be lark or regex"),
        ({"type": "grammar", "syntax": "gbnf", "definition": "x"}, "format.syntax: got 'gbnf'; must be lark or regex"),
        ({"type": "grammar", "syntax": "regex", "definition": ""}, "format.definition: got ''; must be the grammar's"),
        ({"type": "grammar", "syntax": "lark", "definition": 5}, "format.definition: got '5'; must be the grammar's"),
    ):
        error = (await asked(**form)).error
        assert error["param"] == "tools[0].format"
        assert told in error["message"]
    wrong = await asked("auto", type="grammar", syntax="regex", definition="(?=a)")
    assert (wrong.status, wrong.error["reason"]) == (400, "grammar_invalid")
    assert wrong.error["param"].startswith("tools[0].format")


async def test_tools_and_choices_that_make_no_sense_are_refused(calling):
    for fields, status, param in (
        ({"tools": [{"type": "function"}]}, 400, "tools[0].function"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]},
            400,
            "tools[0].function.parameters",
        ),
        ({"tool_choice": {"type": "function"}}, 400, "tool_choice.function"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, 400, "tool_choice"),
    ):
        reply = await calling.post(PATHS[0], {**forced(PATHS[0], "required"), **fields})
        assert (reply.status, reply.error["param"]) == (status, param), reply.content


@pytest.mark.parametrize(
    ("path", "at", "schema"),
    [
        (PATHS[0], "tools[1].function", "parameters"),
        (PATHS[1], "tools[1]", "parameters"),
        (PATHS[2], "tools[1]", "input_schema"),
    ],
)
async def test_faults_of_tools_are_named_as_the_client_wrote_them(calling, path, at, schema):
    def held(name="f", strict=True, **keywords):
        body = forced(path, "required", [F, {"function": {"name": name, "parameters": {"type": "object", **keywords}}}])
        tool = body["tools"][1]
        tool.get("function", tool)["strict"] = strict
        return {**body, "tools": [body["tools"][0], {"type": "function", **tool} if path == PATHS[0] else tool]}

    mistakes = [
        (held(name=""), f"{at}.name", "got ; must be a string of 1 to 256 characters"),
        (held(name="f" * 257), f"{at}.name", "1 to 256"),
        (held(strict="yes"), f"{at}.strict", "got yes; must be true or false"),
        (held(**{"not": {"required": ["a"]}}), f"{at}.{schema}.not", "cannot be enforced"),
        (held(properties={"x": {"pattern": "("}}), f"{at}.{schema}.properties.x.pattern", "not a well-formed"),
    ]
    for body, param, text in mistakes:
        reply = await calling.post(path, body)
        told = reply.json()["error"]["message"]
        assert (reply.status, f"{param}: " in told, text in told) == (400, True, True), told
    reply = await calling.post(path, held(strict=None, properties={"x": {"pattern": "("}}))
    assert (reply.status, reply.reply_headers["x-structured-relaxed"]) == (200, "pattern")


async def test_an_answer_is_a_call_or_fits_the_response_format(calling):
    answer = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": answer}}
    for seed in range(4):
        body = {**forced(PATHS[0], "auto"), "response_format": form, "seed": seed, "temperature": 2.0}
        (choice,) = (await calling.post(PATHS[0], body)).json()["choices"]
        if choice["message"].get("tool_calls"):
            assert choice["finish_reason"] == "tool_calls"
        else:
            jsonschema.validate(json.loads(choice["message"]["content"]), answer)


class City(pydantic.BaseModel):
    name: Literal["Rome", "Oslo"]
    size: Literal[1, 2]


async def test_the_official_clients_parse_answers_and_calls(calling):
    tool = openai.pydantic_function_tool(City, name="city")
    async with listening(calling) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as api:
        user: Any = [{"role": "user", "content": "hi"}]
        fields: Any = {"model": "omniloop", "messages": user, "max_tokens": 200}
        once: Any = {"tool_choice": "required", "parallel_tool_calls": False}
        answer = await api.chat.completions.parse(**fields, response_format=City)
        assert isinstance(answer.choices[0].message.parsed, City)
        answer = await api.chat.completions.parse(**fields, tools=[tool], **once)
        assert all(isinstance(one.function.parsed_arguments, City) for one in answer.choices[0].message.tool_calls)
        async with api.chat.completions.stream(**fields, tools=[tool], **once) as stream:
            final = await stream.get_final_completion()
        assert isinstance(final.choices[0].message.tool_calls[0].function.parsed_arguments, City)
        response = await api.responses.parse(model="omniloop", input="hi", text_format=City, max_output_tokens=200)
        assert isinstance(response.output_parsed, City)


# -- after reasoning


async def test_a_grammar_begins_behind_the_models_reasoning(serve):
    client = serve()
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    script = play(client, *(call for _ in range(6)))
    client.state.grammars = makers.make_grammars(client.state)

    async def spec(**fields: Any) -> GrammarSpec:
        reply = await client.post(PATHS[0], {**forced(PATHS[0], "required"), **fields})
        assert reply.status == 200, reply.content
        return script.requests[-1].grammar.spec

    begin, end, mark = (script._tokenizer.added_tokens[name] for name in ("<think>", "</think>", "<tool_call>"))
    found = await spec()
    assert (found.starts, found.fed, found.opens) == ((end, mark), (mark,), (begin,))  # a call ends Qwen3's reasoning
    found = await spec(chat_template_kwargs={"open_thinking": True})
    assert (found.starts, found.fed, found.opens) == ((end, mark), (mark,), ())
    strict = {"type": "function", "function": {**F["function"], "strict": True}}
    may_call = {"tools": [strict], "tool_choice": "auto"}
    found = await spec(**may_call)
    assert (found.starts, found.fed, found.opens) == ((end, mark), (mark,), (begin,))
    found = await spec(**may_call, chat_template_kwargs={"enable_thinking": False})
    assert (found.starts, found.fed, found.opens) == ((mark,), (mark,), ())  # inactive until a call
    found = await spec(chat_template_kwargs={"enable_thinking": False})
    assert (found.starts, found.opens) == ((), ())
    form = {"type": "json_object"}
    found = await spec(response_format=form, tools=None, tool_choice=None)
    assert (found.starts, found.opens, found.kind) == ((end,), (begin,), "schema")


@pytest.mark.parametrize("path", PATHS)
async def test_a_model_without_a_format_is_made_to_call_in_json(serve, path):
    client = serve()
    client.state.parsers = choose_parsers(client.state.tokenizer, [], "", reasoning="none")
    reply = await client.post(path, forced(path, "weather"))
    assert reply.status == 200, reply.content
    ((name, arguments),) = calls_of(path, reply.json())
    assert name == "weather"
    jsonschema.validate(arguments, SCHEMA)
    assert (await client.post(path, forced(path, "auto"))).status == 501


async def test_reasoning_ends_when_its_budget_is_spent(client):
    thoughts = ReasoningFormat(("<|vision_bos|>",), ("<|vision_eos|>",), always=True, lines=(0, 0, 0))
    client.state.parsers = made(client.state.tokenizer, "none", None, "thoughts", thoughts)
    for budget in (0, 3, 7):
        fields = {"max_tokens": 12, "temperature": 1.0, "seed": 1, "skip_special_tokens": False}
        body = (await client.chat(thinking_token_budget=budget, **fields)).json()
        usage = body["usage"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] <= budget
        assert usage["completion_tokens"] == 12
        assert body["choices"][0]["message"]["content"]
    messages = {
        "model": "omniloop",
        "max_tokens": 12,
        "temperature": 0,
        "messages": [{"role": "user", "content": "hi"}],
    }
    thinking = {"type": "enabled", "budget_tokens": 2}
    body = (await client.post("/v1/messages", {**messages, "thinking": thinking})).json()
    thought = body["content"][0]
    assert thought["type"] == "thinking"
    assert len(client.state.tokenizer.encode(thought["thinking"])) <= 2
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["yes"]}}}
    (choice,) = (await client.chat(thinking_token_budget=2, max_tokens=20, response_format=form)).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ('"yes"', "stop")
    streamed = await client.chat(thinking_token_budget=2, max_tokens=20, response_format=form, stream=True)
    deltas = [choice["delta"] for event in streamed.events()[:-1] for choice in event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == '"yes"'
    assert (await client.chat(thinking_token_budget=-1)).status == 200
    reply = await client.chat(thinking_token_budget=-2)
    assert (reply.status, reply.error["param"]) == (400, "thinking_token_budget")
    client.state.parsers = made(client.state.tokenizer, "none", None, "spelled", ReasoningFormat(always=True))
    assert (await client.chat(thinking_token_budget=5)).status == 501  # the end of reasoning is text here, not a token
    assert (
        await client.post("/v1/messages", {**messages, "thinking": thinking})
    ).status == 200  # agents always send the field
