"""Hostile schemas, patterns and grammars: each is answered in time, and other requests are hardly delayed."""

import asyncio
import os
import time

import psutil
import pytest

from tests.server.conftest import quiet
from tests.structure_corpus.hostile import HOSTILE

pytestmark = pytest.mark.asyncio(loop_scope="session")


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


async def test_other_requests_are_answered_during_a_compile(client):
    slow = asyncio.ensure_future(client.chat(structured_outputs=HOSTILE["alternatives"], max_tokens=8))
    begun = time.monotonic()
    assert (await client.chat(max_tokens=4)).status == 200
    assert time.monotonic() - begun < 5
    await slow
