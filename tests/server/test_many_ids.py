"""Long lists of token ids are worked on in the pool, in pieces, and hold a place meanwhile."""

from __future__ import annotations

import threading

import pytest

from server.render.prompt import PIECE, empty

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def threads(client, monkeypatch):
    """The threads on which ids were checked or decoded, and how many places were held."""
    seen = []
    state = client.state

    def noting(work):
        def spy(*args, **named):
            seen.append((threading.current_thread(), state.places.taken))
            return work(*args, **named)

        return spy

    monkeypatch.setattr(state.tokenizer, "decode", noting(state.tokenizer.decode))
    monkeypatch.setattr(state.renderer, "_checked_ids", noting(state.renderer._checked_ids))
    monkeypatch.setattr(state.renderer, "_tokenized", noting(state.renderer._tokenized))
    return seen


@pytest.mark.parametrize("count", [5, 3 * PIECE + 1])
async def test_detokenize_works_in_the_pool_where_there_are_many_ids(client, state, threads, count):
    (token,) = state.tokenizer.encode("a")
    reply = await client.post("/detokenize", {"tokens": [token] * count})
    assert reply.json() == {"prompt": "a" * count}
    ((thread, places),) = threads
    assert (thread is threading.main_thread()) == (count == 5)
    assert places == 1
    assert client.state.places.taken == 0


async def test_detokenize_of_a_text_in_pieces_is_the_text(client, state):
    text = "pieces end ünder ⚡ a character " * 1700
    ids = state.tokenizer.encode(text)
    assert len(ids) > PIECE
    assert (await client.post("/detokenize", {"tokens": ids})).json() == {"prompt": text}


async def test_detokenize_names_a_wrong_id_far_behind(client, state):
    reply = await client.post("/detokenize", {"tokens": [5] * (2 * PIECE) + [state.vocabulary.width]})
    assert reply.status == 400
    assert reply.error["param"] == f"tokens[{2 * PIECE}]"
    assert client.state.places.taken == 0


async def test_tokenize_holds_a_place(client, threads):
    assert (await client.post("/tokenize", {"prompt": "hello " * 1000})).status == 200
    ((thread, places),) = threads
    assert thread is not threading.main_thread()
    assert places == 1
    assert client.state.places.taken == 0


async def test_a_prompt_of_a_million_ids_is_refused_before_it_is_read(client, threads):
    reply = await client.complete([5] * 900_000)
    assert reply.status == 400
    assert reply.error["message"].startswith("This model's maximum context length is ")
    assert "contains 900000 input tokens" in reply.error["message"]
    assert threads == []


async def test_a_long_list_that_is_cut_is_read_in_the_pool(client, threads):
    most = client.state.renderer.config.prompt_bytes
    count = min(most, 100_000)
    reply = await client.complete([5] * count, truncate_prompt_tokens=4)
    assert reply.status == 200
    assert reply.json()["usage"]["prompt_tokens"] == 4
    assert threads[0][0] is not threading.main_thread()
    mixed = await client.complete([5] * (count - 1) + ["a"], truncate_prompt_tokens=4)
    assert mixed.status == 400
    assert mixed.error["param"] == f"prompt[{count - 1}]"


async def test_a_list_is_emptied():
    ids = list(range(2 * PIECE + 3))
    empty(ids)
    assert ids == []
