"""Random texts of a format's grammar: the format's parser reads them as calls that fit their schemas."""

from __future__ import annotations

import random
from contextlib import nullcontext

import jsonschema
import numpy as np
import orjson
import pytest

from engine.base.grammar import GrammarSpec
from engine.grammar.compile import compile_now
from engine.grammar.vocabulary import GrammarVocabulary
from server.errors import ApiError
from server.flags.config import LimitsConfig
from server.output.parser_choice import choose_parsers
from server.output.tools.formats import TOOLS
from server.render.tools import ToolPlace
from server.structure.call_shapes import grammar_of
from server.structure.call_values import Tool
from server.structure.harmony_calls import harmony_calls
from server.structure.patterns import searched
from server.structure.schema_faults import wrong
from server.structure.structure import relaxed, schema_text
from server.structure.tool_structure import Calls, tool_structure
from tests.server.output.test_parsers import parser_of, said
from tests.server.scripted import tokenizer
from tests.server.structure.test_thinking import takes

HARMONY_MARKERS = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>")
FORMS = {form: name for name, form in reversed(TOOLS.items())}
NAMES = [*FORMS.values(), "openai"]
WORD = {"type": "string", "maxLength": 4}
POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": -3, "maximum": 40},
        "item": WORD,
        "name": {"enum": ["7", "a b"]},
    },
    "required": ["x", "name"],
}
SCHEMAS = {
    "unions": {
        "type": "object",
        "properties": {
            "m": {"type": ["string", "null"], "maxLength": 4},
            "a": {"anyOf": [{"type": "integer", "minimum": 3}, WORD]},
            "b": {"anyOf": [{"type": "boolean"}, {"type": "string", "minLength": 2, "maxLength": 5}]},
            "e": {"enum": ["one", "2", 3, None, True]},
            "p": {"type": "string", "pattern": "^[a-c]{2,4}$"},
            "l": {"anyOf": [WORD, {"type": "array", "items": {"type": "integer"}, "maxItems": 2}]},
        },
        "required": ["m", "a", "p", "e", "l"],
    },
    "nested": {
        "type": "object",
        "properties": {
            "o": {"$ref": "#/$defs/point"},
            "l": {"type": "array", "items": {"$ref": "#/$defs/point"}, "minItems": 1, "maxItems": 2},
            "s": {"type": "array", "items": WORD, "maxItems": 3},
            "i": {"type": "array", "items": WORD, "minItems": 1, "maxItems": 1},
            "t": {"type": "object", "properties": {"s": WORD, "n": {"type": "number"}}, "additionalProperties": False},
            "d": {"allOf": [{"$ref": "#/$defs/point"}, {"properties": {"y": {"type": "boolean"}}, "required": ["y"]}]},
            "c": {"const": {"k": ["v", 1]}},
        },
        "required": ["l", "o", "d"],
        "$defs": {"point": POINT},
    },
    "optional": {
        "type": "object",
        "properties": {name: {"type": "integer", "minimum": 0, "maximum": 9} for name in ("B", "a", "c")},
        "additionalProperties": False,
    },
    "missing": {"type": "object", "required": ["q"], "additionalProperties": WORD},
}
NO_ELEMENTS = ("c",)  # formats without constants that are objects


@pytest.fixture(scope="module")
def vocabulary() -> GrammarVocabulary:
    known = tokenizer()
    return GrammarVocabulary(known.token_bytes, set(known.added_tokens.values()).__contains__, known.vocab_size)


def text_of(schema, path):
    return schema_text(schema, path, LimitsConfig())


def refuse(keyword, path):
    raise wrong(path, "not held")


def written(name: str, schema, *, must: bool = True, strict: bool = True) -> GrammarSpec:
    """The grammar of one required call. Four markers are tokens of this vocabulary, the others are letters."""
    known = tokenizer()
    ids = {marker: known.added_tokens[marker] for marker in ("<tool_call>", "</tool_call>")}
    text = text_of if strict else lambda schema, path: relaxed(schema, path, LimitsConfig())[0]
    leave = refuse if strict else lambda keyword, path: None
    tools = [Tool("f", schema, "p", text, leave)]
    if name == "openai":
        spec = harmony_calls(tools, must=must)
        return GrammarSpec("lark", spelled(spec.text), around=spelled(spec.around))
    lark = grammar_of(TOOLS[name], ids, tools, must=must, most=1)
    assert lark is not None
    return GrammarSpec("lark", lark)


def spelled(lark: str) -> str:
    for marker in HARMONY_MARKERS:
        lark = lark.replace(marker, f'"{marker}"')
    return lark.replace("TEXT: /(?s:.*)/", "TEXT: /[^<]*/")


def walk(grammar, draw: random.Random, signs: np.ndarray, most: int = 400) -> str | None:
    """A text of the grammar, drawn token by token, every other token from `signs`; None if it does not end."""
    matcher, known, tokens = grammar.matcher(), tokenizer(), []
    while len(tokens) < most:
        line = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(line, bitorder="little")[: known.vocab_size].astype(bool)
        if matcher.is_accepting() and (not allowed.any() or draw.random() < 0.5):
            return known.decode(tokens)
        assert allowed.any(), known.decode(tokens)
        few = allowed & signs if draw.random() < 0.5 else allowed
        found = np.flatnonzero(few if few.any() else allowed)
        tokens.append(int(found[draw.randrange(len(found))]))
        assert matcher.consume_token(tokens[-1])
    return None


@pytest.mark.parametrize("name", NAMES)
def test_calls_under_a_grammar_fit_their_schemas(name, vocabulary):
    draw, known, done = random.Random(name), tokenizer(), 0
    signs = np.array([not known.token_bytes(token).isalnum() for token in range(known.vocab_size)])
    for schema in SCHEMAS.values():
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        if name == "minimax_m3":
            schema = {**schema, "properties": {k: v for k, v in schema.get("properties", {}).items() if k != "c"}}
        grammar = compile_now(written(name, schema), vocabulary)
        for _ in range(5):
            text = walk(grammar, draw, signs)
            if text is None:  # no end within `most` tokens
                continue
            parser = parser_of(known, "" if name == "openai" else name, offered=tools, harmony=name == "openai")
            ((called, arguments),) = said(parser, text)[2]
            assert called == "f"
            try:
                jsonschema.validate(orjson.loads(arguments), schema)
            except (jsonschema.ValidationError, orjson.JSONDecodeError) as error:
                raise AssertionError((text, arguments)) from error
            done += 1
    assert done >= 4


CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 3, "name": "7"}'
THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "must", "may"),
    [
        (CALL, True, True),
        (THOUGHT + CALL, True, True),
        (THOUGHT + THOUGHT + PREAMBLE + CALL, False, True),
        ("<|channel|>final<|message|>No call.", False, True),
        ("<|channel|>final <|constrain|>json<|message|>{}", False, True),
        (CALL.replace("3", "41"), False, False),
        (CALL.replace("functions.f", "functions.g"), False, False),
        (THOUGHT + "plain", False, False),
    ],
)
def test_a_message_of_harmony_calls_or_speaks(text, must, may):
    tool = Tool("f", POINT, "p", text_of, refuse)
    assert takes(harmony_calls([tool], must=True), text, HARMONY_MARKERS) == must
    assert takes(harmony_calls([tool], must=False), text, HARMONY_MARKERS) == may


def test_an_answer_of_harmony_may_stand_for_a_call():
    spec = harmony_calls([Tool("f", POINT, "p", text_of, refuse)], must=False, answer=text_of({"enum": ["yes"]}, "p"))
    assert takes(spec, f'{THOUGHT}<|channel|>final <|constrain|>json<|message|>"yes"', HARMONY_MARKERS)
    assert takes(spec, CALL, HARMONY_MARKERS)
    assert not takes(spec, '<|channel|>final<|message|>"no"', HARMONY_MARKERS)


ODD = ("filter[state]", "unit price", "größe", 'say "x"', "a=b", "x>y", "<x", "a\nb", "")


@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_is_read_again_by_its_name_or_refused_and_left_out(name, vocabulary):
    draw, known, signs = random.Random(name), tokenizer(), np.ones(tokenizer().vocab_size, bool)
    refused: list[str] = []
    for key in ODD:
        schema = {"type": "object", "properties": {key: {"type": "boolean"}}, "required": [key]}
        schema["additionalProperties"] = False
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        meant = {key}
        try:
            spec = written(name, schema)
        except ApiError as error:
            refused.append(error.param)
            spec, meant = written(name, schema, strict=False), set()
        grammar = compile_now(spec, vocabulary)
        text = next(filter(None, (walk(grammar, draw, signs) for _ in range(50))))
        parser = parser_of(known, "" if name == "openai" else name, offered=tools, harmony=name == "openai")
        ((called, arguments),) = said(parser, text)[2]
        assert (called, orjson.loads(arguments).keys()) == ("f", meant), text
    assert all(param.startswith("p.properties.") for param in refused)


@pytest.mark.parametrize(
    ("form", "name"), [("hermes", ""), ("qwen3_coder", "a b"), ("pythonic", "f("), ("mistral", "{")]
)
def test_a_tool_that_a_form_cannot_name_is_refused_or_left_out(form, name):
    left: list[str] = []
    tools = [Tool(named, {}, named, text_of, lambda keyword, path: left.append(path)) for named in (name or "f(", "g")]
    lark = grammar_of(TOOLS[form], {}, tools, must=True, most=1)
    assert lark is not None
    assert left == ([name] if name else [])
    with pytest.raises(ApiError, match="cannot be written") if name else nullcontext():
        grammar_of(TOOLS[form], {}, tools[:1], must=True, most=1)


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m3", "gemma4"])
@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("format", {"type": "string", "format": "date"}),
        ("maxLength", {"type": "string", "maxLength": 10**6}),
        ("pattern", {"type": "string", "pattern": "^a|b$"}),
        ("patternProperties", {"type": "object", "patternProperties": {"a": {}}}),
    ],
)
def test_what_a_form_cannot_hold_is_refused_of_strict_tools(name, keyword, schema, vocabulary):
    whole = {"type": "object", "properties": {"k": schema}, "required": ["k"]}
    if keyword == "patternProperties" and name in ("qwen3_coder", "glm45"):  # objects are JSON in these formats
        compile_now(written(name, whole), vocabulary)
        return
    with pytest.raises(ApiError) as error:
        written(name, whole)
    assert error.value.param == f"p.properties.k.{keyword}"
    compile_now(written(name, whole, strict=False), vocabulary)


D, K3 = "｜DSML｜", ("<|open|>", "<|close|>", "<|sep|>")
PARTS = {  # the tokens in the markers, and a call
    "deepseek_v32": (
        (D,),
        f'<{D}function_calls>\n<{D}invoke name="f">\n<{D}parameter name="w" string="true">a </b</{D}parameter>\n'
        f'<{D}parameter name="x" string="false">3</{D}parameter>\n</{D}invoke>\n</{D}function_calls>',
    ),
    "kimi_k3": (
        K3,
        '<|open|>tools<|sep|><|open|>call tool="f"<|sep|><|open|>argument key="w" type="string"<|sep|>a </b'
        '<|close|>argument<|sep|><|open|>argument key="x" type="object"<|sep|>3<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>",
    ),
    "internlm": (
        ("<|action_start|>", "<|plugin|>", "<|action_end|>"),
        '<|action_start|><|plugin|>\n{"name": "f", "arguments": {"w": "a </b", "x": 3}}<|action_end|>',
    ),
}


@pytest.mark.parametrize("form", PARTS)
def test_markers_may_be_letters_and_tokens(form):
    names, call = PARTS[form]
    schema = {"type": "object", "properties": {"w": {"type": "string"}, "x": POINT["properties"]["x"]}}
    tools = [Tool("f", {**schema, "required": ["w", "x"], "additionalProperties": False}, "p", text_of, refuse)]
    ids = {name: 256 + at for at, name in enumerate(names)}
    must, may = (grammar_of(TOOLS[form], ids, tools, must=must, most=0) for must in (True, False))
    assert must is not None
    assert takes(GrammarSpec("lark", must), call, names)
    assert not takes(GrammarSpec("lark", must), call.replace("3", "300"), names)
    if form == "kimi_k3":  # the marks around its content have the same tokens
        assert may is None
        return
    assert may is not None
    for text, wanted in (
        ("", 1),
        ("a < b\n", 1),
        (f"Hi <b>\n{call} <", 1),
        (call * 2, 1),
        (call.replace("3", "300"), 0),
    ):
        assert takes(GrammarSpec("lark", may), text, names) == wanted, text


def made(form: str, value, **defs) -> str:
    """The grammar for a required call with one parameter of the schema `value`."""
    schema = {"type": "object", "properties": {"k": value}, "required": ["k"], "$defs": defs}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    parsers = choose_parsers(tokenizer(), [], "", tools=form, reasoning="none")
    structure = tool_structure(parsers, [tool], [ToolPlace(False, "p")], Calls(must=True), LimitsConfig())
    assert structure is not None
    return structure.make().text


@pytest.mark.parametrize("form", ["qwen3_coder", "glm45", "gemma4", "minimax_m3", "hermes"])
@pytest.mark.parametrize("key", ["anyOf", "allOf"])
def test_parts_that_double_with_each_level_are_refused_at_once(form, key):
    """The request is refused at once, because it could occupy a thread of the pool for hours and exhaust memory."""
    defs = {f"a{n}": {key: [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(40)}
    with (
        nullcontext() if form == "hermes" else pytest.raises(ApiError, match="unfold into more than 4096 parts") as told
    ):
        made(form, {key: [{"$ref": "#/$defs/a0"}]}, **defs, a40={"type": "null"})
    assert form == "hermes" or told.value.reason == "grammar_too_complex"
    with nullcontext() if form == "hermes" else pytest.raises(ApiError, match="of themselves alone"):
        made(form, {"$ref": "#/$defs/r"}, r={key: [{"$ref": "#/$defs/r"}, {"type": "null"}]})


@pytest.mark.parametrize("form", ["qwen3_coder", "gemma4", "minimax_m3"])
def test_a_schema_that_is_true_or_false_may_be_named(form, vocabulary):
    compile_now(
        GrammarSpec("lark", made(form, {"anyOf": [{"$ref": "#/$defs/t"}, {"type": "null"}]}, t=True)), vocabulary
    )
    compile_now(
        GrammarSpec("lark", made(form, {"anyOf": [{"$ref": "#/$defs/t"}, {"type": "null"}]}, t=False)), vocabulary
    )


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("ab", "(?s:.*)(?:ab)(?s:.*)"),
        ("^ab", "(?:ab)(?s:.*)"),
        ("^[$^|]+$", "(?:[$^|]+)"),
        (r"a\$", r"(?s:.*)(?:a\$)(?s:.*)"),
        ("a|b", "(?s:.*)(?:a|b)(?s:.*)"),
        ("^a|b$", None),
        ("^(a|b)$", "(?:(a|b))"),
        ("a^b", None),
    ],
)
def test_a_pattern_is_looked_for_anywhere(pattern, found):
    assert searched(pattern) == (None if found is None else f"/{found}/")
