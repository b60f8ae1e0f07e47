"""Schemas and formats that are accepted, rewritten, relaxed or refused; refusals name the keyword's path."""

import json

import pytest

from engine.grammar.lark import lark_of
from server.errors import ApiError
from server.flags.config import LimitsConfig
from server.schema.common import SamplingFields
from server.structure import structure
from server.structure.schema_rules import Cleaner
from server.structure.structure import format_structure, relaxed, schema_text, structure_of

LIMITS = LimitsConfig()
OBJECT = {"type": "object", "additionalProperties": False}


def remaining(schema):
    """The schema's final text as JSON, without our options."""
    found = json.loads(schema_text(schema, "s", LIMITS))
    assert found.pop("x-guidance")["whitespace_flexible"] is False
    return found


@pytest.mark.parametrize(
    ("schema", "left"),
    [
        ({"title": "t", "x-guidance": {"lenient": True}, "$schema": "s", "type": "null"}, {"type": "null"}),
        ({"uniqueItems": False, "not": False, "minContains": 1, "else": {}, "dependentRequired": {}}, {}),
        ({"uniqueItems": True, "maxItems": 1}, {"maxItems": 1}),
        ({"items": [{"type": "null"}], "additionalItems": False}, {"prefixItems": [{"type": "null"}], "items": False}),
        ({"multipleOf": 12_000_000.0}, {"multipleOf": 12_000_000}),
        ({"minimum": 3.5, "exclusiveMinimum": True}, {"exclusiveMinimum": 3.5}),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, {"exclusiveMinimum": 1e-18, "exclusiveMaximum": 1 - 2**-53}),
        ({"type": "integer", "exclusiveMinimum": 0}, {"type": "integer", "exclusiveMinimum": 0}),
        ({"maximum": 3, "exclusiveMaximum": False}, {"maximum": 3}),
        ({"propertyNames": {"type": "string"}}, {}),
        ({"propertyNames": {"pattern": "^a"}}, {"patternProperties": {"^a": True}, "additionalProperties": False}),
        (
            {"propertyNames": {"enum": ["a"]}, "additionalProperties": {"type": "null"}},
            {"properties": {"a": {"type": "null"}}, "additionalProperties": False},
        ),
        (
            {"propertyNames": {"$ref": "#/$defs/c"}, "$defs": {"c": {"type": "string", "enum": ["a"], "title": "C"}}},
            {
                "properties": {"a": True},
                "additionalProperties": False,
                "$defs": {"c": {"type": "string", "enum": ["a"]}},
            },
        ),
        ({"propertyNames": {"const": "a"}}, {"properties": {"a": True}, "additionalProperties": False}),
        ({"type": "number", "format": "double"}, {"type": "number"}),
        ({"type": "string", "format": "password", "writeOnly": True}, {"type": "string"}),
        ({"required": ["a", "b", "a"], "minProperties": 2}, {"required": ["a", "b"]}),
        ({"unevaluatedProperties": False, "title": "t"}, {"additionalProperties": False}),
        ({"oneOf": [{"type": "null"}, {"const": 1}]}, {"allOf": [{"anyOf": [{"type": "null"}, {"const": 1}]}]}),
    ],
)
def test_what_asks_for_nothing_is_left_out_and_what_can_be_is_rewritten(schema, left):
    assert remaining(schema) == left


TAG = {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]}
TAGGED = [{"properties": {"kind": {"const": name}}, "type": "object", "required": ["kind"]} for name in "ab"]


@pytest.mark.parametrize(
    ("schema", "path", "told"),
    [
        (
            {"properties": {"a": {"uniqueItems": True}}},
            "s.properties.a.uniqueItems",
            "leave it out",
        ),
        ({"items": {"not": {"type": "null"}}}, "s.items.not", "leave it out"),
        ({"contains": {}}, "s.contains", "leave it out"),
        ({"if": {}, "then": {}}, "s.if", "leave it out"),
        ({"$defs": {"x": {"dependentRequired": {"a": ["b"]}}}}, "s.$defs.x.dependentRequired", "cannot"),
        ({"allOf": [{"unevaluatedProperties": False, "allOf": [{}]}]}, "s.allOf[0].unevaluatedProperties", "cannot"),
        ({"propertyNames": {"maxLength": 3}}, "s.propertyNames", "only an enum"),
        ({"minProperties": 2}, "s.minProperties", "additionalProperties: false"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "s.oneOf", "must exclude each other"),
        ({"anyOf": []}, "s.anyOf", "at least one schema"),
        ({"enum": []}, "s.enum", "at least one value"),
        ({"type": "text"}, "s.type", "must be of null, boolean"),
        ({"format": "regex"}, "s.format", "the formats that are enforced are date-time"),
        ({"type": "integer", "format": "int64"}, "s.format", "enforced are .*, uint32"),
        ({"propertyNames": {"$ref": "#"}}, "s.propertyNames", "only an enum"),
        ({"pattern": "a(?!b)"}, "s.pattern", "look-around"),
        ({"pattern": r"(a)\1"}, "s.pattern", "back references"),
        ({"patternProperties": {r"\b": {}}}, "s.patternProperties", "word boundaries"),
        ({"$ref": "http://example.com/s"}, "s.$ref", "must point to a schema of this document"),
        ({"$ref": "#/$defs/a", "$defs": {}}, "s.$ref", "must point"),
        ({"$ref": "#/examples/0", "examples": [{"not": {}}]}, "s.$ref", "must point"),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}}, "s.$defs.a.$ref", "points to itself"),
        ({"multipleOf": 0.5}, "s.multipleOf", "positive integer"),
        ({"minimum": 10**40}, "s.minimum", "must be a number between"),
        ({"minimum": 2**53 + 1}, "s.minimum", "that a double holds"),  # the library would accept 2**53
        ({"const": 2**53 + 1}, "s.const", "that a double holds"),
        ({"enum": [1, {"a": [-(2**63)]}]}, "s.enum", "larger ones fit in texts"),  # this value crashed the process
        ({"const": 1e300}, "s.const", "between -1e18 and 1e18"),
        ({"minLength": -1}, "s.minLength", "from 0 on"),
        ({"required": "a"}, "s.required", "list of property names"),
        ({"properties": []}, "s.properties", "object of schemas"),
        ({"items": 3}, "s.items", "must be a schema"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_its_path_or_relaxed(schema, path, told):
    with pytest.raises(ApiError, match=told) as refused:
        schema_text(schema, "s", LIMITS)
    assert (refused.value.status, refused.value.reason, refused.value.param) == (400, "grammar_invalid", path)
    text, dropped = relaxed(schema, "s", LIMITS)
    assert dropped[0] == path.rpartition(".")[2].partition("[")[0]
    schema_text({key: value for key, value in json.loads(text).items() if key != "x-guidance"}, "s", LIMITS)


def test_branches_with_a_discriminating_property_may_stand_in_one_of():
    assert remaining({"oneOf": TAGGED})["allOf"][0]["anyOf"] == TAGGED
    refs = {"$defs": {"a": TAGGED[0], "b": TAGGED[1]}, "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}
    assert "allOf" in remaining(refs)
    with pytest.raises(ApiError):
        remaining({"oneOf": [TAGGED[0], TAGGED[0]]})


def test_a_chain_of_references_is_followed_once(monkeypatch):
    asked = []
    target = Cleaner._target
    monkeypatch.setattr(Cleaner, "_target", lambda self, ref: asked.append(ref) or target(self, ref))
    links = {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(1000)}
    remaining({"$ref": "#/$defs/a0", "$defs": {**links, "a1000": {"type": "null"}}})
    assert len(asked) < 5000


DEEP: dict = {}
for _ in range(40):
    DEEP = {"items": {"properties": {"a": DEEP}}}


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (DEEP, "--schema-max-depth"),
        ({"properties": {str(n): {"type": "null"} for n in range(5000)}}, "--schema-max-nodes"),
        ({"enum": list(range(5000))}, "--schema-max-enum"),
        ({"pattern": "a" * 5000}, "--regex-max-bytes"),
        ({"pattern": "(a{1,1001}){2}"}, "--regex-max-repeat"),
        ({"multipleOf": 1_000_003}, "at most 10000"),
    ],
)
def test_large_schemas_are_refused_also_where_relaxed(schema, told):
    with pytest.raises(ApiError, match=told) as refused:
        schema_text(schema, "s", LIMITS)
    assert refused.value.reason == "grammar_too_complex"
    if not {"pattern", "multipleOf"} & schema.keys():
        with pytest.raises(ApiError, match=told):
            relaxed(schema, "s", LIMITS)


SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "schema", '{"type":"object",'),
        ({"response_format": SCHEMA}, "schema", '{"type":"null",'),
        ({"response_format": {"type": "json_object", "schema": {"type": "null"}}}, "schema", '{"type":"null",'),
        ({"structured_outputs": {"json": {"type": "null"}}}, "schema", '{"type":"null",'),
        ({"structured_outputs": {"json": '{"type": "null"}', "regex": None}}, "schema", '{"type":"null",'),
        ({"structured_outputs": {"json_object": True, "choice": None}}, "schema", '{"type":"object",'),
        ({"structured_outputs": {"regex": r"^a/[0-9]\$$"}}, "lark", r"start: /a\/[0-9]\$/"),
        ({"structured_outputs": {"choice": ["a", 'b"', "a"]}}, "lark", 'start: CHOICE\nCHOICE: "a" | "b\\""'),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "ebnf", 'start: "a"'),
    ],
)
def test_each_kind_becomes_a_grammar(fields, kind, text):
    found = structure_of(SamplingFields(**fields), LIMITS)
    spec = found.make()
    assert (spec.kind, spec.text[: len(text)]) == (kind, text)
    assert lark_of(spec).startswith('%llguidance {"no_forcing": true}\n')


def test_equal_requests_have_equal_keys_and_other_whitespace_has_other_keys():
    def key(**options):
        return structure_of(SamplingFields(structured_outputs={"json": {"type": "null"}, **options}), LIMITS).key

    assert (
        key() == key(disable_any_whitespace=False) == structure_of(SamplingFields(response_format=SCHEMA), LIMITS).key
    )
    assert len({key(), key(disable_any_whitespace=True), key(whitespace_pattern=" *")}) == 3


def test_text_asks_for_nothing():
    for asked in ({}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}):
        assert structure_of(SamplingFields(**asked), LIMITS) is None
    assert format_structure({"type": "text"}, "text.format", LIMITS) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": SCHEMA, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"whitespace_pattern": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "lenient": True}}, "structured_outputs.lenient"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": ""}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": "(?=a)"}}, "structured_outputs.whitespace_pattern"),
        *(
            (
                {"structured_outputs": {kind: value, "whitespace_pattern": "[a-z ]*"}},
                "structured_outputs.whitespace_pattern",
            )
            for kind, value in (("json", {}), ("json_object", True), ("structural_tag", TAG))
        ),
        ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object"),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": "no"}},
            "structured_outputs.disable_any_whitespace",
        ),
        ({"structured_outputs": {"regex": "a{2"}}, "structured_outputs.regex"),
        (
            {"structured_outputs": {"json": {"properties": {"x": {"pattern": "[z-a]"}}}}},
            "structured_outputs.json.properties.x.pattern",
        ),
        (
            {"response_format": {**SCHEMA, "json_schema": {"schema": {"patternProperties": {"a)": {}}}}}},
            "response_format.json_schema.schema.patternProperties",
        ),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a"] * 5000}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a" * 5000}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a(?=b)"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {"enum": [10**30]}}}, "structured_outputs.json"),
        ({"structured_outputs": {"grammar": "a" * 200_000}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"structural_tag": {"structures": []}}}, "structured_outputs.structural_tag"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object", "schema": "x"}}, "response_format.schema"),
    ],
)
def test_bad_requests_are_refused_with_their_field(fields, param):
    with pytest.raises(ApiError) as refused:
        structure_of(SamplingFields(**fields), LIMITS).make()
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize("kind", ["json", "regex", "grammar", "structural_tag"])
def test_a_text_beyond_the_limit_is_refused_before_the_loop_hashes_it(monkeypatch, kind):
    monkeypatch.setattr(structure, "content_key", None)
    limit = LIMITS.regex_max_bytes if kind == "regex" else LIMITS.grammar_max_bytes
    for text in ("a" * (limit + 1), "é" * (limit // 2 + 1)):
        with pytest.raises(ApiError) as error:
            structure_of(SamplingFields(structured_outputs={kind: text}), LIMITS)
        assert (error.value.reason, error.value.param) == ("grammar_too_complex", f"structured_outputs.{kind}")


def test_choices_beyond_the_limit_are_refused_before_the_loop_hashes_them(monkeypatch):
    monkeypatch.setattr(structure, "content_key", None)
    with pytest.raises(ApiError, match="--schema-max-enum") as error:
        structure_of(SamplingFields(structured_outputs={"choice": ["a"] * (LIMITS.schema_max_enum + 1)}), LIMITS)
    assert (error.value.reason, error.value.param) == ("grammar_too_complex", "structured_outputs.choice")


def test_white_space_of_a_pattern_is_that_of_json():
    asked = {"json": {"type": "null"}, "whitespace_pattern": r"(?:\s|\n){0,2}"}
    assert r"(?:[ \\t\\n\\r]|\\n){0,2}" in structure_of(SamplingFields(structured_outputs=asked), LIMITS).make().text
