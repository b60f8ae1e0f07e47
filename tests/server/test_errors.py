"""Refusals: every status of API.md 3.2 that exists, limits at their edges, and texts without internal details."""

from __future__ import annotations

import asyncio
import re

import pytest

from engine.engine import Engine
from server.app import make_app
from server.render.media import MediaTokens
from server.start import load
from server.state import AppState
from tests.server.asgi import Client
from tests.server.conftest import config_of, quiet, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

LEAKS = re.compile(
    r"0x[0-9a-f]{4}| object at |File \"|(?<![\w.])/(?:home|root|usr|tmp|opt|work|var)/|\.py\b|Traceback|msgspec"
)


def check_shape(reply):
    """Every refusal has the same form and no internal details."""
    assert set(reply.json()) == {"error"}
    assert set(reply.error) == {"message", "type", "param", "code", "reason"}
    assert reply.error["code"] == reply.status
    assert len(reply.error["message"]) <= 1024
    assert not LEAKS.search(reply.content.decode())
    assert reply.reply_headers["x-request-id"]


BAD_FIELDS = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 1.1}, "min_p"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 2.1}, "repetition_penalty"),
    ({"dry_multiplier": -1}, "dry_multiplier"),
    ({"dry_multiplier": 101}, "dry_multiplier"),
    ({"dry_base": 0.9}, "dry_base"),
    ({"dry_allowed_length": 0}, "dry_allowed_length"),
    ({"dry_allowed_length": 1.5}, "dry_allowed_length"),
    ({"dry_penalty_last_n": 8193}, "dry_penalty_last_n"),
    ({"dry_penalty_last_n": -2}, "dry_penalty_last_n"),
    ({"dry_sequence_breakers": "a"}, "dry_sequence_breakers"),
    ({"dry_sequence_breakers": ["a", ""]}, "dry_sequence_breakers[1]"),
    ({"dry_sequence_breakers": ["\u00e9" * 21]}, "dry_sequence_breakers[0]"),
    ({"dry_sequence_breakers": ["a"] * 33}, "dry_sequence_breakers"),
    ({"top_n_sigma": 101}, "top_n_sigma"),
    ({"top_n_sigma": "high"}, "top_n_sigma"),
    ({"xtc_probability": 1.1}, "xtc_probability"),
    ({"xtc_probability": -0.1}, "xtc_probability"),
    ({"xtc_threshold": 1.1}, "xtc_threshold"),
    ({"seed": "x"}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"min_tokens": 5}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"stop": ["a"] * 33}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": "x" * 257}, "stop[0]"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": {str(k): 1 for k in range(1025)}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [1 << 40]}, "allowed_token_ids[0]"),
    ({"bad_words": [" "]}, "bad_words[0]"),
    ({"bad_words": ["a"] * 65}, "bad_words"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"logprob_token_ids": [1] * 129}, "logprob_token_ids"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream_options": {"include_usage": 1}, "stream": True}, "stream_options.include_usage"),
    ({"stream_interval": 0}, "stream_interval"),
    ({"priority": 1}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "a/b"}, "cache_salt"),
    ({"cache_salt": "x" * 129}, "cache_salt"),
    ({"request_id": "a\nb"}, "request_id"),
    ({"truncation_side": "up"}, "truncation_side"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"tools": []}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tool_choice": "perhaps"}, "tool_choice"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ({"model": 5}, "model"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS, ids=lambda value: str(value)[:60])
async def test_bad_fields_are_refused_by_name(client, fields, param):
    reply = await client.chat(**fields)
    assert reply.status == 400
    assert reply.error["param"] == param
    assert reply.error["type"] == "BadRequestError"
    check_shape(reply)


@pytest.mark.parametrize(("stop", "size"), [(["a", ""], 0), (["a", "\u00e9" * 129], 258)])
async def test_the_error_of_a_stop_of_a_wrong_size_has_its_size(client, stop, size):
    reply = await client.chat(stop=stop)
    assert reply.error["message"].startswith(f"stop[1]: got {size} bytes; ")


async def test_s27_texts_of_megabytes_are_not_looked_through_before_their_size(client, monkeypatch):
    def looked_through(self, text, param):
        raise AssertionError(f"{param} was searched")

    monkeypatch.setattr(MediaTokens, "refuse_in_text", looked_through)
    long = " " * (client.state.renderer.config.prompt_bytes + 1)
    reply = await client.post("/tokenize", {"prompt": long})
    assert reply.error["reason"] == "context_length_exceeded"
    for fields in ({"stop": long}, {"bad_words": [long]}, {"model": long}):
        reply = await client.chat(**fields)
        assert (reply.status, reply.error["reason"]) == (400, "invalid_parameter")
        assert len(reply.error["message"]) < 200


async def test_a_byte_order_mark_is_passed_over(client):
    assert (await client.post("/v1/completions", body=b'\xef\xbb\xbf{"prompt": "a", "max_tokens": 1}')).status == 200


@pytest.mark.parametrize(
    ("fields", "begin"),
    [
        ({"cache_salt": "a/b"}, "cache_salt: got 3 characters, a/b; "),
        ({"bad_words": ["ab", " "]}, "bad_words[1]: got no more than spaces; "),
        ({"bad_words": ["x" * 129]}, "bad_words[0]: got 129 bytes; "),
    ],
)
async def test_a_text_that_is_not_allowed_is_described_in_the_error(client, fields, begin):
    assert (await client.chat(**fields)).error["message"].startswith(begin)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": [71], "bad_words": ["h"]}, "allowed_token_ids"),
        ({"return_routed_experts": True}, "return_routed_experts"),
        ({"response_format": {"type": "json_object"}, "allowed_token_ids": [71]}, "response_format"),
    ],
)
async def test_what_the_engine_refuses_has_its_field(client, fields, param):
    reply = await client.chat(**fields)
    assert (reply.status, reply.error["param"]) == (400, param)


GOOD_FIELDS = [
    {"top_logprobs": 0},
    {"logprobs": False, "top_logprobs": 0},
    {"model": ""},
    {"temperature": 2},
    {"temperature": 0.001},
    {"top_k": -1},
    {"top_p": 1},
    {"n": 16},
    {"max_tokens": 2.0},
    {"min_tokens": 4},
    {"stop": ["a"] * 32},
    {"stop_token_ids": [1] * 64},
    {"seed": -1},
    {"seed": -(2**63)},
    {"logit_bias": {"5": 100, "6": -100}},
    {"logprobs": True, "top_logprobs": 20},
    {"priority": 0},
    {"cache_salt": "x" * 128},
    {"response_format": {"type": "text"}},
    {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
    {"temperature": None, "stop": None, "n": None, "tools": None, "stream": None, "stream_options": None},
    {"user": "u", "metadata": {"a": [1]}, "store": True, "best_of": 1, "guided_json": None, "unknown": [[1]]},
    {"truncate_prompt_tokens": -1},
    {"truncate_prompt_tokens": 5},
    {"reasoning_effort": "low"},
]


@pytest.mark.parametrize("fields", GOOD_FIELDS, ids=lambda value: str(value)[:60])
async def test_values_at_the_edge_are_taken(client, fields):
    reply = await client.chat(**fields)
    assert reply.status == 200, reply.content


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"use_beam_search": True, "stream": True}, 400, "use_beam_search"),
        ({"use_beam_search": True, "n": 11}, 400, "n"),
        ({"use_beam_search": True, "logit_bias": {"5": 1}}, 400, "logit_bias"),
        ({"use_beam_search": True, "length_penalty": 11}, 400, "length_penalty"),
        ({"repetition_detection": {"max_pattern_size": 4}}, 400, "repetition_detection.min_count"),
        ({"repetition_detection": {"max_pattern_size": 4, "min_count": 1}}, 400, "repetition_detection.min_count"),
        (
            {"repetition_detection": {"max_pattern_size": 257, "min_count": 2}},
            400,
            "repetition_detection.max_pattern_size",
        ),
        ({"thinking_token_budget": 5}, 501, "thinking_token_budget"),
        ({"mm_processor_kwargs": {"fps": 1}}, 403, "mm_processor_kwargs"),
        ({"media_io_kwargs": {"video": {}}}, 403, "media_io_kwargs"),
        ({"chat_template": "x"}, 403, "chat_template"),
        ({"model": "other"}, 404, "model"),
        ({"modalities": ["text", "audio"]}, 501, "modalities"),
        ({"functions": [{"name": "f"}]}, 400, "functions"),
        ({"function_call": "auto"}, 400, "function_call"),
    ],
)
async def test_what_this_server_cannot_do_is_named(client, fields, status, param):
    reply = await client.chat(**fields)
    assert reply.status == status
    assert reply.error["param"] == param
    check_shape(reply)


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[1]",
        b'{"messages": [] x}',
        b'"text"',
        b"\xff\xfe",
        b'{"messages":[{"role":"user","content":"\xff"}]}',
        b'{"messages":[{"role":"user","content":"hi"}],"top_p":NaN}',
        b'{"messages":[{"role":"user","content":"hi"}],"top_p":-Infinity}',
        b'{"messages":[{"role":"user","content":"hi"}],"top_p":1e999}',
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"messages":[{"role":"user","content":"hi"}],"x":99999999999999999999999999}',
        b'{"messages":[{"role":"user","content":"hi"}],"x":' + b"[" * 201 + b"]" * 201 + b"}",
    ],
)
async def test_s05_malformed_bodies_are_refused(client, body):
    reply = await client.post("/v1/chat/completions", body=body)
    assert reply.status == 400
    check_shape(reply)


async def test_s05_depth_and_nodes_at_the_edge(serve):
    client = serve(limits={"json_max_depth": 6, "json_max_nodes": 40})
    assert (await client.chat(x=[[[[[1]]]]])).status == 200
    assert (await client.chat(x=[[[[[[1]]]]]])).error["reason"] == "invalid_json"
    used = 6
    assert (await client.chat(x=[0] * (40 - used - 4))).status == 200
    assert (await client.chat(x=[0] * 40)).error["reason"] == "invalid_json"


async def test_s04_bytes_are_counted_as_they_arrive(serve):
    client = serve(limits={"max_request_bytes": 1024})
    body = b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":1' + b" " * 2000 + b"}"
    pieces = [body[at : at + 100] for at in range(0, len(body), 100)]
    reply = await client.post("/v1/chat/completions", body=pieces, headers={"content-length": "10"})
    assert reply.status == 413
    assert reply.error["reason"] == "request_too_large"
    assert client.state.body_budget.used == 0
    fits = body[:60] + b" " * (1024 - 61) + b"}"
    assert (await client.post("/v1/chat/completions", body=fits.replace(b"1   ", b"1   ", 1))).status == 200
    assert (await client.post("/v1/chat/completions", body=fits + b" ")).status == 413
    assert client.state.body_budget.used == 0


async def test_s04_promised_length_is_refused_before_reading(serve):
    client = serve(limits={"max_request_bytes": 1024})
    reply = await client.post("/v1/chat/completions", body=b"{}", headers={"content-length": "5000"})
    assert reply.status == 413


async def test_s04_spent_body_budget_answers_429(serve):
    client = serve(limits={"body_budget_bytes": 2048})
    assert (await client.chat("x" * 3000)).status == 200, "small bodies are outside the budget"
    reply = await client.chat("x" * 70000)
    assert reply.status == 429
    assert reply.error["reason"] == "queue_full"
    assert reply.reply_headers["retry-after"]
    assert client.state.body_budget.used == 0


async def test_large_bodies_are_decoded_in_the_pool(client):
    reply = await client.chat("hello", padding="x" * (300 << 10))
    assert reply.status == 200


@pytest.mark.parametrize(
    "headers",
    [{"content-type": "text/plain"}, {"content-type": "multipart/form-data"}, {"content-encoding": "gzip"}],
)
async def test_wrong_content_types_are_415(client, headers):
    reply = await client.post("/v1/chat/completions", {"messages": []}, headers=headers)
    assert reply.status == 415
    check_shape(reply)


async def test_charset_parameter_is_allowed(client):
    reply = await client.chat()
    assert reply.status == 200
    reply = await client.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
        headers={"content-type": "application/json; charset=utf-8"},
    )
    assert reply.status == 200


async def test_unknown_paths_and_wrong_methods(client):
    reply = await client.get("/v1/nothing")
    assert reply.status == 404
    check_shape(reply)
    reply = await client.get("/v1/chat/completions")
    assert reply.status == 405
    assert reply.reply_headers["allow"] == "POST"
    check_shape(reply)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/rerank"])
async def test_known_routes_that_are_not_served_are_501(client, path):
    reply = await client.post(path, {})
    assert reply.status == 501
    assert reply.error["type"] == "NotImplementedError"
    check_shape(reply)


async def test_prompt_too_long_begins_as_clients_expect(client, state, tiny_client, tiny_state):
    limit = state.engine.max_model_len
    reply = await client.complete([7] * limit)
    assert reply.status == 400
    start = f"This model's maximum context length is {limit} tokens. However, your prompt contains {limit} input tokens"
    assert reply.error["message"].startswith(start)
    assert reply.error["reason"] == "context_length_exceeded"
    assert (await client.chat("word " * 20000)).error["message"].startswith("This model's maximum context length is")
    whole = tiny_state.engine.max_model_len
    body = (await tiny_client.complete([7] * (whole - 1), max_tokens=50, ignore_eos=True)).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 1


async def test_s28_n_and_prompts_have_ceilings(serve):
    client = serve(limits={"max_n": 2, "max_prompts": 3, "max_choices": 4, "max_logprobs": 1})
    assert (await client.complete(["a"] * 2, n=2)).status == 200
    assert (await client.complete(["a"] * 3, n=2)).error["param"] == "n"
    assert (await client.complete(["a"] * 4)).error["param"] == "prompt"
    assert (await client.complete("a", n=3)).error["param"] == "n"
    assert (await client.complete("a", logprobs=2)).error["param"] == "logprobs"


async def test_s42_full_queue_answers_429_and_gives_places_back(serve, state):
    client = serve()
    client.state.places.limit = 2
    assert (await client.chat(n=2)).status == 200
    reply = await client.chat(n=3)
    assert reply.status == 429
    assert reply.error["reason"] == "queue_full"
    assert 1 <= int(reply.reply_headers["retry-after"]) <= 60
    check_shape(reply)
    assert client.state.places.taken == 0
    assert client.state.metrics.rejections["queue_full"] == 1
    assert (await quiet(state))["routes"] == 0


async def test_full_engine_queue_answers_429(serve, state):
    client = serve()
    client.state.places.limit = 10_000
    reply = await client.complete(["a"] * (state.engine.limits.max_open + 1))
    assert reply.status == 429
    assert (await quiet(state))["routes"] == 0


async def test_s12_deadlines_answer_504(serve, state):
    client = serve(limits={"request_timeout": 0.05})
    reply = await client.chat(max_tokens=4000, ignore_eos=True)
    assert reply.status == 504
    assert reply.error["reason"] == "deadline"
    check_shape(reply)
    client = serve(limits={"request_timeout": 0.8})  # also a slow machine has its first token by then
    streamed = await client.chat(max_tokens=4000, ignore_eos=True, stream=True)
    assert streamed.status == 200
    assert streamed.events()[-2]["error"]["reason"] == "deadline"
    assert streamed.events()[-1] == "[DONE]"
    assert (await quiet(state))["routes"] == 0


async def test_s10_internal_faults_say_nothing_but_the_request_id(serve, monkeypatch, caplog):
    client = serve()

    async def broken(*args, **named):
        raise ValueError("secret at 0xdeadbeef in /usr/lib/x.py")

    monkeypatch.setattr(client.state.renderer, "chat", broken)
    reply = await client.chat()
    assert reply.status == 500
    assert reply.error["reason"] == "internal_error"
    assert reply.reply_headers["x-request-id"] in reply.error["message"]
    check_shape(reply)


async def test_s10_client_values_are_escaped_and_cut(client):
    reply = await client.chat(model="\x1b[31m" + "a" * 100 + "é")
    assert "\x1b" not in reply.error["message"]
    assert "\\x1b" in reply.error["message"]
    reply = await client.chat(model="a" * 300)
    assert reply.status == 400


async def test_media_refusals_keep_their_reason(client):
    part = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}
    reply = await client.chat(messages=[{"role": "user", "content": [part]}])
    assert reply.status == 403
    assert reply.error["reason"] == "media_url_not_allowed"
    check_shape(reply)
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    reply = await client.chat(messages=[{"role": "user", "content": [part]}])
    assert reply.status == 400
    check_shape(reply)


async def test_s42_a_key_has_its_own_ceiling(serve):
    client = serve(server={"api_key": ("one", "two")}, limits={"max_inflight_per_key": 2})
    body = {"prompt": "a", "max_tokens": 300, "ignore_eos": True, "n": 2}
    running = client.call("POST", "/v1/completions", body, headers={"x-api-key": "one"}).start()
    await until(lambda: client.state.places.taken == 2)
    body = {"prompt": "a", "max_tokens": 1}
    refused = await client.post("/v1/completions", body, headers={"x-api-key": "one"})
    assert refused.status == 429
    assert refused.error["reason"] == "key_busy"
    assert (await client.post("/v1/completions", body, headers={"x-api-key": "two"})).status == 200
    await running.finish()
    assert (await client.post("/v1/completions", body, headers={"x-api-key": "one"})).status == 200


async def test_s42_waiting_tokens_are_bounded(serve):
    client = serve(limits={"max_queued_tokens": 100})
    assert (await client.complete([7] * 50, n=2)).status == 200
    assert (await client.complete([7] * 51, n=2)).error["reason"] == "queue_full"
    assert client.state.places.tokens == 0


async def test_s11_slow_bodies_are_408(serve):
    client = serve(limits={"body_idle_timeout": 0.1})
    call = client.call("POST", "/v1/completions", body=b'{"prompt":"a"}')
    call.pieces = [b'{"prom', b""]
    original = call.receive

    async def receive():
        if len(call.pieces) == 1:
            await asyncio.sleep(1)
        return await original()

    call.receive = receive
    await call.finish()
    assert call.status == 408
    assert call.error["reason"] == "upload_timeout"
    assert call.reply_headers["connection"] == "close"
    assert client.state.body_budget.used == 0


async def test_leaving_while_the_body_arrives_is_no_fault(serve, caplog):
    client = serve()
    call = client.call("POST", "/v1/completions", body=[b'{"prom', b"pt"])
    call.pieces = [b'{"prom', b"pt", b"x"]
    call.start()
    original = call.receive

    async def receive():
        return {"type": "http.disconnect"} if len(call.pieces) < 3 else await original()

    call.receive = receive
    call.task.cancel()
    await asyncio.gather(call.task, return_exceptions=True)
    call.task = None
    await call.finish()
    assert not call.complete
    assert client.state.body_budget.used == 0
    told = [record for record in caplog.records if record.name != "asyncio"]  # asyncio logs slow callbacks
    assert all(record.levelname == "INFO" for record in told)


async def test_a_fault_while_an_answer_grows_ends_that_answer_alone(serve, monkeypatch):
    client = serve()
    from server.routes.chunks import ChatChunks

    def broken(self, choice):
        raise RuntimeError("secret")

    neighbour = asyncio.ensure_future(client.complete("a", max_tokens=64, ignore_eos=True))
    await asyncio.sleep(0.01)
    monkeypatch.setattr(ChatChunks, "chunks", broken)
    reply = await client.chat(stream=True)
    assert reply.status == 500
    check_shape(reply)
    assert (await neighbour).json()["usage"]["completion_tokens"] == 64


def end_the_thread(runtime: object) -> None:
    raise SystemExit


async def test_the_end_of_the_device_thread_answers_everybody(state):
    other = AppState(config_of())
    other.engine = Engine(other.config.engine())
    died = []
    other.engine.on_death = died.append
    await load.load(other)
    other.phase = "ready"
    client = Client(make_app(other))
    long = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "skip_special_tokens": False}
    running = client.call("POST", "/v1/completions", long).start()
    streamed = client.call("POST", "/v1/completions", {**long, "stream": True}).start()
    await streamed.wrote.wait()
    other.engine.inspect().call(end_the_thread, asyncio.get_running_loop().create_future())
    await running.finish()
    await streamed.finish()
    assert running.status == 503
    assert running.error["reason"] == "engine_dead"
    assert streamed.events()[-2]["error"]["reason"] == "engine_dead"
    assert streamed.events()[-1] == "[DONE]"
    assert died
    assert (await client.complete("a")).status == 503
    await other.media.close()
    await other.engine.stop(0.0)
    other.pool.shutdown()
