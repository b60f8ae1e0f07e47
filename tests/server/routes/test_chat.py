"""/v1/chat/completions through the in-memory client: bodies, fields, streams, disconnects."""

from __future__ import annotations

import asyncio

import pytest

from tests.server.conftest import quiet, until

pytestmark = pytest.mark.asyncio(loop_scope="session")


def text_of(events):
    return "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e != "[DONE]" and e["choices"])


@pytest.fixture
def ids(state):
    """A function: text -> token ids."""
    return lambda text: state.tokenizer.encode(text)


async def test_answer_has_every_field_of_the_contract(client):
    reply = await client.chat()
    body = reply.json()
    assert reply.status == 200
    assert reply.reply_headers["content-type"] == "application/json"
    assert body["id"] == "chatcmpl-" + reply.reply_headers["x-request-id"]
    assert body["object"] == "chat.completion"
    assert body["model"] == "omniloop"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": choice["message"]["content"], "refusal": None}
    assert choice["finish_reason"] == "length"
    assert choice["stop_reason"] is None
    assert choice["logprobs"] is None
    usage = body["usage"]
    assert usage["completion_tokens"] == 4
    assert usage["total_tokens"] == usage["prompt_tokens"] + 4
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0, "multimodal_tokens": None}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert body["prompt_logprobs"] is None
    assert body["service_tier"] is None
    assert "system_fingerprint" in body


async def test_stream_comes_in_the_exact_order_and_equals_the_whole_answer(client):
    whole = (await client.chat(max_tokens=12)).json()
    reply = await client.chat(max_tokens=12, stream=True, stream_options={"include_usage": True})
    assert reply.reply_headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.reply_headers["cache-control"] == "no-cache"
    assert reply.reply_headers["x-accel-buffering"] == "no"
    events = reply.events()
    assert events[-1] == "[DONE]"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 12
    assert [e["choices"][0]["finish_reason"] for e in events[:-2]] == [None] * (len(events) - 3) + ["length"]
    assert all(e["choices"][0]["delta"].get("content") for e in events[1:-3])
    assert len({(e["id"], e["created"], e["object"]) for e in events[:-1]}) == 1
    assert text_of(events) == whole["choices"][0]["message"]["content"]


async def test_frames_are_exactly_these_bytes(client, ids):
    (token,) = ids(" the")[:1]
    reply = await client.chat(
        max_tokens=2, stream=True, allowed_token_ids=[token], temperature=0, request_id="r1", model="omniloop"
    )
    created = reply.events()[0]["created"]
    head = 'data: {"id":"chatcmpl-r1","object":"chat.completion.chunk",'
    head += f'"created":{created},"model":"omniloop","choices":['
    role = head + '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
    text = head + '{"index":0,"delta":{"content":" the"},"logprobs":null,"finish_reason":null}]}\n\n'
    end = (
        head
        + '{"index":0,"delta":{"content":" the"},"logprobs":null,"finish_reason":"length","stop_reason":null}]}\n\n'
    )
    assert reply.content.decode() == role + text + end + "data: [DONE]\n\n"
    assert [write.decode() for write in reply.writes] == [role + text, end + "data: [DONE]\n\n"]


async def test_one_write_per_step_for_all_choices(client):
    reply = await client.chat(max_tokens=6, n=4, stream=True, ignore_eos=True)
    events = reply.events()
    assert {e["choices"][0]["index"] for e in events[:-1]} == {0, 1, 2, 3}
    assert len(reply.writes) <= 6 + 3  # choices after the first join one step later


async def test_choices_share_the_prompt_and_are_counted_together(client):
    body = (await client.chat(n=3, ignore_eos=True)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["completion_tokens"] == 12


async def test_stop_string_ends_the_answer_and_is_left_out(client, ids):
    pair = ids(" the")[:1]
    fields = {"allowed_token_ids": pair, "temperature": 0, "max_tokens": 50}
    body = (await client.chat(stop=["the the"], **fields)).json()
    assert body["choices"][0]["message"]["content"] == " "
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["stop_reason"] == "the the"
    assert body["usage"]["completion_tokens"] == 2
    body = (await client.chat(stop="the the", include_stop_str_in_output=True, **fields)).json()
    assert body["choices"][0]["message"]["content"] == " the the"
    events = (await client.chat(stop="the the", stream=True, **fields)).events()
    assert text_of(events) == " "
    assert events[-2]["choices"][0]["stop_reason"] == "the the"


async def test_stop_token_is_reported_by_id(client, ids):
    token = ids(" the")[0]
    body = (await client.chat(allowed_token_ids=[token], stop_token_ids=[token], temperature=0)).json()
    assert body["choices"][0]["stop_reason"] == token
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["message"]["content"] == ""
    either = [token, *ids(" a")]
    body = (await client.chat(allowed_token_ids=either, stop_token_ids=[token], min_tokens=3, max_tokens=8)).json()
    assert body["usage"]["completion_tokens"] >= 3


async def test_end_of_sequence_counts_and_has_no_reason_text(client, state):
    eos = state.vocabulary.eos[0]
    body = (await client.chat(allowed_token_ids=[eos], temperature=0, ignore_eos=False)).json()
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["stop_reason"] is None
    assert body["usage"]["completion_tokens"] == 1
    body = (await client.chat(allowed_token_ids=[eos], temperature=0, ignore_eos=True)).json()
    assert body["usage"]["completion_tokens"] == 4
    assert body["choices"][0]["finish_reason"] == "length"


async def test_characters_of_several_tokens_are_never_cut(client, state):
    text = "é😀漢"
    tokens = [token for char in text.encode() for token in [state.tokenizer.id_of(byte_name(char))]]
    assert None not in tokens
    for at, token in enumerate(tokens[:4]):
        reply = await client.chat(allowed_token_ids=[token], temperature=0, max_tokens=3, stream=True)
        assert at >= 0
        assert "�" in text_of(reply.events())  # the bytes are not a character, and the end of the stream shows this


def byte_name(value: int) -> str:
    """The spelling of a byte in byte-level vocabularies."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(value) if value in plain else chr(256 + [b for b in range(256) if b not in plain].index(value))


async def test_logprobs_hold_exactly_the_likeliest(client):
    body = (await client.chat(logprobs=True, top_logprobs=3, temperature=0)).json()
    entries = body["choices"][0]["logprobs"]["content"]
    assert len(entries) == 4
    for entry in entries:
        assert len(entry["top_logprobs"]) == 3
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"]
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
    streamed = await client.chat(logprobs=True, top_logprobs=3, temperature=0, stream=True)
    pieces = [e["choices"][0]["logprobs"] for e in streamed.events()[:-1] if e["choices"][0]["logprobs"]]
    assert [entry for piece in pieces for entry in piece["content"]] == entries


async def test_prompt_logprobs_start_with_null(client):
    body = (await client.chat(prompt_logprobs=1, return_token_ids=True)).json()
    assert body["prompt_logprobs"][0] is None
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"] == len(body["prompt_token_ids"])
    assert str(body["prompt_token_ids"][1]) in body["prompt_logprobs"][1]


async def test_token_ids_are_returned_when_asked(client, ids):
    (token,) = ids(" the")[:1]
    body = (await client.chat(allowed_token_ids=[token], return_token_ids=True, return_prompt_text=True)).json()
    assert body["choices"][0]["token_ids"] == [token] * 4
    assert len(body["prompt_token_ids"]) == body["usage"]["prompt_tokens"]
    assert "hello" in body["prompt_text"]
    events = (await client.chat(allowed_token_ids=[token], return_token_ids=True, stream=True)).events()
    assert events[0]["choices"][0]["prompt_token_ids"] == body["prompt_token_ids"]
    assert [one for e in events[:-1] for one in e["choices"][0].get("token_ids", [])] == [token] * 4


async def test_continuous_usage_runs_on_every_chunk(client):
    events = (await client.chat(stream=True, stream_options={"continuous_usage_stats": True})).events()
    counts = [e["usage"]["completion_tokens"] for e in events[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 4


async def test_usage_can_be_forced_on_every_stream(serve):
    events = (await serve(chat={"enable_force_include_usage": True}).chat(stream=True)).events()
    assert events[-2]["usage"]["completion_tokens"] == 4


async def test_stream_interval_merges_tokens(client):
    one = await client.chat(stream=True, max_tokens=9, ignore_eos=True)
    four = await client.chat(stream=True, max_tokens=9, ignore_eos=True, stream_interval=4)
    assert len(four.writes) < len(one.writes)
    assert text_of(four.events()) == text_of(one.events())


async def test_second_identical_prompt_is_cached(client):
    text = "the quick brown fox jumps over the lazy dog " * 20
    first = (await client.chat(text)).json()["usage"]
    second = (await client.chat(text)).json()["usage"]
    assert second["prompt_tokens_details"]["cached_tokens"] >= 16
    assert second["prompt_tokens_details"]["cached_tokens"] < second["prompt_tokens"]
    salted = (await client.chat(text, cache_salt="mine")).json()["usage"]
    assert salted["prompt_tokens_details"]["cached_tokens"] == 0
    assert first["prompt_tokens"] == second["prompt_tokens"]


async def test_same_seed_gives_the_same_answer(client):
    fields = {"temperature": 2.0, "top_k": 0, "top_p": 1.0, "max_tokens": 24, "seed": 7, "ignore_eos": True}
    one, two = await asyncio.gather(client.chat(**fields), client.chat(**fields))
    other = await client.chat(**{**fields, "seed": 8})
    assert one.json()["choices"] == two.json()["choices"]
    assert one.json()["choices"] != other.json()["choices"]


async def test_logit_bias_and_bad_words_steer(client, state, ids):
    token = ids(" the")[0]
    body = (await client.chat(logit_bias={str(token): 100}, temperature=0)).json()
    assert body["choices"][0]["message"]["content"] == " the the the the"
    body = (await client.chat(logit_bias={str(token): 100}, bad_words=["the"], temperature=0)).json()
    assert "the" not in body["choices"][0]["message"]["content"].split()


async def test_developer_role_and_template_variables_reach_the_template(client):
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}]
    body = (await client.chat(messages=messages, return_prompt_text=True, chat_template_kwargs={"x": 1})).json()
    assert "be brief" in body["prompt_text"]


async def test_last_message_can_be_continued(client):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The answer is"}]
    body = (await client.chat(messages=messages, continue_final_message=True, return_prompt_text=True)).json()
    assert body["prompt_text"].endswith("The answer is")


async def test_disconnect_frees_the_row(client, state):
    call = client.call("POST", "/v1/chat/completions", {**ask("hi"), "max_tokens": 4000, "ignore_eos": True})
    call.start()
    await asyncio.sleep(0.1)
    call.leave()
    await call.finish()
    held = await quiet(state)
    assert held["routes"] == 0
    assert client.state.places.taken == 0


async def test_disconnect_of_a_stream_frees_the_row(client, state):
    fields = {**ask("hi"), "max_tokens": 4000, "ignore_eos": True, "stream": True}
    call = client.call("POST", "/v1/chat/completions", fields).start()
    await call.wrote.wait()
    call.leave()
    await call.finish()
    assert (await quiet(state))["routes"] == 0
    assert client.state.places.taken == 0
    assert not client.state.live


async def test_slow_reader_gets_everything_in_merged_frames(client):
    call = client.call(
        "POST", "/v1/chat/completions", {**ask("hi"), "max_tokens": 64, "ignore_eos": True, "stream": True}
    )
    call.start()
    await call.wrote.wait()
    call.reading.clear()
    await asyncio.sleep(0.3)
    neighbour = await client.chat(max_tokens=8)
    assert neighbour.status == 200
    call.reading.set()
    await call.finish()
    whole = (await client.chat("hi", max_tokens=64, ignore_eos=True)).json()
    assert text_of(call.events()) == whole["choices"][0]["message"]["content"]
    assert len(call.writes) < 40


async def test_stalled_reader_is_cut_off(serve, state):
    client = serve(limits={"stream_stall_timeout": 0.1})
    call = client.call(
        "POST", "/v1/chat/completions", {**ask("hi"), "max_tokens": 2000, "ignore_eos": True, "stream": True}
    )
    call.start()
    await call.wrote.wait()
    call.reading.clear()
    await call.finish()
    assert call.aborted
    assert not call.complete
    assert (await quiet(state))["routes"] == 0


async def test_reader_that_falls_behind_the_buffer_is_cut_off(serve, state):
    client = serve(limits={"stream_buffer_bytes": 4096})
    letter = (await client.post("/tokenize", {"prompt": "a", "add_special_tokens": False})).json()["tokens"]
    fields = {**ask("hi"), "max_tokens": 4000, "allowed_token_ids": letter}  # every token has text
    call = client.call("POST", "/v1/chat/completions", {**fields, "stream": True})
    call.start()
    await call.wrote.wait()
    call.reading.clear()
    await call.finish()
    assert call.aborted
    assert (await quiet(state))["routes"] == 0


async def test_abort_requests_ends_an_answer(client):
    fields = {**ask("hi"), "max_tokens": 4000, "ignore_eos": True, "request_id": "mine"}
    call = client.call("POST", "/v1/chat/completions", fields).start()
    await until(lambda: client.state.live)
    assert (await client.post("/abort_requests", {"request_ids": ["chatcmpl-mine", "unknown"]})).status == 200
    await call.finish()
    assert call.json()["choices"][0]["finish_reason"] == "abort"


async def test_keep_alive_comments_fill_silence(serve):
    client = serve(server={"sse_keep_alive_interval": 0.02})
    call = client.call("POST", "/v1/chat/completions", {**ask("hi " * 1500), "max_tokens": 1, "stream": True})
    await call.finish()
    assert b": keep-alive\n\n" in call.writes
    assert call.writes[-1].endswith(b"data: [DONE]\n\n")


def ask(text):
    return {"messages": [{"role": "user", "content": text}]}


async def test_nothing_is_held_when_all_have_left(client, state):
    await client.chat(stream=True)
    await quiet(state)
    held = client.state.ledger()
    for name in ("exchanges", "places", "body_bytes", "engine_streams", "engine_routes"):
        assert held[name] == 0
    assert client.state.places.tokens == 0
    assert client.state.places.requests == 0
    assert not client.state.live
