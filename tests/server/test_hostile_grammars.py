"""Schemas, patterns and grammars that were made to hurt: each is answered in time, and costs nobody else much."""

import asyncio
import os
import time

import psutil
import pytest

from tests.server.conftest import quiet

pytestmark = pytest.mark.asyncio(loop_scope="session")


def nested(levels, inner="{}"):
    return '{"items":' * levels + inner + "}" * levels


HOSTILE = {
    "a million levels": {"json": nested(1_000_000)},
    "levels beyond the limit": {"json": nested(70)},
    "a hundred thousand names": {"json": {"enum": [str(n) for n in range(100_000)]}},
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
    "many choices": {"choice": [f"choice {n}" for n in range(100_000)]},
    "wide choices": {"choice": [f"{n} " * 20 for n in range(2000)]},
    "numbers beyond floats": {"json": '{"minimum": 1e999999, "enum": [1e400]}'},
    "nulls": {"regex": "\x00*"},
    "broken text": {"grammar": "start: \x00 \ud7ff é \\"},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_grammar_is_answered_in_time(client, state, name):
    before, begun = psutil.Process(os.getpid()).memory_info().rss, time.monotonic()
    reply = await client.chat(structured_outputs=HOSTILE[name], max_tokens=8, ignore_eos=False)
    assert time.monotonic() - begun < 10
    assert psutil.Process(os.getpid()).memory_info().rss - before < 1 << 30
    assert reply.status in (200, 400), reply.content
    if reply.status == 400:
        assert reply.error["reason"] in (
            "grammar_invalid",
            "grammar_too_complex",
            "grammar_conflict",
            "json_too_complex",
        )
        assert len(reply.error["message"]) < 500
    assert (await quiet(state))["matchers"] == 0


async def test_others_are_answered_beside_a_compile(client):
    slow = asyncio.ensure_future(client.chat(structured_outputs=HOSTILE["alternatives"], max_tokens=8))
    begun = time.monotonic()
    assert (await client.chat(max_tokens=4)).status == 200
    assert time.monotonic() - begun < 5
    await slow
