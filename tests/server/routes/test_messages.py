"""/v1/messages through the in-memory client: bodies, exact events, fields, refusals, disconnects."""

from __future__ import annotations

import asyncio
import dataclasses
import random

import orjson
import pytest

from server.output.parser_choice import choose_parsers
from tests.server.conftest import quiet
from tests.server.live import named_events, picture, without_end

pytestmark = pytest.mark.asyncio(loop_scope="session")

HELLO = {"max_tokens": 6, "temperature": 0, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def endless(client):
    without_end(client)
    return client


def prompt_tokens(body):
    return body["usage"]["input_tokens"] + body["usage"]["cache_read_input_tokens"]


async def ask(client, **fields):
    return await client.post("/v1/messages", {**HELLO, **fields})


async def test_answer_has_every_field_of_the_contract(endless):
    reply = await ask(endless)
    body = reply.json()
    assert reply.status == 200
    assert body["id"] == "msg_" + reply.reply_headers["x-request-id"]
    assert reply.reply_headers["request-id"] == reply.reply_headers["x-request-id"]
    assert list(body) == ["id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"]
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", "omniloop")
    (block,) = body["content"]
    assert block["type"] == "text"
    assert block["text"]
    assert (body["stop_reason"], body["stop_sequence"]) == ("max_tokens", None)
    assert body["usage"]["output_tokens"] == 6
    assert body["usage"]["cache_creation_input_tokens"] == 0


async def test_events_are_exactly_these_bytes(endless):
    whole = (await ask(endless)).json()
    reply = await ask(endless, stream=True)
    assert reply.reply_headers["content-type"] == "text/event-stream; charset=utf-8"
    events = named_events(reply.content)
    name = "msg_" + reply.reply_headers["x-request-id"]
    usage = events[0][1]["message"]["usage"]
    assert list(usage) == list(whole["usage"])
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == prompt_tokens(whole)
    assert usage["output_tokens"] == 1
    start = {
        "type": "message_start",
        "message": {
            "id": name,
            "type": "message",
            "role": "assistant",
            "model": "omniloop",
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        },
    }
    deltas = [data["delta"]["text"] for event, data in events if event == "content_block_delta"]
    assert "".join(deltas) == whole["content"][0]["text"]
    expected = b"event: message_start\ndata: " + orjson.dumps(start) + b"\n\n"
    expected += b'event: content_block_start\ndata: {"type":"content_block_start","index":0,'
    expected += b'"content_block":{"type":"text","text":""}}\n\n'
    for text in deltas:
        expected += b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
        expected += b'"delta":{"type":"text_delta","text":' + orjson.dumps(text) + b"}}\n\n"
    expected += b'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
    expected += b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"max_tokens",'
    expected += b'"stop_sequence":null},"usage":' + orjson.dumps({**usage, "output_tokens": 6}) + b"}\n\n"
    expected += b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    assert reply.content == expected
    assert len(reply.writes) <= 6
    assert b"[DONE]" not in reply.content


async def test_what_the_cache_gave_is_counted_apart(serve):
    client = serve()
    long = [{"role": "user", "content": "a story about the river " * 20}]
    first = (await ask(client, messages=long, cache_salt="apart")).json()["usage"]
    again = (await ask(client, messages=long, cache_salt="apart")).json()["usage"]
    assert first["cache_read_input_tokens"] == 0
    assert again["cache_read_input_tokens"] >= 16
    assert again["input_tokens"] + again["cache_read_input_tokens"] == first["input_tokens"]
    other = (await ask(client, messages=long, cache_salt="elsewhere")).json()["usage"]
    assert other["cache_read_input_tokens"] == 0
    counted = await client.post("/v1/messages/count_tokens", {"messages": long})
    assert counted.json() == {"input_tokens": first["input_tokens"]}


async def test_stop_sequence_ends_the_answer_and_is_named(endless):
    text = (await ask(endless, max_tokens=24)).json()["content"][0]["text"]
    stop = text[5:8]
    body = (await ask(endless, max_tokens=24, stop_sequences=["\u0000never", stop])).json()
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", stop)
    assert body["content"][0]["text"] == text[: text.index(stop)]
    events = named_events((await ask(endless, max_tokens=24, stop_sequences=[stop], stream=True)).content)
    assert events[-2][1]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": stop}


async def first_token(client):
    reply = await client.chat("hello", temperature=0, max_tokens=1, return_token_ids=True)
    return reply.json()["choices"][0]["token_ids"][0]


async def test_end_of_turn_leaves_one_empty_text_block(endless):
    vocabulary = endless.state.vocabulary
    endless.state.vocabulary = dataclasses.replace(vocabulary, eos=(await first_token(endless),))
    body = (await ask(endless)).json()
    assert body["content"] == [{"type": "text", "text": ""}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    assert body["usage"]["output_tokens"] == 1
    events = named_events((await ask(endless, stream=True)).content)
    assert [event for event, _ in events] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[-2][1]["delta"]["stop_reason"] == "end_turn"


@pytest.fixture
def submitted(client, monkeypatch):
    """A list of the requests that the engine gets."""
    seen = []
    submit = client.state.engine.submit
    monkeypatch.setattr(client.state.engine, "submit", lambda request: (seen.append(request), submit(request))[1])
    return seen


async def test_max_tokens_is_capped_by_the_context_and_not_refused(client, submitted):
    call = client.call("POST", "/v1/messages", {**HELLO, "max_tokens": 2**40, "stream": True}).start()
    await call.wrote.wait()
    call.leave()
    await call.finish()
    (request,) = submitted
    assert request.sampling.max_tokens == client.state.engine.max_model_len - len(request.prompt_token_ids)


async def test_sampling_fields_reach_the_engine(client, submitted):
    numbers = {"top_n_sigma": 1.5, "xtc_probability": 0.5, "xtc_threshold": 0.25, "dry_multiplier": 0.5}
    numbers |= {"dry_base": 1.5, "dry_allowed_length": 3, "dry_penalty_last_n": 64}
    breakers = {"dry_sequence_breakers": ["the"]}
    await ask(client, max_tokens=3, temperature=0.5, top_p=0.25, top_k=7, **numbers, **breakers)
    params = submitted[0].sampling
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (3, 0.5, 0.25, 7)
    assert {name: getattr(params, name) for name in numbers} == numbers
    assert params.dry_breakers == client.state.vocabulary.holding(("the",)) != bytes(len(params.dry_breakers))


async def test_prefill_is_continued_and_not_repeated(endless):
    head = "Once, on a Tuesday, 17"  # a text that no weights would generate
    prefilled = [*HELLO["messages"], {"role": "assistant", "content": head}]
    reply = (await ask(endless, messages=prefilled, max_tokens=8)).json()
    assert not reply["content"][0]["text"].startswith(head)
    plain = (await endless.post("/v1/messages/count_tokens", {"messages": HELLO["messages"]})).json()["input_tokens"]
    more = (await endless.post("/v1/messages/count_tokens", {"messages": prefilled})).json()["input_tokens"]
    assert more == plain + len(endless.state.tokenizer.encode(head))  # no end mark, no new header


async def test_pictures_count_and_may_be_large(client):
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": picture()}}
    content = [{"type": "text", "text": "hello"}, block]
    body = {**HELLO, "messages": [{"role": "user", "content": content}]}
    reply = await client.post("/v1/messages", body)
    assert reply.status == 200, reply.content
    usage = reply.json()["usage"]
    counted = (await client.post("/v1/messages/count_tokens", {"messages": body["messages"]})).json()
    assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    plain = (await client.post("/v1/messages/count_tokens", {"messages": HELLO["messages"]})).json()
    assert counted["input_tokens"] >= plain["input_tokens"] + 4


async def test_a_large_body_goes_through_the_pool(client):
    words = [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}, "pad": "p" * 300_000}]
    reply = await ask(client, messages=[{"role": "user", "content": words}])
    assert reply.status == 200


async def test_unknown_fields_and_betas_are_ignored(client):
    reply = await client.post(
        "/v1/messages?beta=true",
        {
            **HELLO,
            "system": [{"type": "text", "text": "short", "cache_control": {"type": "ephemeral"}}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "x", "citations": {"enabled": True}}]}],
            "metadata": {"user_id": "u"},
            "context_management": {"edits": []},
            "service_tier": "auto",
            "container": None,
        },
        headers={"anthropic-version": "2023-06-01", "anthropic-beta": "a,b"},
    )
    assert reply.status == 200


def block(value):
    return {"messages": [{"role": "user", "content": [value]}]}


BAD = [
    ({"max_tokens": 0}, "max_tokens: got 0"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens: got a string; must be an integer"),
    ({"messages": []}, "messages: is empty"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: got 'tool'; must be user"),
    ({"messages": [{"role": 5, "content": "x"}]}, "messages[0].role: got an integer; must be user"),
    ({"output_config": {"format": "json"}}, "output_config.format: got a string; must be an object of the type"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type: got text; must be json_schema"),
    ({"messages": [{"role": "user"}]}, "messages[0].content: got nothing; must be a string or a list of blocks"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "content[0]: got an object without a type; must be"),
    ({"messages": [{"role": "user", "content": [{"type": "sound"}]}]}, "messages[0].content[0].type: 'sound'"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
        "messages[0].content[0].text: got an integer; must be",
    ),
    (block({"type": "document", "source": {"type": "base64"}}), "messages[0].content[0].source.type: only text and"),
    (block({"type": "image", "source": {"type": "file", "file_id": "f"}}), "source.type: got 'file'; must be base64"),
    (block({"type": "image", "source": {"type": "base64", "media_type": "text/html"}}), "media_type: got 'text/html'"),
    (block({"type": "image"}), "messages[0].content[0].source: got nothing; must be"),
    (block({"type": "tool_result"}), "messages[0].content[0].tool_use_id: got nothing; must be a string"),
    ({"system": [{"type": "image"}]}, "system[0].type: got 'image'; must be text"),
    ({"metadata": 5}, "metadata"),
    ({"temperature": 2.5}, "temperature: got 2.5"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"stop_sequences": [""]}, "stop_sequences[0]: got 0 bytes; must be a text of 1 to 256 bytes"),
    ({"stop_sequences": ["x"] * 33}, "stop_sequences: got 33 strings"),
    ({"thread": {"type": "create"}}, "thread: this server keeps no conversations of messages"),
    ({"thinking": {"type": "maybe"}}, "thinking.type: got maybe"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens: got 0"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort: got huge"),
    ({"tool_choice": {"type": "any"}}, "tool_choice: asks for a call, but there are no tools"),
    ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "disable_parallel_tool_use: got 1; must be"),
    ({"tool_choice": {"type": "sometimes"}}, "tool_choice.type: got sometimes"),
    ({"tools": [{"name": "f", "input_schema": 3}]}, "tools[0].input_schema: got an integer; must be"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name: got null; must be a string"),
    ({"cache_salt": "a/b"}, "cache_salt"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
]


@pytest.mark.parametrize(("fields", "text"), BAD, ids=lambda value: str(value)[:40])
async def test_bad_fields_are_named_in_the_protocols_own_body(client, fields, text):
    reply = await ask(client, **fields)
    body = reply.json()
    assert reply.status == 400, body
    assert set(body) == {"type", "error", "request_id"}
    assert set(body["error"]) == {"type", "message", "details"}
    assert body["error"]["details"]["error_code"]
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["request_id"] == reply.reply_headers["x-request-id"]
    assert text in body["error"]["message"]


async def test_faults_of_the_renderer_name_the_clients_own_fields(client):
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y"},
        {"role": "user", "content": [{"type": "text", "text": "z"}, {"type": "image", "source": source}]},
    ]
    reply = await ask(client, system="first", messages=messages)
    assert reply.json()["error"]["message"].startswith("messages[2].content[1]")
    reply = await ask(client, system="first", messages=[{"role": "user", "content": "see <|IMAGE|>"}])
    assert reply.json()["error"]["message"].startswith("messages[0].content contains")


async def test_tools_of_a_model_without_a_known_format_are_refused(serve):
    client = serve()
    client.state.parsers = choose_parsers(client.state.tokenizer, [], "")
    reply = await ask(client, tools=[{"name": "f", "input_schema": {"type": "object"}}])
    assert (reply.status, reply.json()["error"]["type"]) == (501, "api_error")
    assert reply.json()["error"]["message"].startswith("tools")


async def test_over_long_prompt_is_refused_in_the_words_that_clients_match(client):
    most = client.state.engine.max_model_len
    reply = await ask(client, messages=[{"role": "user", "content": "word " * most}])
    message = reply.json()["error"]["message"]
    count = int(message.split()[4])
    assert count > most
    assert message == f"prompt is too long: {count} tokens > {most} maximum"
    huge = await ask(client, messages=[{"role": "user", "content": "word " * most * 20}])
    assert huge.json()["error"]["message"].startswith("prompt is too long: ")
    assert huge.status == reply.status == 400


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/tokenize"])
async def test_tokens_are_counted_that_no_answer_has_room_for(client, path):
    few, most = 20, client.state.engine.max_model_len + 1000

    async def counted(words):
        body = (await client.post(path, {"messages": [{"role": "user", "content": "word " * words}]})).json()
        return body["input_tokens"] if "input_tokens" in body else body["count"]

    assert await counted(most) - await counted(few) == most - few
    assert (await ask(client, messages=[{"role": "user", "content": "word " * most}])).status == 400


async def test_statuses_have_the_protocols_types(client, serve):
    assert (await ask(client, model="other")).json()["error"]["type"] == "not_found_error"
    wrong = await client.post("/v1/messages", body=b"{}", headers={"content-type": "text/plain"})
    assert (wrong.status, wrong.json()["error"]["type"]) == (415, "invalid_request_error")
    assert (await client.get("/v1/messages")).json()["error"]["type"] == "invalid_request_error"
    assert (await client.post("/v1/messages/batches", {})).json()["error"]["type"] == "not_found_error"
    guarded = serve(server={"api_key": ("secret",)})
    refused = await ask(guarded)
    assert (refused.status, refused.json()["error"]["type"]) == (401, "authentication_error")
    guarded.headers["x-api-key"] = "secret"
    assert (await ask(guarded)).status == 200
    small = serve(limits={"max_request_bytes": 1024})
    large = await ask(small, system="x" * 2000)
    assert (large.status, large.json()["error"]["type"]) == (413, "request_too_large")
    busy = serve()
    busy.state.places.limit = 0
    full = await ask(busy)
    assert (full.status, full.json()["error"]["type"]) == (429, "rate_limit_error")
    assert full.reply_headers["retry-after"]
    starting = serve(phase="starting")
    early = await ask(starting)
    assert (early.status, early.json()["error"]["type"]) == (503, "overloaded_error")


async def test_fault_after_the_first_byte_is_an_error_event_and_the_last(serve):
    client = serve(limits={"request_timeout": 1.0})  # also a slow machine has its first token by then
    without_end(client)
    reply = await ask(client, max_tokens=4000, stream=True)
    events = named_events(reply.content)
    assert events[0][0] == "message_start"
    assert events[-1][0] == "error"
    assert events[-1][1]["error"]["type"] == "timeout_error"
    assert events[-1][1]["request_id"] == reply.reply_headers["x-request-id"]
    assert b"[DONE]" not in reply.content


async def test_leaving_frees_the_row(endless):
    call = endless.call("POST", "/v1/messages", {**HELLO, "max_tokens": 4000, "stream": True}).start()
    await call.wrote.wait()
    call.leave()
    await call.finish()
    assert not call.complete
    held = await quiet(endless.state)
    assert held["routes"] == 0
    assert endless.state.places.taken == 0


async def test_slow_reader_gets_one_merged_delta(endless):
    whole = (await ask(endless, max_tokens=40)).json()["content"][0]["text"]
    call = endless.call("POST", "/v1/messages", {**HELLO, "max_tokens": 40, "stream": True}).start()
    await call.wrote.wait()
    call.reading.clear()
    await quiet(endless.state)
    call.reading.set()
    await call.finish()
    events = named_events(call.content)
    assert "".join(d["delta"]["text"] for e, d in events if e == "content_block_delta") == whole
    assert len(call.writes) < 40


async def test_silence_before_the_first_token_is_filled_with_comments(serve):
    client = serve(server={"sse_keep_alive_interval": 0.001})
    reply = await ask(client, messages=[{"role": "user", "content": "word " * 600}], stream=True)
    assert reply.content.startswith(b": keep-alive\n\n")
    assert named_events(reply.content)[0][0] == "message_start"
    assert named_events(reply.content)[-1][0] == "message_stop"


async def test_streams_equal_whole_answers_for_random_requests(serve):
    client = serve()
    random.seed(7)
    words = ["the", "river", "näht", "東京", "🎈", "and", "then", "a", "story", "of", "x", "=", "{1}", "\n"]
    for _ in range(40):
        text = " ".join(random.choices(words, k=random.randint(1, 12)))
        fields = {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": random.randint(1, 24),
            "stop_sequences": random.sample(["e", "th", " ", "\n", "ä"], k=random.randint(0, 2)),
            "top_k": random.choice([0, 1, 5]),
        }
        fields["temperature"] = 0 if fields["top_k"] != 1 else 1.0
        whole, streamed = await asyncio.gather(ask(client, **fields), ask(client, **fields, stream=True))
        body, events = whole.json(), named_events(streamed.content)
        text = "".join(d["delta"]["text"] for e, d in events if e == "content_block_delta")
        assert text == body["content"][0]["text"]
        assert events[-2][1]["delta"] == {key: body[key] for key in ("stop_reason", "stop_sequence")}
        assert events[-2][1]["usage"]["output_tokens"] == body["usage"]["output_tokens"]


async def test_parts_of_system_texts_and_of_results_are_counted(client):
    texts = [{"type": "text", "text": "a"}] * 1025
    reply = await ask(client, system=texts)
    assert (reply.status, reply.error["message"]) == (400, "system has 1025 parts; at most 1024.")
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": texts}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [call]}]
    turns.append({"role": "user", "content": [{**result, "content": texts[1:]}, result]})
    reply = await client.post("/v1/messages/count_tokens", {"messages": turns})
    assert (reply.status, reply.error["message"]) == (400, "messages[2].content[1] has 1025 parts; at most 1024.")
    output = [{"type": "input_text", "text": "a"}] * 1025
    items = [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]
    items.append({"type": "function_call_output", "call_id": "c", "output": output})
    reply = await client.post("/v1/responses", {"input": items})
    assert (reply.status, reply.error["message"]) == (400, "input[1] has 1025 parts; at most 1024.")
