"""Hostile schemas, patterns and grammars, grouped by the resource that they exhaust."""

import json


def nested(levels, inner="{}"):
    return '{"items":' * levels + inner + "}" * levels


def chained(definitions, levels, link):
    """Definitions that each refer to the next through `levels` levels; the library recurses along all of them."""
    found = {f"d{definitions}": {"type": "string"}}
    for number in range(definitions):
        inner = {"$ref": f"#/$defs/d{number + 1}"}
        for _ in range(levels):
            inner = link(inner)
        found[f"d{number}"] = inner
    return {"$ref": "#/$defs/d0", "$defs": found}


def rules(count, form):
    """`count` rules that each expand to the next."""
    first = form[0] + "0"
    return "\n".join([f"start: {first}", *(form.format(n, n + 1) for n in range(count)), f'{form[0]}{count}: "a"'])


HOSTILE = {
    "a million levels": {"json": nested(1_000_000)},
    "levels beyond the limit": {"json": nested(70)},
    "sixty thousand names": {"json": {"enum": [str(n) for n in range(60_000)]}},
    "a hundred thousand names": {"json": json.dumps({"enum": [str(n) for n in range(100_000)]})},
    "many properties": {"json": {"properties": {f"p{n}": {"type": "string"} for n in range(9000)}}},
    "exponential repeats": {"regex": "((((a{1,999}){1,999}){1,999}){1,999}){1,999}"},
    "nested stars": {"regex": "(((a*)*)*)*b"},
    "alternatives": {"regex": "(" + "|".join(f"a{n}.*b" for n in range(300)) + "){1,50}"},
    "huge repeat": {"regex": "a{1000000000}"},
    "long pattern": {"regex": "a" * 100_000},
    "pattern in a schema": {"json": {"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$", "maxLength": 900}},
    "large counts": {"json": {"type": "array", "items": {"type": "string", "maxLength": 10**9}, "minItems": 10**9}},
    "string lengths": {"json": {"type": "string", "minLength": 100_000, "maxLength": 200_000}},
    "references around": {"json": {"$defs": {name: {"$ref": f"#/$defs/{to}"} for name, to in ("ab", "ba")}}},
    "product of unions": {"json": {"allOf": [{"anyOf": [{"required": [f"{k}{n}"]} for k in "abc"]} for n in range(8)]}},
    "left recursion": {"grammar": 'start: start start | start "a" | ""'},
    "ambiguity": {"grammar": 'start: x*\nx: "a"* | "aa"* | x x'},
    "many rules": {"grammar": "start: r0\n" + "\n".join(f'r{n}: r{n + 1} r{n + 1}' for n in range(60)) + '\nr60: "a"'},
    "deep brackets": {"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
    "gbnf brackets": {"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000},
    "many choices": {"choice": [f"choice {n}" for n in range(60_000)]},
    "wide choices": {"choice": [f"{n} " * 20 for n in range(2000)]},
    "the least of 64 bits": {"json": {"properties": {"a": {"enum": [[-(2**63)]]}}, "required": ["a"]}},
    "the least of 64 bits in brackets": {"grammar": f'start: [%json {{"const": {-(2**63)}}}]'},
    "properties along references": {"json": chained(136, 28, lambda inner: {"properties": {"a": inner}})},
    "items along references": {"json": chained(130, 58, lambda inner: {"items": inner})},
    "references along references": {"json": chained(2400, 0, None)},
    "a chain of rules": {"grammar": rules(9000, "r{}: r{}")},
    "a chain of terminals": {"grammar": rules(510, "R{}: R{}*")},
    "multiples": {"json": {"type": "integer", "multipleOf": 1_000_003, "maximum": 1000}},
    "numbers beyond floats": {"json": '{"minimum": 1e999999, "enum": [1e400]}'},
    "nulls": {"regex": "\x00*"},
    "broken text": {"grammar": "start: \x00 \ud7ff é \\"},
}  # fmt: skip
