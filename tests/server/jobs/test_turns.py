"""Starts of turns are found in the tokens; states stored there let other requests reuse a shared text."""

import numpy as np
import pytest

from server.app import make_app
from server.jobs.turns import turn_starts
from tests import tiny
from tests.server.asgi import Client
from tests.server.conftest import config_of, ready

TURN, BOS = 9, 8
SHARED = 300  # approximate tokens of the system text


@pytest.mark.parametrize(
    ("ids", "starts"),
    [
        ([], ()),
        ([1, 2, TURN, 3], ()),
        ([TURN, 1, 2], ()),
        ([TURN, 1, 2, TURN, 4], (3,)),
        ([BOS, TURN, 1, TURN, 4, TURN], (3, 5)),
        ([1, TURN, 1, TURN, 4, TURN], (3, 5)),
        ([TURN, 1] * 12, (2, 10, 12, 14, 16, 18, 20, 22)),
    ],
)
def test_turns_begin_with_the_special_token_that_comes_again(ids, starts):
    assert turn_starts(np.array(ids, np.int32), {TURN, BOS}.__contains__) == starts


@pytest.fixture
async def client():
    """A server whose model has states; blocks of 16 tokens; the prefix cache has room for about twenty states."""
    model = {"model": str(tiny.checkpoint("qwen3_5_text-states")), "num_threads": 1}
    async with ready(config_of(model=model)) as state:
        yield Client(make_app(state))


async def cached(client, path, **body):
    """Returns (tokens of the prompt, tokens found in the prefix cache, the answer)."""
    reply = await client.post(path, json={"max_tokens": 1, "temperature": 0, **body})
    assert reply.status == 200, reply.text
    usage = reply.json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], reply.json()["choices"][0]


def said(role, text):
    return {"role": role, "content": text}


async def test_chats_find_a_shared_system_text_from_the_second_on(client):
    system = said("system", "be brief and kind " * (SHARED // 10))
    for number in range(64):
        length, found, _ = await cached(
            client, "/v1/chat/completions", messages=[system, said("user", f"{number} is what?" * (1 + number % 3))]
        )
        assert length > SHARED
        assert found >= 0.85 * SHARED if number else found == 0


async def test_bare_tokens_find_a_shared_beginning_from_the_third_on(client):
    draw = np.random.default_rng(0)
    shared = draw.integers(0, 250, SHARED).tolist()
    for number in range(8):
        own = draw.integers(0, 250, 40).tolist()
        _, found, _ = await cached(client, "/v1/completions", prompt=shared + own)
        assert found >= 0.85 * SHARED if number > 1 else found == 0


async def test_a_conversation_finds_its_earlier_turns(client):
    messages, before = [said("system", "answer")], 0
    for turn in range(8):
        messages.append(said("user", f"question {turn}"))
        length, found, choice = await cached(client, "/v1/chat/completions", messages=messages, max_tokens=20)
        assert found > before - 16 - 1
        before = length
        messages.append(said("assistant", choice["message"]["content"]))
