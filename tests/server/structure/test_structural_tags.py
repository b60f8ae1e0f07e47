"""Structural tags: each part of a `format` allows exactly its texts, and wrong parts are refused by name."""

from __future__ import annotations

import pytest

from server.errors import ApiError
from server.flags.config import LimitsConfig
from server.schema.common import SamplingFields
from server.structure.structure import format_structure, structure_of
from tests.engine.grammar.kit import compiled

LIMITS = LimitsConfig()
INT = {"type": "json_schema", "json_schema": {"enum": [1, 22]}}
ANY = {"type": "any_text"}


def tag(begin="<a>", content=INT, end="</a>"):
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def const(text):
    return {"type": "const_string", "value": text}


def triggered(*tags, triggers=("<a",), **fields):
    return {"type": "triggered_tags", "triggers": list(triggers), "tags": list(tags), **fields}


def sequence(*elements):
    return {"type": "sequence", "elements": list(elements)}


def takes(grammar, text):
    matcher, tokens = grammar.matcher(), list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


B = tag("<b>", {"type": "regex", "pattern": "[xy]+"}, "</b>")
SEPARATED = {"type": "tags_with_separator", "tags": [tag(), B], "separator": ", "}
CASES = [
    (const("yes"), ("yes",), ("", "no")),
    (INT, ("1", "22"), ("2", "1 ")),
    (ANY, ("", "a\nb"), ()),
    (tag(), ("<a>22</a>",), ("<a>2</a>", "<a>1", " <a>1</a>")),
    (tag(content=ANY), ("<a></a>", "<a>x <b> y</a>"), ("<a>x</a> more", "<a>x")),
    (tag(end=["</a>", "<end>"]), ("<a>1</a>", "<a>1<end>"), ("<a>1",)),
    (sequence(const("<think>"), tag("", ANY, "</think>"), INT), ("<think>well</think>1",), ("<think>1", "1")),
    (sequence(const("a"), ANY), ("a", "abc"), ("b",)),
    ({"type": "or", "elements": [const("a"), sequence(const("b"), const("c"))]}, ("a", "bc"), ("b", "abc")),
    (triggered(tag()), ("", "hi < a", "hi <a>1</a> and <a>22</a>."), ("<a>2</a>", "<a", "x <a>1")),
    (triggered(tag(), B, triggers=["<a", "<b"]), ("<b>x</b><a>1</a>",), ("<a>x</a><b>x</b>", "<a <b>x</b>")),
    (triggered(tag("<a=1>"), tag("<a=2>", B), triggers=["<a="]), ("<a=1>1</a>", "<a=2><b>y</b></a>"), ("<a=2>1</a>",)),
    (triggered(tag(), at_least_one=True), ("so <a>1</a> it is", "<a>1</a>"), ("", "no tag")),
    (triggered(tag(), stop_after_first=True), ("", "text", "so <a>1</a>"), ("<a>1</a> more", "<a>1</a><a>1</a>")),
    (triggered(tag(), at_least_one=True, stop_after_first=True), ("so <a>1</a>",), ("", "text", "<a>1</a> ")),
    (SEPARATED, ("", "<a>1</a>", "<a>1</a>, <b>x</b>"), ("<a>1</a><a>1</a>", "<a>1</a>, ")),
    ({**SEPARATED, "at_least_one": True, "stop_after_first": True}, ("<b>y</b>",), ("", "<a>1</a>, <b>x</b>")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("form", "taken", "refused"), CASES, ids=[f"{at}-{case[0]['type']}" for at, case in enumerate(CASES)]
)
def test_a_part_holds_its_text(form, taken, refused):
    asked = format_structure({"type": "structural_tag", "format": form}, "response_format", LIMITS)
    assert asked is not None
    grammar = compiled(asked.make().text)
    assert [text for text in taken if not takes(grammar, text)] == []
    assert [text for text in refused if takes(grammar, text)] == []


WRONG = [
    ({"type": "json"}, "format.type"),
    ([], "format.type"),
    (const(""), "format.value"),
    ({"type": "regex", "pattern": "(?=a)"}, "format.pattern"),
    (sequence(ANY, const("a")), "format.elements[0]"),
    (sequence(triggered(tag()), const("a")), "format.elements[0]"),
    (sequence(), "format.elements"),
    (tag(begin=3), "format"),
    (tag(content=ANY, end=""), "format.end"),
    (tag(content={"type": "json_schema", "json_schema": {"not": {}}}), "format.content.json_schema.not"),
    (triggered(), "format.tags"),
    (triggered(tag(), triggers=[]), "format.triggers"),
    (triggered(tag("<b>")), "format.tags[0].begin"),
    ({**SEPARATED, "separator": None}, "format.separator"),
]


@pytest.mark.parametrize(("form", "param"), WRONG)
def test_a_wrong_part_is_named(form, param):
    body = SamplingFields(structured_outputs={"structural_tag": {"type": "structural_tag", "format": form}})
    asked = structure_of(body, LIMITS)
    assert asked is not None
    with pytest.raises(ApiError) as refused:
        asked.make()
    assert refused.value.param == f"structured_outputs.structural_tag.{param}"


@pytest.mark.parametrize("older", [True, False])
def test_tags_and_triggers_are_counted_before_they_are_compared(older):
    texts = [f"<{number}>" for number in range(2049)]
    if older:
        value = {"structures": [{"begin": text, "schema": {}, "end": "a"} for text in texts], "triggers": texts}
    else:
        value = {"format": triggered(*["a"] * 2049, triggers=texts)}
    with pytest.raises(ApiError, match="2049 tags and 2049 triggers; at most 4096") as refused:
        structure_of(SamplingFields(structured_outputs={"structural_tag": value}), LIMITS).make()
    assert refused.value.reason == "grammar_too_complex"
