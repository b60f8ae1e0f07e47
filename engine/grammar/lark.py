"""From a GrammarSpec to the library's Lark, and which client grammars are refused before the library sees them.

Owner: none, pure functions; called in the pool. A client's grammar reaches ordinary text only: special tokens, options
of the library, imports and embedded schemas would go around the server's own checks.
"""

from __future__ import annotations

import json
import re

from engine.errors import GrammarError
from engine.grammar.spec import GrammarSpec

# A mask that allows only the usual token for text that must come anyway moves the distribution, so it is off.
OPTIONS = '%llguidance {"no_forcing": true}\n'

# One pass over a grammar: strings, expressions and comments first, so that what they hold is not looked at.
_PIECES = re.compile(
    r'"(?:[^"\\\n]|\\.)*"i?'  # a text
    r"|/(?:[^/\\\n]|\\.)+/[imslux]*"  # an expression
    r"|(?://|\#)[^\n]*"  # a comment
    r"|\[(?:[^\]\\\n]|\\.)*\]"  # a class of GBNF, or a rule's options
    r"|(?P<ignore>%ignore\b)"
    r"|(?P<bad>[%<@])"
)


def lark_of(spec: GrammarSpec) -> str:
    """The grammar as the library reads it. Raises GrammarError."""
    if spec.kind == "free":
        answer = 'start: "a"'  # nobody looks
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
        from llguidance.gbnf_to_lark import gbnf_to_lark

        try:
            text = gbnf_to_lark(text).removeprefix("%llguidance {}")
        except RecursionError:
            raise GrammarError("grammar_too_complex", "the grammar nests too deeply") from None
        except Exception:  # the translator raises all kinds
            raise GrammarError("grammar_invalid", "the grammar is not well formed GBNF with a rule `root`") from None
    for found in _PIECES.finditer(text):
        if found["bad"]:
            line = text.count("\n", 0, found.start()) + 1
            raise GrammarError(
                "grammar_invalid",
                f"line {line} of the grammar: got {found['bad']}; a grammar may hold rules, texts, expressions and "
                "%ignore; special tokens, other % words and @ names are not allowed",
            )
    return text
