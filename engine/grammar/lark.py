"""Turns a GrammarSpec into the library's Lark, and refuses some client grammars before the library parses them.

Owner: none, pure functions; called in the pool. A client's grammar may produce ordinary text only: special tokens,
library options, imports and embedded schemas would bypass the server's checks.
"""

from __future__ import annotations

import json
import re

from engine.base.errors import GrammarError
from engine.base.grammar import GrammarSpec

# By default the library's mask allows only the canonical token for forced text, which changes the distribution.
OPTIONS = '%llguidance {"no_forcing": true}\n'

# Most rules of a client's grammar. The library recurses into nested rules and is quadratic in the number of rules.
MAX_RULES = 512

# One pass over a grammar. Strings, regular expressions and comments match first, so that their contents are skipped.
# Square brackets are not skipped, because they hold optional parts of a rule. An unclosed quote or slash is refused,
# because the library reads a regular expression across lines and would find a different end.
_PIECES = re.compile(
    r'"(?:[^"\\\n]|\\.)*"i?'  # a text
    r"|/(?:[^/\\\n]|\\.)+/[imslux]*"  # an expression
    r"|(?://|\#)[^\n]*"  # a comment
    r"|(?P<ignore>%ignore\b)"
    r"|(?P<rule>:)"
    r'|(?P<open>["/])'
    r"|(?P<bad>[%<@])"
)


def lark_of(spec: GrammarSpec) -> str:
    """The grammar in the library's Lark. Raises GrammarError."""
    if spec.kind == "free":
        answer = 'start: "a"'  # a placeholder, never matched
    elif spec.kind == "schema":
        answer = f"start: %json {spec.text}"
    else:
        answer = spec.text if spec.kind == "lark" else _of_client(spec.text)
    if not spec.around:
        return OPTIONS + answer
    parts = ("whole", spec.around), ("answer", answer)
    return json.dumps({"grammars": [{"name": name, "lark_grammar": OPTIONS + text} for name, text in parts]})


def _of_client(text: str) -> str:
    if "::=" in text:
        _check_rules(text.count("::="))  # the translator, too, is quadratic in the number of rules
        from llguidance.gbnf_to_lark import gbnf_to_lark

        try:
            text = gbnf_to_lark(text).removeprefix("%llguidance {}")
        except RecursionError:
            raise GrammarError("grammar_too_complex", "the grammar nests too deeply") from None
        except Exception:  # the translator may raise any exception
            raise GrammarError("grammar_invalid", "the grammar is not well formed GBNF with a rule `root`") from None
    num_rules = 0
    for found in _PIECES.finditer(text):
        num_rules += found["rule"] is not None
        if not found["bad"] and not found["open"]:
            continue
        allowed = (
            "a grammar may hold rules, texts, expressions and %ignore; special tokens, other % words and @ names are "
            "not allowed"
            if found["bad"]
            else "a text or an expression must end on the line where it begins"
        )
        line = text.count("\n", 0, found.start()) + 1
        raise GrammarError("grammar_invalid", f"line {line} of the grammar: got {found[0]}; {allowed}")
    _check_rules(num_rules)
    return text


def _check_rules(count: int) -> None:
    if count > MAX_RULES:
        reason = f"the grammar has {count} rules; at most {MAX_RULES} are allowed; write some of them as one"
        raise GrammarError("grammar_too_complex", reason)
