"""Random answers drawn under a schema's masks satisfy the schema (by jsonschema), or the schema is refused."""

import json
import re

import numpy as np
import pytest
from jsonschema import Draft7Validator, Draft202012Validator, FormatChecker

from engine.base.errors import GrammarError
from server.errors import ApiError
from server.flags.config import LimitsConfig
from server.structure.structure import relaxed, schema_text
from tests.engine.grammar.kit import compiled, drawn
from tests.structure_corpus.generate import schema
from tests.structure_corpus.written import ENFORCED, REFUSED

LIMITS = LimitsConfig()
FORMATS = FormatChecker(formats=[name for name in FormatChecker.checkers if name != "time"])  # time of an old draft
IS_MOMENT = FormatChecker.checkers["date-time"][0]
# jsonschema rejects leap seconds, so they are replaced; formats apply to strings only.
FORMATS.checks("date-time")(lambda value: not isinstance(value, str) or IS_MOMENT(value.replace(":60", ":59")))
IN_A_PART = 60  # number of generated schemas in a part


def judge(asked):
    """A validator for the draft of the schema."""
    old = {"definitions", "additionalItems"} & asked.keys() or isinstance(asked.get("items"), list)
    if isinstance(asked.get("exclusiveMinimum"), bool):
        asked = {**asked, "exclusiveMinimum": asked["minimum"]}
    return (Draft7Validator if old else Draft202012Validator)(asked, format_checker=FORMATS)


def check(asked, draws, rng):
    """Checks that each answer satisfies the schema; returns how many of the draws ended."""
    grammar = compiled(schema_text(asked, "s", LIMITS), "schema")
    found = [answer for answer in (drawn(grammar, rng) for _ in range(draws)) if answer is not None]
    for answer in found:
        error = next(judge(asked).iter_errors(json.loads(answer)), None)
        assert error is None, f"{answer!r} under {json.dumps(asked)}: {error and error.message}"
    return len(found)


@pytest.mark.parametrize("number", range(len(ENFORCED)))
def test_schemas_as_they_are_written_hold(number):
    rng = np.random.default_rng(number)
    assert check(ENFORCED[number], 4, rng) >= 1


def test_whatever_is_drawn_satisfies_its_schema_or_the_schema_is_refused():
    hold(range(400), 2)


QUOTES = (
    r'^[^"]$',
    r"^[^\\]$",
    r'^[^"\n]$',
    r"^[^\x22]$",
    r"^[^\u0022]$",
    "^[^!-/]$",
    r"^[^\S]$",
    '^[^]"]$',
    r"^[^\W]$",
)
PLAIN = (
    r"^\s$",
    r"^[\w\s]$",
    r"^[a-z\n]$",
    r'^[\n"]$',
    r"^[^,;]$",
    "^[^a-z]$",
    r"^[\s\S]$",
    "^.$",
    r"^\D$",
    r"^[\d-]$",
)


@pytest.mark.parametrize("pattern", [*QUOTES, *PLAIN])
def test_a_pattern_allows_in_json_what_it_allows_outside(pattern):
    grammar = compiled(schema_text({"type": "string", "pattern": pattern}, "s", LIMITS), "schema")
    for char in '"\\/\n\t\x01 a-;é':
        spelled = list(json.dumps(char, ensure_ascii=False).encode())
        matcher = grammar.matcher()
        taken = matcher.try_consume_tokens(spelled) == len(spelled) and matcher.is_accepting()
        wanted = re.search(pattern, char, re.ASCII) is not None  # classes as in JavaScript
        # A class without quotes or backslashes excludes control characters: less than the pattern, never more.
        assert taken == wanted or (wanted and char < " " and pattern in QUOTES), char


@pytest.mark.parametrize("pattern", [r"[\x00-\x1f]", r"\p{Cc}", r"[a&&[b]]", r"[\p{C}]"])
def test_classes_that_cannot_be_written_in_json_are_refused(pattern):
    with pytest.raises(ApiError, match="classes of control characters"):
        schema_text({"pattern": pattern}, "s", LIMITS)


@pytest.mark.full
@pytest.mark.parametrize("part", range(10))
def test_hundreds_of_schemas_hold(part):
    hold(range(part * IN_A_PART, (part + 1) * IN_A_PART), 20)


def hold(seeds, draws):
    rng, enforced = np.random.default_rng(seeds[0]), 0
    refused: list[bool] = []
    for seed in seeds:
        try:
            enforced += check(schema(seed), draws, rng) > 0
        except ApiError as error:
            refused.append(error.param.startswith("s."))
        except GrammarError as error:
            refused.append(any(why in str(error) for why in ("no text satisfies", "leads back", "maxProperties need")))
    assert all(refused)
    assert enforced > 0.7 * len(seeds)


@pytest.mark.parametrize(("asked", "keyword"), REFUSED)
def test_what_is_not_enforced_is_named(asked, keyword):
    with pytest.raises(ApiError) as refused:
        schema_text(asked, "s", LIMITS)
    assert refused.value.param.rpartition(".")[2].partition("[")[0] == keyword
    text, dropped = relaxed(asked, "s", LIMITS)
    assert keyword in dropped
    compiled(text, "schema")
