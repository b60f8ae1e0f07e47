"""/v1/responses through the in-memory client: objects, exact events, fields, refusals, stored responses."""

from __future__ import annotations

import asyncio
import dataclasses
import random

import orjson
import pytest

from tests.server.conftest import quiet
from tests.server.live import named_events, use_template, without_end

pytestmark = pytest.mark.asyncio(loop_scope="session")

HELLO = {"input": "hello", "max_output_tokens": 6, "temperature": 0}


@pytest.fixture
def endless(client):
    without_end(client)
    return client


async def ask(client, **fields):
    return await client.post("/v1/responses", {**HELLO, **fields})


def text_of(body):
    return body["output"][0]["content"][0]["text"]


async def test_response_has_every_field_of_the_contract(endless):
    reply = await ask(endless, metadata={"a": "b"}, user="u", prompt_cache_key="k", truncation="auto", top_p=0.5)
    body = reply.json()
    assert reply.status == 200, body
    assert body["id"] == "resp_" + reply.reply_headers["x-request-id"]
    assert body["object"] == "response"
    assert isinstance(body["created_at"], int)
    (item,) = body["output"]
    assert item["id"].startswith("msg_")
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    (part,) = item["content"]
    assert part == {"type": "output_text", "text": part["text"], "annotations": [], "logprobs": []}
    assert part["text"]
    usage = body["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_tokens"] == 6
    assert set(usage["input_tokens_details"]) == {"cached_tokens", "cache_write_tokens"}
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
    expected = {
        "status": "incomplete",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"},
        "instructions": None,
        "model": "omniloop",
        "parallel_tool_calls": True,
        "temperature": 0.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 0.5,
        "max_output_tokens": 6,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "text": {"format": {"type": "text"}},
        "truncation": "auto",
        "metadata": {"a": "b"},
        "user": "u",
        "prompt_cache_key": "k",
        "store": True,
        "background": False,
        "top_logprobs": 0,
        "service_tier": None,
    }
    assert {key: body[key] for key in expected} == expected
    assert set(body) == {*expected, "id", "object", "created_at", "output", "usage"}


async def test_echo_follows_the_request(client):
    function = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    fields = {
        "instructions": "be brief",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "tools": [function],
        "tool_choice": "none",
        "store": False,
    }
    body = (await ask(client, **fields)).json()
    assert body["tools"] == [{**function, "strict": True}]
    del fields["tools"]
    assert {key: body[key] for key in fields} == fields


def event(number, kind, **fields):
    data = orjson.dumps({"type": kind, "sequence_number": number, **fields})
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


async def test_events_are_exactly_these_bytes(endless):
    reply = await ask(endless, stream=True)
    whole = (await ask(endless)).json()
    assert reply.reply_headers["content-type"] == "text/event-stream; charset=utf-8"
    events = named_events(reply.content)
    deltas = [data["delta"] for kind, data in events if kind == "response.output_text.delta"]
    text = text_of(whole)
    assert "".join(deltas) == text
    last = events[-1][1]["response"]
    item = last["output"][0]
    place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
    begun = {**last, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    opened = {**item, "status": "in_progress", "content": []}
    expected = event(0, "response.created", response=begun) + event(1, "response.in_progress", response=begun)
    expected += event(2, "response.output_item.added", output_index=0, item=opened)
    expected += event(3, "response.content_part.added", **place, part=part)
    for at, delta in enumerate(deltas, 4):
        head = {"type": "response.output_text.delta", **place, "delta": delta, "logprobs": [], "sequence_number": at}
        expected += b"event: response.output_text.delta\ndata: " + orjson.dumps(head) + b"\n\n"
    at = 4 + len(deltas)
    expected += event(at, "response.output_text.done", **place, text=text, logprobs=[])
    expected += event(at + 1, "response.content_part.done", **place, part={**part, "text": text})
    expected += event(at + 2, "response.output_item.done", output_index=0, item=item)
    expected += event(at + 3, "response.incomplete", response=last)
    assert reply.content == expected
    same = {key: whole[key] for key in whole if key not in ("id", "created_at", "output", "usage")}
    assert {key: last[key] for key in same} == same
    assert len(reply.writes) <= 6
    assert (await endless.get(f"/v1/responses/{last['id']}")).json() == last


async def test_an_answer_that_ends_at_once_has_all_events_and_no_delta(endless):
    first = await endless.chat("hello", temperature=0, max_tokens=1, return_token_ids=True)
    token = first.json()["choices"][0]["token_ids"][0]
    endless.state.vocabulary = dataclasses.replace(endless.state.vocabulary, eos=(token,))
    body = (await ask(endless)).json()
    assert (body["status"], body["incomplete_details"]) == ("completed", None)
    assert (body["output"][0]["status"], text_of(body)) == ("completed", "")
    events = named_events((await ask(endless, stream=True)).content)
    assert [kind.removeprefix("response.") for kind, _ in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [data["sequence_number"] for _, data in events] == list(range(8))


async def test_logprobs_are_given_when_included(endless):
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    body = (await ask(endless, **fields)).json()
    entries = body["output"][0]["content"][0]["logprobs"]
    assert len(entries) == 6
    assert "".join(entry["token"] for entry in entries) == text_of(body)
    assert all(set(entry) == {"token", "logprob", "bytes", "top_logprobs"} for entry in entries)
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    events = named_events((await ask(endless, **fields, stream=True)).content)
    streamed = [entry for kind, data in events if kind.endswith("text.delta") for entry in data["logprobs"]]
    done = next(data for kind, data in events if kind.endswith("text.done"))
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in entries]
    assert done["logprobs"] == streamed
    none = (await ask(endless, include=["message.output_text.logprobs"])).json()
    assert none["output"][0]["content"][0]["logprobs"][0]["top_logprobs"] == []


async def test_sampling_fields_reach_the_engine(client, monkeypatch):
    seen = []
    submit = client.state.engine.submit
    monkeypatch.setattr(client.state.engine, "submit", lambda request: (seen.append(request), submit(request))[1])
    await ask(client, max_output_tokens=3, temperature=0.5, top_p=0.25, top_k=7)
    params = seen[0].sampling
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (3, 0.5, 0.25, 7)
    numbers = {"min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5, "seed": 11}
    numbers |= {"top_n_sigma": 1.5, "xtc_probability": 0.5, "xtc_threshold": 0.25, "dry_multiplier": 0.5}
    numbers |= {"dry_base": 1.5, "dry_allowed_length": 3, "dry_penalty_last_n": 64}
    breakers = {"dry_sequence_breakers": ["the"]}
    await ask(
        client, **numbers, **breakers, ignore_eos=True, stop_token_ids=[7], logit_bias={"3": 5}, cache_salt="tenant"
    )
    params = seen[1].sampling
    assert {name: getattr(params, name) for name in numbers} == numbers
    assert (params.ignore_eos, params.stop_token_ids, params.logit_bias) == (True, (7,), ((3, 5.0),))
    assert params.dry_breakers == client.state.vocabulary.holding(("the",)) != bytes(len(params.dry_breakers))
    assert seen[1].cache_salt != seen[0].cache_salt


async def test_stop_strings_and_fields_of_chat_have_effect(client):
    """Fields that OpenAI's API lacks and vLLM accepts."""

    async def said(**fields):
        reply = (await ask(client, max_output_tokens=8, ignore_eos=True, **fields)).json()
        return reply["output"][0]["content"][0]["text"]

    (token,) = client.state.tokenizer.encode(" the")[:1]
    the = {"logit_bias": {str(token): 100}, "stop": [" the the"]}
    assert await said(**the) == ""
    assert await said(**the, include_stop_str_in_output=True) == " the the"
    assert await said(structured_outputs={"choice": ["yes", "no"]}) in ("yes", "no")
    use_template(client, "{{ enable_thinking }} {{ messages[-1].content }}")
    reply = await ask(client, chat_template_kwargs={"enable_thinking": "x" * 40}, reasoning={"effort": "low"})
    shorter = await ask(client, chat_template_kwargs={"enable_thinking": "x"}, reasoning={"effort": "low"})
    assert reply.json()["usage"]["input_tokens"] > shorter.json()["usage"]["input_tokens"]


BAD = [
    ({"input": []}, "input", "input: is empty"),
    ({"input": 5}, "input", "input: got an integer"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "input[0].role: got 'tool'"),
    ({"input": [{"type": "song"}]}, "input[0].type", "input[0].type: got 'song'; known items are"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        "input[0].content[0].text",
        "got nothing; must be a string",
    ),
    ({"input": [{"role": "user", "content": [{"type": "x"}]}]}, "input[0].content[0].type", "'x'"),
    ({"input": [{"role": "developer", "content": "x"}]}, "input", "holds no message"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id", "names no stored item"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": {}}]}, "input[0].call_id", "got nothing; must"),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens: got 0"),
    ({"temperature": 3}, "temperature", "temperature: got 3"),
    ({"top_p": 0}, "top_p", "top_p"),
    ({"top_k": -2}, "top_k", "top_k"),
    ({"cache_salt": "a/b"}, "cache_salt", "1 to 128 characters"),
    (
        {"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}},
        "structured_outputs",
        "not together with text.format",
    ),
    ({"top_logprobs": 2}, "top_logprobs", "needs message.output_text.logprobs"),
    ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs", "0 to 20"),
    ({"include": ["everything"]}, "include[0]", "everything; must be one of message.output_text.logprobs, "),
    ({"truncation": "some"}, "truncation", "must be one of auto, disabled"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "got huge"),
    ({"reasoning": {"summary": "huge"}}, "reasoning.summary", "got huge"),
    ({"text": {"verbosity": "huge"}}, "text.verbosity", "got huge"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "got xml"),
    ({"metadata": {"a": 1}}, "metadata[...]", "metadata"),
    ({"metadata": {"a": "x" * 513}}, "metadata", "at most 16 pairs"),
    ({"metadata": {str(at): "" for at in range(17)}}, "metadata", "at most 16 pairs"),
    ({"user": "x" * 513}, "user", "at most 512"),
    ({"prompt_cache_key": "x" * 513}, "prompt_cache_key", "at most 512"),
    ({"input": [{"content": "x"}]}, "input[0].role", "got nothing; must be user"),
    ({"tool_choice": {"type": 5}}, "tool_choice.type", "got an integer; must be a string"),
    ({"tool_choice": "maybe"}, "tool_choice", "got maybe"),
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"tools": [{"name": "f"}]}, "tools[0].type", "got nothing; must be a string"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "got null; must be a string"),
    ({"tools": [{"type": "namespace", "name": " ", "tools": []}]}, "tools[0].name", "got  ; must be a string"),
    ({"background": True, "store": False}, "background", "needs store"),
]


@pytest.mark.parametrize(("fields", "param", "text"), BAD, ids=lambda value: str(value)[:40])
async def test_bad_fields_are_named(client, fields, param, text):
    reply = await ask(client, **fields)
    assert reply.status == 400, reply.content
    assert reply.error["param"] == param
    assert text in reply.error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ],
)
async def test_what_cannot_be_done_yet_is_refused_by_name(client, fields, param):
    reply = await ask(client, **fields)
    assert reply.status == 501
    assert reply.error["param"] == param


async def test_over_long_input_is_refused_or_cut_as_asked(client):
    most = client.state.engine.max_model_len
    old = {"role": "user", "content": "word " * (most - 200)}
    items = [old, {"role": "assistant", "content": "yes " * 300}, {"role": "user", "content": "hello"}]
    reply = await ask(client, input=items, instructions="be brief")
    assert reply.error["message"].startswith(f"This model's maximum context length is {most} tokens. However, your")
    assert reply.error["param"] == "input"
    cut = await ask(client, input=items, instructions="be brief", truncation="auto")
    assert cut.status == 200
    plain = await ask(client, input="hello", instructions="be brief")
    assert cut.json()["usage"]["input_tokens"] == plain.json()["usage"]["input_tokens"]
    one = await ask(client, input=[{**old, "content": "word " * most}], truncation="auto")
    assert one.status == 400


async def test_fault_after_the_first_byte_is_a_failed_response(serve):
    client = serve(limits={"request_timeout": 1.0})  # also a slow machine has its first token by then
    without_end(client)
    reply = await ask(client, max_output_tokens=4000, stream=True)
    events = named_events(reply.content)
    assert events[0][0] == "response.created"
    kind, data = events[-1]
    assert kind == "response.failed"
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert data["response"]["status"] == "failed"
    assert data["response"]["error"]["code"] == "server_error"
    assert "--request-timeout" in data["response"]["error"]["message"]
    assert b"[DONE]" not in reply.content


async def test_aborted_answer_is_cancelled(endless):
    call = endless.call("POST", "/v1/responses", {**HELLO, "max_output_tokens": 4000, "stream": True}).start()
    await call.wrote.wait()
    name = named_events(call.content)[0][1]["response"]["id"]
    await endless.post("/abort_requests", {"request_ids": [name]})
    await call.finish()
    kind, data = named_events(call.content)[-1]
    assert (kind, data["response"]["status"]) == ("response.incomplete", "cancelled")


async def test_leaving_frees_the_row_and_stores_nothing(endless):
    call = endless.call("POST", "/v1/responses", {**HELLO, "max_output_tokens": 4000, "stream": True}).start()
    await call.wrote.wait()
    name = named_events(call.content)[0][1]["response"]["id"]
    call.leave()
    await call.finish()
    held = await quiet(endless.state)
    assert held["routes"] == 0
    assert endless.state.places.taken == 0
    assert (await endless.get(f"/v1/responses/{name}")).status == 404


async def test_slow_reader_gets_merged_deltas(endless):
    whole = (await ask(endless, max_output_tokens=40)).json()
    call = endless.call("POST", "/v1/responses", {**HELLO, "max_output_tokens": 40, "stream": True}).start()
    await call.wrote.wait()
    call.reading.clear()
    await quiet(endless.state)
    call.reading.set()
    await call.finish()
    events = named_events(call.content)
    assert "".join(data["delta"] for kind, data in events if kind.endswith("text.delta")) == text_of(whole)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert len(call.writes) < 40


async def test_silence_before_the_first_token_is_filled_with_comments(serve):
    client = serve(server={"sse_keep_alive_interval": 0.001})
    reply = await ask(client, input="mute " * 600, stream=True)  # words that no other test has cached
    assert reply.content.startswith(b": keep-alive\n\n")
    assert named_events(reply.content)[0][0] == "response.created"


async def test_streams_equal_whole_answers_for_random_requests(client):
    random.seed(11)
    words = ["the", "river", "näht", "東京", "🎈", "and", "then", "a", "story", "of", "x", "=", "{1}", "\n"]
    for _ in range(40):
        fields = {
            "input": " ".join(random.choices(words, k=random.randint(1, 12))),
            "max_output_tokens": random.randint(1, 24),
            "instructions": random.choice([None, "be brief"]),
            "include": random.choice([[], ["message.output_text.logprobs"]]),
        }
        whole, streamed = await asyncio.gather(ask(client, **fields), ask(client, **fields, stream=True))
        body, events = whole.json(), named_events(streamed.content)
        last = events[-1][1]["response"]
        text = "".join(data["delta"] for kind, data in events if kind.endswith("text.delta"))
        assert text == text_of(body) == text_of(last)
        assert (last["status"], last["incomplete_details"]) == (body["status"], body["incomplete_details"])
        assert last["usage"]["output_tokens"] == body["usage"]["output_tokens"]
        tokens = [[e["token"] for e in b["output"][0]["content"][0]["logprobs"]] for b in (body, last)]
        assert tokens[0] == tokens[1]


async def test_operators_may_show_tokens_as_ids(serve):
    client = serve(chat={"return_tokens_as_token_ids": True})
    body = (await ask(client, include=["message.output_text.logprobs"])).json()
    entry = body["output"][0]["content"][0]["logprobs"][0]
    assert entry["token"].startswith("token_id:")
