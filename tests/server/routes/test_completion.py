"""/v1/completions through the in-memory client: all forms of prompts, echo, logprobs, order."""

from __future__ import annotations

import threading

import pytest

from tests.engine.test_stall import block
from tests.server.conftest import quiet, until
from tests.server.live import GAP, use_gaps

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_answer_has_every_field_of_the_contract(client):
    body = (await client.complete()).json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    (choice,) = body["choices"]
    assert set(choice) == {"index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_logprobs"}
    assert body["usage"]["completion_tokens"] == 4


async def test_max_tokens_is_16_when_absent(client):
    body = (await client.post("/v1/completions", {"prompt": "a", "ignore_eos": True})).json()
    assert body["usage"]["completion_tokens"] == 16


async def test_choices_come_prompt_by_prompt(client, state):
    prompts = ["one", "two two", "three three three"]
    body = (await client.complete(prompts, n=2, return_token_ids=True, ignore_eos=True)).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    for choice in body["choices"]:
        assert choice["prompt_token_ids"] == state.tokenizer.encode(prompts[choice["index"] // 2], True)
    assert body["usage"]["completion_tokens"] == 24
    assert body["usage"]["prompt_tokens"] == sum(len(state.tokenizer.encode(prompt, True)) for prompt in prompts)


async def test_token_ids_are_prompts_too(client, state):
    ids = state.tokenizer.encode("hello there")
    text = (await client.complete("hello there", temperature=0)).json()["choices"][0]["text"]
    assert (await client.complete(ids, temperature=0)).json()["choices"][0]["text"] == text
    body = (await client.complete([ids, ids[:2]], temperature=0)).json()
    assert body["choices"][0]["text"] == text
    assert len(body["choices"]) == 2


async def test_echo_with_logprobs_covers_prompt_and_output(client, state):
    body = (await client.complete("hello there", echo=True, logprobs=1, temperature=0)).json()
    choice = body["choices"][0]
    logprobs = choice["logprobs"]
    count = body["usage"]["total_tokens"]
    assert choice["text"].startswith("hello there")
    assert {len(logprobs[name]) for name in logprobs} == {count}
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    for token, value, top in zip(*(logprobs[name][1:] for name in ("tokens", "token_logprobs", "top_logprobs"))):
        assert top[token] == value
    assert "".join(logprobs["tokens"]) == choice["text"]
    starts = [0]
    for token in logprobs["tokens"]:
        starts.append(starts[-1] + len(token))
    assert logprobs["text_offset"] == starts[:-1]


async def test_echo_without_output_scores_the_prompt(client):
    body = (await client.complete("hello there", echo=True, logprobs=1, max_tokens=0)).json()
    choice = body["choices"][0]
    assert choice["text"] == "hello there"
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0
    assert len(choice["logprobs"]["tokens"]) == body["usage"]["prompt_tokens"]
    assert (await client.complete("hello there", echo=True, max_tokens=0)).json()["choices"][0]["text"] == "hello there"
    assert (await client.complete("hello there", max_tokens=0)).error["param"] == "max_tokens"


async def test_stream_equals_the_whole_answer(client):
    fields = {"n": 2, "echo": True, "logprobs": 2, "max_tokens": 8, "ignore_eos": True, "seed": 3, "temperature": 1}
    whole = (await client.complete(["one", "two"], **fields)).json()
    events = (await client.complete(["one", "two"], stream=True, **fields)).events()
    assert events[-1] == "[DONE]"
    for choice in whole["choices"]:
        mine = [e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        for name in choice["logprobs"]:
            assert [entry for piece in mine for entry in piece["logprobs"][name]] == choice["logprobs"][name]


async def test_many_prompts_at_once(client):
    body = (await client.complete([[100 + at % 50] for at in range(60)], max_tokens=1)).json()
    assert len(body["choices"]) == 60


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        (None, "prompt"),
        (["a", 1], "prompt"),
        ([1, [2]], "prompt"),
        ([[1], []], "prompt[1]"),
        ("", "prompt"),
    ],
)
async def test_bad_prompts_are_refused(client, prompt, param):
    reply = await client.complete(prompt)
    assert reply.status == 400
    assert reply.error["param"] == param


@pytest.mark.parametrize("token", [-1, 4096, 1 << 31, 1 << 62])
async def test_s25_token_ids_out_of_range_are_refused(client, token):
    reply = await client.complete([5, token])
    assert reply.status == 400
    assert reply.error["reason"] == "token_id_out_of_range"
    assert reply.error["param"] == "prompt[1]"


async def test_a_suffix_is_named_not_ignored(client):
    assert (await client.complete(suffix="")).status == 200
    reply = await client.complete(suffix="x")
    assert reply.status == 501
    assert reply.error["param"] == "suffix"
    assert "no tokens for filling in the middle" in reply.error["message"]


async def test_a_gap_between_prompt_and_suffix_is_filled(client):
    use_gaps(client)
    prefix, suffix, middle = map(client.state.tokenizer.id_of, GAP)
    encode = client.state.tokenizer.encode
    reply = await client.complete("1 + 1", suffix=" = 2", return_token_ids=True)
    ids = reply.json()["choices"][0]["prompt_token_ids"]
    assert ids == [prefix, *encode("1 + 1"), suffix, *encode(" = 2"), middle]
    same = await client.complete(ids, return_token_ids=True)
    assert same.json()["choices"][0]["token_ids"] == reply.json()["choices"][0]["token_ids"]
    several = await client.complete(["1 + 1", "2 + 2"], suffix=" = 2", echo=True)
    texts = [choice["text"] for choice in several.json()["choices"]]
    assert texts[0] == "1 + 1" + reply.json()["choices"][0]["text"]
    assert texts[1].startswith("2 + 2")
    spelled = await client.complete(GAP[0] * 3, suffix=GAP[2], return_token_ids=True)
    ids = spelled.json()["choices"][0]["prompt_token_ids"]
    assert [token for token in ids if token in (prefix, suffix, middle)] == [prefix, suffix, middle]


async def test_an_answer_in_a_gap_ends_at_a_marker(client):
    use_gaps(client)
    for name in GAP:
        bias = {str(client.state.tokenizer.id_of(name)): 100}
        ended = await client.complete("a", suffix="b", logit_bias=bias, ignore_eos=False)
        choice = ended.json()["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", None)
        on = await client.complete("a", logit_bias=bias, ignore_eos=False)
        assert on.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [5, 6]}, "suffix"),
        ({"prompt": [[5], [6]]}, "suffix"),
        ({"prompt": "a", "truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
        ({"prompt": "a", "suffix": "b" * 500_000}, "suffix"),
        ({"prompt": "a " * 9000}, "prompt"),
    ],
)
async def test_a_gap_that_cannot_be_filled_is_refused(client, fields, param):
    use_gaps(client)
    reply = await client.post("/v1/completions", {"suffix": "b", "max_tokens": 1, **fields})
    assert (reply.status, reply.error["param"]) == (400, param)


async def test_what_is_known_about_gaps_is_said(client):
    assert (await client.get("/about")).json()["fill_in_the_middle"] is False
    use_gaps(client)
    assert (await client.get("/about")).json()["fill_in_the_middle"] is True


SILENT = {"prompt": "hello", "max_tokens": 4, "ignore_eos": True, "stream": True}  # with a token that has no text


@pytest.mark.parametrize(
    ("fields", "fewest", "most"),  # number of events: tokens that the loop receives together share an event
    [
        ({}, 2, 2),  # the first token opens the stream, the last one ends it
        ({"logprobs": 0}, 2, 4),
        ({"return_token_ids": True}, 2, 4),
        ({"stream_options": {"continuous_usage_stats": True}}, 2, 4),
        ({"echo": True}, 2, 2),
        ({"n": 2}, 3, 4),
    ],
)
async def test_tokens_without_text_are_streamed_too(client, state, monkeypatch, fields, fewest, most):
    """The stream opens before the fourth step ends, and no answer ends without that step."""
    await quiet(state)
    model, heard = state.engine.inspect().runtime.model, threading.Event()
    monkeypatch.setattr(model, "forward", model.forward)  # so that the patch is undone
    block(state.engine, 4, heard)
    silent = {**SILENT, "allowed_token_ids": [state.vocabulary.eos[0]]}
    call = client.call("POST", "/v1/completions", {**silent, **fields}).start()
    await until(lambda: call.writes)
    heard.set()
    events = (await call.finish()).events()[:-1]
    assert fewest <= len(events) <= most
    choices = [event["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == ("hello" if "echo" in fields else "")
    if "logprobs" in fields:
        assert sum(len(choice["logprobs"]["tokens"]) for choice in choices) == 4
    if "return_token_ids" in fields:
        assert [token for choice in choices for token in choice["token_ids"]] == [state.vocabulary.eos[0]] * 4
    if "stream_options" in fields:
        told = [event["usage"]["completion_tokens"] for event in events]
        assert told == sorted(set(told))
        assert told[-1] == 4


async def test_echo_with_named_ids_alone_covers_prompt_and_output(client):
    fields = {"echo": True, "logprob_token_ids": [5], "return_token_ids": True}
    whole = (await client.complete("hello there", **fields)).json()["choices"][0]
    assert whole["logprobs"]["text_offset"][0] == 0
    assert "".join(whole["logprobs"]["tokens"]).startswith("hello there")
    assert len(whole["logprobs"]["tokens"]) == len(whole["prompt_token_ids"]) + len(whole["token_ids"])


@pytest.mark.parametrize(("shown", "asked"), [(2, 0), (0, 2)])
async def test_echo_shows_its_own_count_of_the_prompt(client, shown, asked):
    fields = {"echo": True, "logprobs": shown, "prompt_logprobs": asked, "temperature": 0}
    choice = (await client.complete("hello there", **fields)).json()["choices"][0]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:3]] == [shown + 1] * 2
    assert [len(entry) for entry in choice["prompt_logprobs"][1:3]] == [asked + 1] * 2


async def test_bad_words_that_leave_no_allowed_id_behind_a_beginning_are_refused(client, state):
    h, i = state.tokenizer.encode("hi")
    for words, refused in ([("hhh", "ih"), True], [("hi", "hh"), True], [("hi", "ih"), False], [("hhi", "hh"), True]):
        allowed = [h] if refused and "hhh" in words else [h, i]
        fields = {"allowed_token_ids": allowed, "bad_words": list(words), "max_tokens": 12, "ignore_eos": True}
        reply = await client.complete("hello", return_token_ids=True, **fields)
        if refused:
            assert (reply.status, reply.error["param"]) == (400, "allowed_token_ids")
        else:
            assert set(reply.json()["choices"][0]["token_ids"]) <= set(allowed)
