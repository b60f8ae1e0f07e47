"""Long lists of token ids are processed in the pool, in pieces, and occupy a place during that time."""

from __future__ import annotations

import threading

import msgspec
import pytest

from _fast import id_lists
from server.errors import ApiError
from server.flags.config import LimitsConfig
from server.http import body
from server.render.prompt import PIECE, empty
from server.schema.completion import CompletionBody
from server.schema.tokenize import DetokenizeBody

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def threads(client, monkeypatch):
    """A list with the thread of each check or decoding of ids, and the number of places taken then."""
    seen = []
    state = client.state

    def noting(work):
        def spy(*args, **named):
            seen.append((threading.current_thread(), state.places.taken))
            return work(*args, **named)

        return spy

    monkeypatch.setattr(state.tokenizer, "decode", noting(state.tokenizer.decode))
    monkeypatch.setattr(state.renderer, "_checked_ids", noting(state.renderer._checked_ids))
    monkeypatch.setattr(state.tokenizer, "encode", noting(state.tokenizer.encode))
    return seen


@pytest.mark.parametrize("count", [5, 3 * PIECE + 1])
async def test_detokenize_works_in_the_pool_where_there_are_many_ids(client, state, threads, count):
    (token,) = state.tokenizer.encode("a")
    threads.clear()
    reply = await client.post("/detokenize", {"tokens": [token] * count})
    assert reply.json() == {"prompt": "a" * count, "content": "a" * count}
    ((thread, places),) = threads
    assert (thread is threading.main_thread()) == (count == 5)
    assert places == 1
    assert client.state.places.taken == 0


async def test_detokenize_of_a_text_in_pieces_is_the_text(client, state):
    text = "pieces end ünder ⚡ a character " * 1700
    ids = state.tokenizer.encode(text)
    assert len(ids) > PIECE
    assert (await client.post("/detokenize", {"tokens": ids})).json() == {"prompt": text, "content": text}


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
    mixed = await client.complete([5] * 60_000 + ["a"], truncate_prompt_tokens=4)
    assert mixed.status == 400
    assert mixed.error["param"] == "prompt[60000]"


async def test_a_list_is_emptied():
    ids = list(range(2 * PIECE + 3))
    empty(ids)
    assert ids == []


async def test_the_decoder_of_a_large_body_makes_no_list_of_a_million_ids(monkeypatch):
    """A decoder's call holds the GIL, so it gets one id of each list; the other ids are parsed in pieces of 4,096."""
    short, pieces = [], []
    decoder = msgspec.json.Decoder(CompletionBody)

    class Spy:
        def decode(self, data):
            short.append(len(data))
            return decoder.decode(data)

    def read(*args):
        found = id_lists_read(*args)
        pieces.append(len(found[0]))
        return found

    id_lists_read = id_lists.read
    monkeypatch.setitem(body._decoders, CompletionBody, Spy())
    monkeypatch.setattr(body.id_lists, "read", read)
    prompts = [[123456] * 500_000, [7] * 300_000]
    data = msgspec.json.encode({"prompt": prompts, "max_tokens": 1})
    assert body.decode(data, CompletionBody, LimitsConfig())[0].prompt == prompts
    assert sum(short) < 100
    assert sum(pieces) == 799_998
    assert max(pieces) <= 4096


@pytest.fixture
def decoded(monkeypatch):
    """For each call of a decoder, the number of values that it had to make."""
    counts = []
    decode_values, loosely = body.decode_values, msgspec.json.decode

    def spy(decode):
        def counting(data, *args, **named):
            counts.append(data.count(b",") + data.count(b"[") + data.count(b"{"))
            return decode(data, *args, **named)

        return counting

    monkeypatch.setattr(body, "decode_values", spy(decode_values))
    monkeypatch.setattr(msgspec.json, "decode", spy(loosely))
    return counts


@pytest.mark.parametrize("value", ['""', "1.5", "{}", "[]", '{"a":1}', "[1,[2]]", "null", '"a",1', "[1,2],3"])
async def test_a_decoder_is_asked_for_a_bounded_number_of_values(value, decoded):
    """A decoder's single call holds the GIL."""
    data = f'{{"prompt":[{",".join([value] * 90_000)}]}}'.encode()
    with pytest.raises(ApiError, match=f"may hold {body.MOST_VALUES} values besides lists of at least 16 integers"):
        body.decode(data, CompletionBody, LimitsConfig())
    assert decoded == []


async def test_a_name_that_stands_twice_does_not_pass_the_bound(decoded):
    ids = ",".join(["5"] * 90_000)
    with pytest.raises(ApiError, match="send it as several requests"):
        body.decode(f'{{"prompt":[{ids}],"prompt":[5]}}'.encode(), CompletionBody, LimitsConfig())
    assert decoded == []


async def test_a_float_in_a_body_of_many_ids_is_read_without_the_ids(decoded):
    ids = list(range(900_000))
    data = msgspec.json.encode({"prompt": ids, "max_tokens": 16.0})
    read, _ = body.decode(data, CompletionBody, LimitsConfig())
    assert (read.prompt, read.max_tokens) == (ids, 16)
    assert decoded
    assert max(decoded) < 10


async def test_a_body_that_is_decoded_on_the_loop_has_no_more_values():
    assert body.POOL_BYTES // 2 <= body.MOST_VALUES


async def test_as_many_short_prompts_as_a_request_may_hold_are_read():
    prompts = [list(range(body.LONG_LIST + 40))] * LimitsConfig().max_prompts
    assert body.decode(msgspec.json.encode({"prompt": prompts}), CompletionBody, LimitsConfig())[0].prompt == prompts


@pytest.mark.parametrize(
    "text",
    [
        '{"prompt": IDS}',
        '{"prompt": [IDS, [5], IDS], "stop_token_ids": IDS}',
        '{"prompt": IDS, "prompt": [5]}',
        '{"prompt": "a", "__class__": IDS, "unknown": [IDS]}',
        '{"model": IDS}',
        '{"prompt": [IDS, {"a": IDS}]}',
        '{"prompt": [1.0, IDS]}',
        '{"logit_bias": IDS}',
        '{"prompt": IDS',
        '{"tokens": IDS}',
        '{"tokens": ["a", IDS]}',
    ],
)
async def test_a_large_body_is_read_as_a_small_one(text, monkeypatch):
    data = text.replace("IDS", f"[{', '.join(map(str, range(100)))}]").encode()

    def outcome(kind):
        try:
            return body.decode(data, kind, LimitsConfig())[0]
        except ApiError as error:
            return error.status, error.param, str(error)

    for kind in (CompletionBody, DetokenizeBody):
        monkeypatch.setattr(body, "POOL_BYTES", 1 << 20)
        expected = outcome(kind)
        monkeypatch.setattr(body, "POOL_BYTES", 0)
        assert outcome(kind) == expected
