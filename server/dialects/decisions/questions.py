"""Questions of both routes in one form, checked. Unknown keys are refused, because they would change an answer.

Owner: none, pure functions. In: `questions` of a body, decoded. Out: a Question for each. Errors name the place.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from server.errors import ApiError, invalid, quoted

MOST_OF_SYSTEMONE, MOST_OF_DECISIONS = 64, 400  # questions of a request, as in the two protocols
LETTERS = string.ascii_uppercase + string.ascii_lowercase
MOST_LEVELS = 10
YES_NO = (("yes", "Yes"), ("no", "No"))  # spellings of each option; their probabilities are added

Kind = Literal["truth", "choice", "score"]
Parts = list[dict[str, Any]]  # content parts of a message
Entry = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Option:
    """One possible answer."""

    value: str | bool
    labels: tuple[str, ...]  # spellings of the label with which the model answers
    description: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """One question. Options of a truth are true and false, in this order."""

    kind: Kind
    path: str  # its place in the body
    name: str | None
    instructions: Parts
    options: tuple[Option, ...]


def of_systemone(given: Mapping[str, Any]) -> list[Question]:
    """The questions of /v1/systemone: an object of id -> {type, instructions, criteria}."""
    check_count(len(given), MOST_OF_SYSTEMONE)
    return [_of_systemone(name, question, f"questions.{quoted(name)}") for name, question in given.items()]


def of_decisions(given: Sequence[Any]) -> list[Question]:
    """The questions of /v1/decisions: a list of {type, name, instructions, choices or levels}."""
    check_count(len(given), MOST_OF_DECISIONS)
    return [_of_decisions(question, f"questions[{at}]") for at, question in enumerate(given)]


def check_count(count: int, most: int) -> None:
    if not 1 <= count <= most:
        text = f"questions: got {count}; 1 to {most} are allowed in a request, so send several requests"
        raise invalid("questions", text)


def json_text(value: Any) -> str:
    """A text as it is, anything else as JSON."""
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _of_systemone(name: str, given: Any, path: str) -> Question:
    question = _object(given, path, ("type", "instructions", "criteria"))
    kind = _kind(question, path, {"noul": "truth", "choice": "choice", "score": "score"})
    asked = question.get("instructions")
    if not isinstance(asked, str | dict | list) or not asked:
        raise _missing(f"{path}.instructions", "a text, an object or a list")
    instructions = [{"type": "text", "text": json_text(asked)}]
    criteria, at = question.get("criteria"), f"{path}.criteria"
    if kind == "truth":
        options = _truths({} if criteria is None else _object(criteria, at, ("true", "false")), at)
    elif kind == "choice":
        if not isinstance(criteria, dict):
            raise _missing(at, "an object of options and their descriptions")
        texts = [_text_or_none(value, f"{at}.{quoted(key)}") for key, value in criteria.items()]
        options = _choices(list(zip(criteria, texts)), at)
    else:
        if not isinstance(criteria, list):
            raise _missing(at, "a list of levels, the lowest first")
        options = _levels([(_text(level, f"{at}[{k}]"), "") for k, level in enumerate(criteria)], at)
    return Question(kind, path, name, instructions, options)


def _of_decisions(given: Any, path: str) -> Question:
    own = {"predicate": (), "choice": ("choices",), "score": ("levels",)}
    kinds: dict[str, Kind] = {"predicate": "truth", "choice": "choice", "score": "score"}
    kind = _kind(given, path, kinds)
    question = _object(given, path, ("type", "name", "instructions", *own[given["type"]]))
    name = question.get("name")
    if name is not None and not isinstance(name, str):
        raise invalid(f"{path}.name", f"{path}.name: must be a text, or left out")
    instructions = _instructions(question.get("instructions"), f"{path}.instructions")
    if kind == "truth":
        options = _truths({}, path)
    elif kind == "choice":
        options = _choices(_entries(question, path, "choices", "value", _value), f"{path}.choices")
    else:
        options = _levels(_entries(question, path, "levels", "label", _text), f"{path}.levels")
    return Question(kind, path, name, instructions, options)


def _instructions(given: Any, path: str) -> Parts:
    """A text, or parts: input_text, input_image and input_json."""
    if isinstance(given, str) and given:
        return [{"type": "text", "text": given}]
    if not isinstance(given, list) or not given:
        raise _missing(path, "a text or a list of parts")
    return [json_part(part, f"{path}[{at}]") for at, part in enumerate(given)]


def json_part(part: Any, path: str) -> dict[str, Any]:
    """A part in which JSON has become a text; other parts are unchanged."""
    if not isinstance(part, dict):
        raise invalid(path, f"{path}: must be an object with a type")
    if part.get("type") != "input_json":
        return part
    if not isinstance(part.get("data"), dict | list):
        raise _missing(f"{path}.data", "an object or a list")
    return {"type": "input_text", "text": json_text(part["data"])}


def _truths(criteria: Entry, path: str) -> tuple[Option, ...]:
    descriptions = [_text_or_none(criteria.get(key), f"{path}.{key}") for key in ("true", "false")]
    return tuple(map(Option, (True, False), YES_NO, descriptions))


def _choices(given: Sequence[tuple[str | bool, str]], path: str) -> tuple[Option, ...]:
    if not 2 <= len(given) <= len(LETTERS):
        raise invalid(path, f"{path}: got {len(given)} options; 2 to {len(LETTERS)} are allowed")
    if len({(type(value), value) for value, _ in given}) < len(given):
        raise invalid(path, f"{path}: an option occurs twice; each must be unique")
    return tuple(Option(value, (label,), text) for label, (value, text) in zip(LETTERS, given))


def _levels(given: Sequence[tuple[Any, str]], path: str) -> tuple[Option, ...]:
    if not 2 <= len(given) <= MOST_LEVELS:
        raise invalid(path, f"{path}: got {len(given)} levels; 2 to {MOST_LEVELS} are allowed")
    return tuple(Option(level, (str(at),), text) for at, (level, text) in enumerate(given))


def _entries(
    question: Entry, path: str, field: str, key: str, read: Callable[[Any, str], Any]
) -> list[tuple[Any, str]]:
    """(value, description) of each entry of a list of objects."""
    listed, path = question.get(field), f"{path}.{field}"
    if not isinstance(listed, list):
        raise _missing(path, "a list of objects")
    found = []
    for at, entry in enumerate(listed):
        where = f"{path}[{at}]"
        one = _object(entry, where, (key, "description"))
        found.append((read(one.get(key), f"{where}.{key}"), _text_or_none(one.get("description"), where)))
    return found


def _kind(given: Any, path: str, kinds: Mapping[str, Kind]) -> Kind:
    kind = given.get("type") if isinstance(given, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        got = quoted(kind) if isinstance(kind, str) else "none"
        raise invalid(f"{path}.type", f"{path}.type: got {got}; must be one of {', '.join(kinds)}")
    return kinds[kind]


def _object(given: Any, path: str, keys: tuple[str, ...]) -> Entry:
    if not isinstance(given, dict):
        raise invalid(path, f"{path}: must be an object with {', '.join(keys)}")
    unknown = next((key for key in given if key not in keys), None)
    if unknown is not None:
        raise invalid(path, f"{path}: has an unknown key {quoted(unknown)}; known keys are {', '.join(keys)}")
    return given


def _text(given: Any, path: str) -> str:
    if not isinstance(given, str) or not given:
        raise _missing(path, "a text")
    return given


def _value(given: Any, path: str) -> str | bool:
    return given if isinstance(given, bool) else _text(given, path)


def _text_or_none(given: Any, path: str) -> str:
    return "" if given is None else _text(given, path)


def _missing(path: str, what: str) -> ApiError:
    return invalid(path, f"{path}: is missing, empty or of another type; must be {what}")
