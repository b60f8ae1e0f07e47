"""When a server is idle, no matcher and no parser is alive, however its requests ended."""

from __future__ import annotations

import asyncio
import gc
import random

import pytest

from engine.grammar.row import GrammarRow
from server.output.parser import OutputParser
from server.output.parser_choice import choose_parsers
from tests.server.conftest import quiet
from tests.server.structure.test_forced_calls import PATHS, forced

pytestmark = pytest.mark.asyncio(loop_scope="session")
AT_ONE_TIME = 6
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"enum": [1, 2]}}, "required": ["a", "b"]}
KINDS = [
    {"structured_outputs": {"regex": "[a-z]{3,40}"}},
    {"structured_outputs": {"choice": ["yes", "no"]}, "n": 2},
    {"structured_outputs": {"choice": ["yes", "no"]}, "n": 2, "use_beam_search": True},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
    {"structured_outputs": {"grammar": "start: start"}},  # refused
    {"bad_words": ["y", "n"], "structured_outputs": {"choice": ["y", "n"]}},
]


def alive() -> dict[str, int]:
    gc.collect()
    kinds = (GrammarRow, OutputParser)
    return {kind.__name__: sum(type(thing) is kind for thing in gc.get_objects()) for kind in kinds}


async def one(client, draw: random.Random) -> None:
    """One request on one of three routes; its client may disconnect at any moment."""
    if draw.random() < 0.5:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": draw.randrange(1, 12)}
        body |= draw.choice(KINDS)
        call = client.call("POST", PATHS[0], body | {"stream": "use_beam_search" not in body and draw.random() < 0.5})
    else:
        path = draw.choice(PATHS)
        body = forced(path, draw.choice(["required", "weather", "auto"])) | {"stream": draw.random() < 0.5}
        body |= {name: draw.randrange(1, 30) for name in body if name.startswith("max_")}
        call = client.call("POST", path, body)
    call.start()
    if draw.random() < 0.4:
        for _ in range(draw.randrange(40)):
            await asyncio.sleep(0)
        call.leave()
    await call.finish(60)


@pytest.mark.parametrize(
    "count", [60, pytest.param(2000, marks=pytest.mark.full), pytest.param(100_000, marks=pytest.mark.full)]
)
@pytest.mark.timeout(7200)
async def test_an_idle_server_holds_no_matcher_and_no_parser(serve, state, count):
    client = serve()
    client.state.parsers = choose_parsers(client.state.tokenizer, [], "", tools="hermes", reasoning="granite")
    before, draw = alive(), random.Random(count)

    async def worker() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await one(client, draw)

    left = count
    await asyncio.gather(*(worker() for _ in range(AT_ONE_TIME)))
    ledger = await quiet(state)
    assert (ledger["routes"], ledger["matchers"]) == (0, 0), ledger
    assert alive() == before
