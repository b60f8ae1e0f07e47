"""Translate response_format and structured_outputs (API.md section 6) into a GrammarSpec for the answer.

Owner: loop for `*_structure`, which check only the outer fields; the pool for `Structure.make`, which reads schemas.
Tools use `schema_text` (strict: what cannot be enforced is refused with its path) and `relaxed` (it is dropped and
reported).

    body -> Structure(key, make) -> GrammarCompiler.get(key, make) -> Grammar -> Request.grammar
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from engine.base.grammar import GrammarSpec
from server.errors import ApiError, invalid, quoted
from server.flags.config import LimitsConfig
from server.schema.common import SamplingFields
from server.structure.call_values import literal
from server.structure.patterns import check_pattern, expression, space_pattern
from server.structure.schema_faults import measure, too_complex, wrong
from server.structure.schema_rules import Cleaner
from server.structure.structural_tags import structural_tag_spec

# At most one space after `:` and `,`, none elsewhere, so that an answer to a bounded schema ends.
SEPARATORS = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}
NO_SPACES = {"item_separator": ",", "key_separator": ":", "whitespace_flexible": False}
ESCAPES = {"json_allow_general_unicode_escapes": False}  # a property's name has only one spelling
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
OPTIONS = ("disable_any_whitespace", "whitespace_pattern")
STRUCTURES = ("response_format", "structured_outputs")  # fields of a request
ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Structure:
    """The structure a request asks for, not yet checked."""

    key: bytes  # hash of the content: equal keys make equal grammars
    make: Callable[[], GrammarSpec]  # checks and translates (pool); raises ApiError
    param: str  # the request's field


def structure_of(body: SamplingFields, limits: LimitsConfig) -> Structure | None:
    """The structure of a chat or completions request. Raises ApiError for two kinds at once, and for unknown kinds."""
    asked = format_structure(body.response_format, "response_format", limits)
    fields = {name: value for name, value in (body.structured_outputs or {}).items() if value is not None}
    if not fields:
        return asked
    name = "structured_outputs"
    if asked is not None:
        raise invalid(name, "structured_outputs: not together with response_format; send one of them")
    for key in fields:
        if key not in KINDS and key not in OPTIONS:
            raise invalid(f"{name}.{key}", f"{name}.{key}: is not known; there are {', '.join((*KINDS, *OPTIONS))}")
    for key in ("json_object", "disable_any_whitespace"):
        if not isinstance(fields.get(key), bool | None):
            raise invalid(f"{name}.{key}", f"{name}.{key}: got {quoted(fields[key])}; must be true or false")
    kinds = [key for key in KINDS if fields.get(key) not in (None, False)]
    if len(kinds) != 1:
        got = " and ".join(kinds) or "none"
        raise invalid(name, f"{name}: got {got}; send exactly one of {', '.join(KINDS)}")
    kind, options = kinds[0], _spaces(fields, name)
    return _structure(kind, fields[kind], f"{name}.{kind}", options, limits)


def format_structure(asked: dict[str, Any] | None, param: str, limits: LimitsConfig) -> Structure | None:
    """The structure of an OpenAI `response_format`, a Responses `text.format` or a Messages `output_config.format`.

    The schema of the first is under `json_schema`; the schema of the others is next to `type`.
    """
    kind = (asked or {}).get("type", "text")
    if asked is None or kind == "text":
        return None
    if kind == "json_object":
        schema = asked.get("schema")  # llama.cpp and some hosts spell json_schema so
        if schema is None:
            return _structure("json_object", True, param, SEPARATORS, limits)
        return _structure("json", _schema(schema, f"{param}.schema"), f"{param}.schema", SEPARATORS, limits)
    if kind == "structural_tag":
        return _structure("structural_tag", asked, param, SEPARATORS, limits)
    if kind != "json_schema":
        known = "text, json_object, json_schema, structural_tag"
        raise invalid(f"{param}.type", f"{param}.type: got {quoted(kind)}; must be one of {known}")
    inner: Any = asked
    path = param
    if "json_schema" in asked or param == "response_format":
        inner, path = asked.get("json_schema"), f"{param}.json_schema"
        if not isinstance(inner, dict):
            raise invalid(path, f"{path}: must be an object with name and schema")
    return _structure("json", _schema(inner.get("schema"), f"{path}.schema"), f"{path}.schema", SEPARATORS, limits)


def _schema(value: Any, path: str) -> Any:
    if not isinstance(value, dict | bool):
        raise invalid(path, f"{path}: must be a JSON Schema: an object")
    return value


def schema_text(schema: Any, path: str, limits: LimitsConfig, options: dict[str, Any] = SEPARATORS) -> str:
    """The schema as a grammar's `%json` takes it; everything in it is enforced (pool).

    Raises ApiError 400 `grammar_invalid` or `grammar_too_complex` with the path of the keyword.
    """
    measure(schema, path, limits)
    if "whitespace_pattern" in options:
        written, why = space_pattern(options["whitespace_pattern"], limits)
        if why:
            raise wrong("structured_outputs.whitespace_pattern", why)
        options = {**options, "whitespace_pattern": written}
    return _written(Cleaner(schema, limits, relax=False).clean(schema, path), options)


def relaxed(
    schema: Any, path: str, limits: LimitsConfig, options: dict[str, Any] = SEPARATORS
) -> tuple[str, tuple[str, ...]]:
    """Like schema_text, but leave out keywords that cannot be enforced, and return their names. Limits still raise."""
    measure(schema, path, limits)
    cleaner = Cleaner(schema, limits, relax=True)
    return _written(cleaner.clean(schema, path), options), tuple(cleaner.dropped)


def content_key(*parts: Any) -> bytes:
    """The key of a Structure that is defined by these JSON values."""
    return hashlib.blake2b(orjson.dumps(parts, option=orjson.OPT_NON_STR_KEYS), digest_size=16).digest()


def _structure(kind: str, value: Any, param: str, options: dict[str, Any], limits: LimitsConfig) -> Structure:
    if isinstance(value, str):  # checked before the loop hashes it
        most, name = limits.grammar_max_bytes, "--grammar-max-bytes"
        if kind == "regex":
            most, name = limits.regex_max_bytes, "--regex-max-bytes"
        _sized(value, param, most, name)
    if kind == "choice" and isinstance(value, list) and len(value) > limits.schema_max_enum:
        most = limits.schema_max_enum
        raise too_complex(param, f"has {len(value)} entries; at most {most} are allowed (--schema-max-enum)")
    try:
        key = content_key(kind, value, options)
    except (TypeError, ValueError):  # numbers of more than 64 bits
        raise wrong(param, "holds a number out of range") from None
    return Structure(key, partial(_MAKE[kind], value, param, options, limits), param)


def _spaces(fields: dict[str, Any], name: str) -> dict[str, Any]:
    """The options for white space in JSON."""
    pattern = fields.get("whitespace_pattern")
    if pattern is not None:
        if not isinstance(pattern, str) or not pattern:
            raise invalid(f"{name}.whitespace_pattern", f"{name}.whitespace_pattern: must be a regular expression")
        return {"whitespace_pattern": pattern, "whitespace_flexible": True}
    return NO_SPACES if fields.get("disable_any_whitespace") else SEPARATORS


def _written(schema: Any, options: dict[str, Any]) -> str:
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    return orjson.dumps({**schema, "x-guidance": {**options, **ESCAPES}}).decode()


def _json(value: Any, param: str, options: dict[str, Any], limits: LimitsConfig) -> GrammarSpec:
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            raise wrong(param, "is not JSON") from None
    return GrammarSpec("schema", schema_text(value, param, limits, options))


def _json_object(value: Any, param: str, options: dict[str, Any], limits: LimitsConfig) -> GrammarSpec:
    return GrammarSpec("schema", schema_text(ANY_OBJECT, param, limits, options))


def _regex(value: Any, param: str, options: dict[str, Any], limits: LimitsConfig) -> GrammarSpec:
    if not isinstance(value, str) or not value:
        raise wrong(param, "must be a regular expression")
    if why := check_pattern(value, limits):
        raise (too_complex if "at most" in why else wrong)(param, why)
    return GrammarSpec("lark", f"start: {expression(value)}")


def _choice(value: Any, param: str, options: dict[str, Any], limits: LimitsConfig) -> GrammarSpec:
    if not isinstance(value, list) or not value or any(not isinstance(text, str) or not text for text in value):
        raise wrong(param, "must be a list of at least one text, none of them empty")
    texts = " | ".join(literal(text) for text in dict.fromkeys(value))
    return GrammarSpec("lark", f"start: CHOICE\nCHOICE: {texts}")  # one terminal: a rule has at most 2,000 alternatives


def _ebnf(value: Any, param: str, options: dict[str, Any], limits: LimitsConfig) -> GrammarSpec:
    if not isinstance(value, str) or not value.strip():
        raise wrong(param, "must be a grammar in Lark or GBNF")
    return GrammarSpec("ebnf", value)


def _structural_tag(value: Any, param: str, options: dict[str, Any], limits: LimitsConfig) -> GrammarSpec:
    def written(schema: Any, path: str) -> str:
        return schema_text(schema, path, limits, options)

    return structural_tag_spec(value, param, written, limits)


def _sized(text: str, param: str, most: int, name: str) -> None:
    if len(text) > most or len(text.encode()) > most:
        raise too_complex(param, f"has more than {most} bytes, the most that are allowed ({name})")


_MAKE: dict[str, Callable[[Any, str, dict[str, Any], LimitsConfig], GrammarSpec]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _ebnf,
    "structural_tag": _structural_tag,
}

__all__ = ["ApiError", "Structure", "content_key", "format_structure", "relaxed", "schema_text", "structure_of"]
