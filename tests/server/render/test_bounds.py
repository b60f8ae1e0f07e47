"""Sizes that a template's expressions may create: texts and lists are counted before they are created."""

from __future__ import annotations

import tracemalloc

import pytest

from server.render.template import ChatTemplate, TemplateLimits
from tests.server.render.test_template import QUICK, refused

ROOMY = TemplateLimits(timeout=5.0, max_output_bytes=300_000)
BLOWN_UP = [
    "'a'.ljust(10**8)", "'a'.rjust(10**8)", "'a'.center(10**8)", "'a'.zfill(10**8)", "'a'|center(10**8)",
    "'%99999999d' % 1", "'%*d' % (99999999, 1)", "'%.99999999f' % 1", "'%99999999d'|format(1)",
    "'%(a)s%(a)s%(a)s%(a)s' % {'a': big}", "'%s%s%s%s' % (big, big, big, big)",
    "'{:99999999}'.format(1)", "'{0:{1}}'.format(1, 99999999)", "'{0}{0}{0}{0}'.format(big)",
    "'{a}{a}{a}{a}'.format_map({'a': big})", "'{a!r}{a!r}{a!r}{a!r}'.format(a=big)",
    "big.replace('a', 'bbbb')", "big|replace('a', 'bbbb')", "big.replace('', 'bbbb')",
    "big.encode().replace('a'.encode(), 'bbbb'.encode())",
    "(('a\\n' * 100000)|indent(8))", "'a'|indent(99999999, true)", "'a\\nb'|indent(big ~ big)",
    "('bbbb').join(['a'] * 100000)", "(['a'] * 100000)|join('bbbb')", "[big, big, big]|join", "big.join('abcd')",
    "[{'a': big}, {'a': big}]|join(big, attribute='a')",
    "('\\t' * 1000).expandtabs(1000)", "big.translate({97: 'bbbb'})", "(1).to_bytes(99999999)",
    "big * 4", "4 * big", "([1] * 100000) * 4", "big + big + big", "big ~ big ~ big", "[big] * 4 ~ ''",
    "([big] * 4)|string", "([big] * 4)|tojson", "([big] * 4)|upper", "{'a': [big] * 4}|pprint", "'%s' % ([big] * 4,)",
    "[big] * 4", "{'a': 1}|tojson(indent=99999999)", "{'a': 1}|tojson(separators=(big, big))",
    "[1]|batch(99999999, 0)|list", "[1]|slice(99999999)|list", "big|wordwrap(1, wrapstring='bbbb')",
    "([[1] * 1000] * 1000)|sum(start=[])", "1.5|round(99999999, 'ceil')", "10**60 * 10**60 * (10**64) ** 40",
]  # fmt: skip


@pytest.mark.parametrize("expression", BLOWN_UP)
def test_what_an_expression_makes_is_bounded(expression):
    source = "{% set big = 'a' * 150000 %}{% for m in messages %}{% set x = " + expression + " %}{{ x }}{% endfor %}"
    tracemalloc.start()
    try:
        refused(source, "makes a|indents JSON|separators|rounds|too large", limits=ROOMY)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20


SLOWLY_BLOWN_UP = [
    "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x=['ab']) %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=['ab']) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=10) %}{% for i in range(40) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{% set big = 'a' * 150000 %}{% set x %}{% for i in range(9) %}{{ big }}{% endfor %}{% endset %}{{ x|length }}",
    "{% macro m(n) %}{{ m(n - 1) ~ m(n - 1) if n else 'a' * 1000 }}{% endmacro %}{{ m(9)|length }}",
]


@pytest.mark.parametrize("source", SLOWLY_BLOWN_UP)
def test_what_a_loop_makes_of_itself_is_bounded(source):
    refused(source, "makes a text or list|too large", limits=ROOMY)


def test_a_macro_that_calls_itself_ends_with_the_clock():
    source = "{% macro m(n) %}{% if n %}{% if m(n - 1) and m(n - 1) %}{% endif %}{% endif %}a{% endmacro %}{{ m(60) }}"
    refused(source, "ran for more than", limits=QUICK)


def test_all_that_one_rendering_makes_is_bounded(monkeypatch):
    monkeypatch.setattr("server.render.bounds.MAX_IN_ALL", 1_000_000)
    source = "{% set big = 'a' * 150000 %}{% for i in range(99) %}{% set x = big ~ i %}{% endfor %}"
    refused(source, "makes more than 1000000 characters in all")


METHODS_AS_TEXT = [
    "'a'.join",
    "[[1].index]",
    "{}.items ~ 'a'",
    "'%s' % ([1].index,)",
    "{'a': {}.get}|string",
    "namespace",
    "cycler('a')",
]


@pytest.mark.parametrize("expression", METHODS_AS_TEXT)
def test_a_method_is_no_text_as_that_would_reveal_an_address(expression):
    refused("{{ " + expression + " }}{% for m in messages %}{% endfor %}", "makes text of a", limits=ROOMY)


def test_helpers_that_stay_in_bounds_do_what_they_did():
    cases = {
        "'a'.ljust(3) ~ 'b'.center(3) ~ '7'.zfill(3)": "a   b 007",
        "'%-4s|%(' % 'ab' if false else '%-4s|' % 'ab'": "ab  |",
        "'{0:>{1}}|{a!r}'.format(1, 3, a='x')": "  1|'x'",
        "'a.b.c'.replace('.', '--', 1)": "a--b.c",
        "'a.b.c'|replace('.', '--', 1)": "a--b.c",
        "'a\\nb'|indent(2, true)": "  a\n  b",
        "[1, none, 'x']|join('-')": "1-None-x",
        "[{'a': 1}, {'a': 2}]|join(', ', attribute='a')": "1, 2",
        "[1, 2]|sum(start=3)": "6",
        "[[1], [2]]|sum(start=[])": "[1, 2]",
        "{'a': [1]}|tojson(indent=1)": '{\n "a": [\n  1\n ]\n}',
        "'%s and %s'|format('a', 'b')": "a and b",
        "'x' ~ 1 ~ none ~ [1]": "x1None[1]",
        "7 % 4 ~ ' ' ~ 3 * 'ab'": "3 ababab",
        "1.257|round(2)": "1.26",
    }
    for expression, text in cases.items():
        assert ChatTemplate("{{ " + expression + " }}", {}).render([]) == text, expression
