"""Fields of other servers: each is honoured, refused by name, or a hint, on every route that generates."""

from __future__ import annotations

import json
import logging

import pytest

from server.dialects.sglang.schema import SglangBody
from server.errors import ApiError
from server.flags.limits_flags import LimitsConfig
from server.foreign_fields import FIELDS, HINTS, Honoured, Refused
from server.http import foreign_body
from server.http.body import decode
from server.http.foreign_body import MOST_LINES, Minutes, fields_of, translated
from server.schema.chat import ChatBody
from server.schema.completion import CompletionBody
from server.schema.generate import GenerateBody, TokenSampling
from server.schema.messages import CountBody, MessagesBody
from server.schema.pooling import VectorsBody
from server.schema.responses import ResponsesBody

session = pytest.mark.asyncio(loop_scope="session")
HI = [{"role": "user", "content": "hi"}]
BODIES = {
    ChatBody: {"messages": HI},
    CompletionBody: {"prompt": "hi"},
    ResponsesBody: {"input": "hi"},
    MessagesBody: {"messages": HI, "max_tokens": 2},
    SglangBody: {"text": "hi"},
}
ROUTES = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/generate": SglangBody,
}
SCHEMA = {"type": "object"}
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}
# Honoured fields: a value, and the field of a chat with its value.
HONOURED = {
    **dict.fromkeys(("max_new_tokens", "n_predict", "num_predict", "max_output_tokens"), (7, "max_tokens", 7)),
    "max_tokens": (7, "max_tokens", 7),
    "max_completion_tokens": (7, "max_completion_tokens", 7),
    "stop": (["a"], "stop", ["a"]),
    "stop_sequences": (["a"], "stop", ["a"]),
    "response_format": ({"type": "text"}, "response_format", {"type": "text"}),
    "min_new_tokens": (1, "min_tokens", 1),
    "repeat_penalty": (1.5, "repetition_penalty", 1.5),
    "sampling_seed": (3, "seed", 3),
    "no_stop_trim": (True, "include_stop_str_in_output", True),
    "return_tokens": (True, "return_token_ids", True),
    "extra_key": ("k", "cache_salt", "k"),
    "do_sample": (False, "temperature", 0.0),
    "truncate": (5, "truncate_prompt_tokens", 5),
    "n_probs": (2, "top_logprobs", 2),
    "top_n_tokens": (2, "top_logprobs", 2),
    "regex": ("a+", "structured_outputs", {"regex": "a+"}),
    "ebnf": ('root ::= "a"', "structured_outputs", {"grammar": 'root ::= "a"'}),
    "grammar": ('root ::= "a"', "structured_outputs", {"grammar": 'root ::= "a"'}),
    "json_schema": (SCHEMA, "structured_outputs", {"json": SCHEMA}),
    "guided_json": (SCHEMA, "structured_outputs", {"json": SCHEMA}),
    "guided_regex": ("a+", "structured_outputs", {"regex": "a+"}),
    "guided_choice": (["a"], "structured_outputs", {"choice": ["a"]}),
    "guided_grammar": ('root ::= "a"', "structured_outputs", {"grammar": 'root ::= "a"'}),
    "guided_json_object": (True, "structured_outputs", {"json_object": True}),
    "guided_whitespace_pattern": (" ?", "structured_outputs", {"whitespace_pattern": " ?"}),
    "structural_tag": (json.dumps(TAG), "structured_outputs", {"structural_tag": TAG}),
    "format": ("json", "structured_outputs", {"json_object": True}),
    "reasoning_effort": ("low", "reasoning_effort", "low"),
    "reasoning": ({"effort": "low"}, "reasoning_effort", "low"),
    "enable_thinking": (False, "chat_template_kwargs", {"enable_thinking": False}),
    "thinking": ({"type": "disabled"}, "chat_template_kwargs", {"enable_thinking": False}),
    "think": (False, "chat_template_kwargs", {"enable_thinking": False}),
    "thinking_budget": (9, "thinking_token_budget", 9),
}
# Refused fields: a value that is refused, and fields that are not.
REFUSED = {
    "reasoning_format": ("none", {"reasoning_format": "deepseek"}),
    "separate_reasoning": (False, {"separate_reasoning": True}),
    "mirostat": (2, {"mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1}),
    "typical_p": (0.5, {"typical_p": 1.0}),
    "tfs_z": (0.5, {"tfs_z": 1.0}),
    "top_a": (0.5, {"top_a": 0}),
    "dynatemp_range": (0.5, {"dynatemp_range": 0, "dynatemp_exponent": 1.0}),
    "adaptive_target": (0.5, {"adaptive_target": -1.0}),
    "samplers": (["top_p", "top_k"], {"samplers": ["penalties", "temperature", "top_k"], "temperature": 0.5}),
    "min_keep": (2, {"min_keep": 1}),
    "best_of": (2, {"best_of": 1}),
    "repeat_last_n": (64, {"repeat_last_n": -1}),
    "penalize_nl": (True, {"penalize_nl": False}),
    "penalize_newline": (True, {"penalize_newline": False}),
    "n_keep": (4, {"n_keep": -1}),
    "num_keep": (4, {"num_keep": 0}),
    "n_discard": (4, {"n_discard": 0}),
    "n_indent": (1, {"n_indent": 0}),
    "stop_regex": ("a", {"stop_regex": []}),
    "grammar_lazy": (True, {"grammar_lazy": False}),
    "t_max_predict_ms": (100, {"t_max_predict_ms": -1}),
    "t_max_prompt_ms": (100, {"t_max_prompt_ms": 0}),
    "lora": ([{"id": 0, "scale": 1.0}], {"lora": [{"id": 0, "scale": 0.0}]}),
    "lora_request": ({"lora_name": "a"}, {"lora_request": None}),
    "lora_path": ("a", {"lora_path": None}),
    "adapter_id": ("a", {"adapter_id": ""}),
    "custom_logit_processor": ("x", {"custom_logit_processor": None}),
    "custom_params": ({"a": 1}, {"custom_params": {}}),
    "logits_processors": (["x"], {"logits_processors": []}),
    "vllm_xargs": ({"a": 1}, {"vllm_xargs": {}}),
    "watermark": (True, {"watermark": False}),
    "return_hidden_states": (True, {"return_hidden_states": False}),
    "kv_transfer_params": ({"do_remote_decode": True}, {"kv_transfer_params": {}}),
    "bootstrap_host": ("10.0.0.2", {"bootstrap_host": None}),
    "input_embeds": ([[0.5]], {"input_embeds": None}),
    "image_data": ([{"data": "x", "id": 1}], {"image_data": []}),
    "audio_data": ("x", {"audio_data": ""}),
    "video_data": ("x", {"video_data": ""}),
    "multimodal_data": (["x"], {"multimodal_data": []}),
    "session_params": ({"id": "a"}, {"session_params": {}}),
    "context": ([1, 2], {"context": []}),
    "template": ("x", {"template": ""}),
    "web_search_options": ({}, {"web_search_options": None}),
    "audio": ({"voice": "a"}, {"audio": None}),
    "post_sampling_probs": (True, {"post_sampling_probs": False}),
    "decoder_input_details": (True, {"decoder_input_details": False}),
}
# Parameters of a switch: refused while it is on.
PARAMETERS = {
    **dict.fromkeys(("mirostat_tau", "mirostat_eta"), "mirostat"),
    "dynatemp_exponent": "dynatemp_range",
}


def read(kind, **fields):
    return decode(json.dumps(BODIES[kind] | fields).encode(), kind, LimitsConfig())


def test_every_row_of_the_table_is_tried():
    assert set(HONOURED) == {name for name, row in FIELDS.items() if isinstance(row, Honoured)}
    refused = {name for name, row in FIELDS.items() if isinstance(row, Refused)}
    assert set(REFUSED) | set(PARAMETERS) == refused - fields_of(ChatBody) | (set(REFUSED) & fields_of(ChatBody))
    assert not set(FIELDS) & HINTS


@pytest.mark.parametrize("name", HONOURED)
def test_a_field_is_honoured_or_refused_by_name_or_named_on_every_route(name):
    value, ours, expected = HONOURED[name]
    body, _ = read(ChatBody, **{name: value})
    assert getattr(body, ours) == expected
    if ours == "top_logprobs":
        assert body.logprobs is True
    for kind in (CompletionBody, ResponsesBody, MessagesBody, SglangBody):
        plain, _ = read(kind)
        refusal = None
        try:
            body, foreign = read(kind, **{name: value})
        except ApiError as error:
            refusal = error
        if refusal is None:
            assert body != plain or name in foreign.ignored, kind
        else:
            assert (refusal.status, refusal.param) == (400, name), kind
            assert str(refusal).startswith(f"{name}: "), kind


@pytest.mark.parametrize("name", [name for name in REFUSED if name not in fields_of(ChatBody)])
def test_a_refused_field_passes_when_it_is_off(name):
    _, off = REFUSED[name]
    for kind in BODIES:
        _, foreign = read(kind, **off)
        others = {"temperature"} if kind is SglangBody else set()  # a field of sampling_params
        assert foreign is None or set(foreign.ignored) <= others


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_refused_with_their_switch(name):
    switch = PARAMETERS[name]
    read(ChatBody, **{name: 1})
    with pytest.raises(ApiError, match=f"^({name}|{switch}): "):
        read(ChatBody, **{name: 1, switch: 1})


@pytest.mark.parametrize("path", ROUTES)
@session
async def test_routes_refuse_by_name_and_say_what_to_send(client, path):
    for name, (value, _) in REFUSED.items():
        if name in fields_of(ROUTES[path]):
            continue
        reply = await client.post(path, {**BODIES[ROUTES[path]], name: value})
        assert reply.status == 400, (name, reply.content)
        message = reply.error["message"]
        assert message.startswith(f"{name}: "), message
        assert len(message) > len(name) + 10
        if path != "/v1/messages":
            assert reply.error["param"] == name


@pytest.mark.parametrize("path", ROUTES)
@session
async def test_hints_change_nothing_and_are_not_named(client, path):
    kind = ROUTES[path]
    hints = dict.fromkeys(HINTS - fields_of(kind), 1)
    if kind is SglangBody:
        params = {"temperature": 0, "max_new_tokens": 2}
        bodies = [{**BODIES[kind], "sampling_params": {**params, **more}, **more} for more in ({}, hints)]
    else:
        most = "max_output_tokens" if kind is ResponsesBody else "max_tokens"
        bodies = [{**BODIES[kind], "temperature": 0, most: 2, **more} for more in ({}, hints)]
    plain, hinted = [await client.post(path, body) for body in bodies]
    assert hinted.status == 200, hinted.content
    assert "x-ignored-fields" not in hinted.reply_headers

    def answer(reply):
        found = reply.json()
        if "meta_info" in found:
            return found["text"], found["output_ids"]
        return [part.get("text") or part.get("message") for part in found.get("choices", found.get("content", []))]

    assert answer(plain) == answer(hinted)


@session
async def test_fields_reach_the_answer_under_their_own_names(client):
    assert (await client.chat(max_tokens=None, n_predict=2)).json()["usage"]["completion_tokens"] == 2
    reply = await client.chat(max_tokens=None, n_predict=0)
    assert (reply.status, reply.error["param"]) == (400, "n_predict")
    assert reply.error["message"].startswith("n_predict: got 0; must be 1 to")
    reply = await client.chat(guided_json={"type": "object", "properties": {"a": {"not": 1, "type": 5}}})
    assert (reply.status, reply.error["param"].partition(".")[0]) == (400, "guided_json")
    reply = await client.chat(repeat_penalty="x")
    assert reply.error["message"] == "repeat_penalty: got a string; must be a number"
    choice = {"guided_choice": ["blue"], "ignore_eos": False, "max_tokens": 20}
    assert (await client.chat(**choice)).json()["choices"][0]["message"]["content"] == "blue"
    assert (await client.complete(**choice)).json()["choices"][0]["text"] == "blue"
    reply = await client.post("/v1/responses", {"input": "hi", "guided_choice": ["blue"]})
    assert reply.json()["output"][-1]["content"][0]["text"] == "blue"
    entry = (await client.chat(n_probs=2)).json()["choices"][0]["logprobs"]["content"][0]
    assert len(entry["top_logprobs"]) == 2
    assert len((await client.complete(n_probs=2)).json()["choices"][0]["logprobs"]["top_logprobs"][0]) == 2


@session
async def test_two_names_of_one_thing_must_have_one_value(client):
    assert (await client.chat(max_tokens=2, n_predict=2)).status == 200
    for fields, param in (
        ({"max_tokens": 2, "n_predict": 3}, "n_predict"),
        ({"max_tokens": None, "max_completion_tokens": 2, "n_predict": 3}, "n_predict"),
        ({"max_tokens": None, "max_new_tokens": 2, "n_predict": 3}, "n_predict"),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "enable_thinking"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "guided_regex"),
    ):
        reply = await client.chat(**fields)
        assert (reply.status, reply.error["param"]) == (400, param), reply.content
        assert "send one of them" in reply.error["message"]
    body, _ = read(ChatBody, enable_thinking=True, chat_template_kwargs={"a": 1})
    assert body.chat_template_kwargs == {"a": 1, "enable_thinking": True}
    body, _ = read(ChatBody, enable_thinking=True, chat_template_kwargs=None)
    assert body.chat_template_kwargs == {"enable_thinking": True}
    with pytest.raises(ApiError, match="chat_template_kwargs: got a string; must be an object"):
        read(ChatBody, enable_thinking=True, chat_template_kwargs="x")


@session
async def test_unknown_fields_are_named_to_the_client_and_in_the_log(client, caplog, monkeypatch):
    monkeypatch.setattr(foreign_body, "lines", Minutes())
    caplog.set_level(logging.WARNING, "omniloop")
    for _ in range(2):
        reply = await client.chat(max_token=3, wholly_different=[{}], absent=None)
        assert reply.reply_headers["x-ignored-fields"] == "max_token, wholly_different"
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "the field max_token of a request to /v1/chat/completions is not known and was ignored; "
        "the nearest name is max_tokens",
        "the field wholly_different of a request to /v1/chat/completions is not known and was ignored",
    ]
    names = ["a" * 100, "b,c\r\nd: e", "é", *(f"unknown{at}" for at in range(9))]
    reply = await client.chat(stream=True, **dict.fromkeys(names, 1))
    assert reply.reply_headers["x-ignored-fields"].split(", ") == ["a" * 64, "b?c??d:?e", "?", *names[3:8]]
    reply = await client.chat(**{f"unknown{at}": 1 for at in range(100)})
    assert reply.reply_headers["x-ignored-fields"].count(", ") == 7
    reply = await client.chat(**{f"unknown{at}": 1 for at in range(1100)})
    assert (reply.status, "more than 1024 fields" in reply.error["message"]) == (400, True)


def test_the_log_has_each_name_once_a_minute_and_a_bound():
    now = 0.0
    minutes = Minutes(lambda: now)
    assert [minutes.due("a"), minutes.due("a")] == [True, False]
    now = 60.0
    assert minutes.due("a")
    assert sum(minutes.due(f"n{at}") for at in range(200)) == MOST_LINES - 1
    now = 120.0
    assert minutes.due("n199")


def test_names_are_found_however_they_are_written():
    body, _ = decode(b'{"messages":[],"n_\\u0070redict":3}', ChatBody, LimitsConfig())
    assert body.max_tokens == 3
    body, _ = decode(b'{"messages":[],"n_predict":3,"n_predict":4} \n', ChatBody, LimitsConfig())
    assert body.max_tokens == 4
    body, _ = decode(b'{"n_predict":3.0,"messages":[]}', ChatBody, LimitsConfig())
    assert body.max_tokens == 3
    broken = [b'{"n_predict":3', b'{"n_predict":}', b'{"messages":[],"n_predict":3}}', b'{"n_predict":1 2}']
    for text in (*broken, b'{"\xff":1}'):
        with pytest.raises(ApiError, match="not valid JSON"):
            decode(text, ChatBody, LimitsConfig())


def test_a_large_body_has_its_foreign_fields_too():
    ids = list(range(50_000))
    data = json.dumps({"prompt": ids, "n_predict": 3, "other": ids}).encode()
    body, foreign = decode(data, CompletionBody, LimitsConfig())
    assert (len(body.prompt), body.max_tokens, foreign.ignored) == (50_000, 3, ["other"])
    with pytest.raises(ApiError, match="context: holds more than 65536 values"):
        decode(json.dumps({"prompt": "", "context": [1] * 70_000}).encode(), CompletionBody, LimitsConfig())


@session
async def test_nested_sampling_params_use_the_same_table(client):
    def generate(**params):
        return client.post("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": params})

    reply = await generate(max_new_tokens=2, ignore_eos=True, temprature=0.5)
    assert len(reply.json()["choices"][0]["token_ids"]) == 2, reply.content
    assert reply.reply_headers["x-ignored-fields"] == "sampling_params.temprature"
    for name, (value, _) in REFUSED.items():
        reply = await generate(**{name: value})
        assert (reply.status, reply.error["param"]) == (400, f"sampling_params.{name}"), name
    for name, (value, ours, _) in HONOURED.items():
        data = json.dumps({"token_ids": [5], "sampling_params": {name: value}}).encode()
        body, foreign = decode(data, GenerateBody, LimitsConfig())
        assert body.sampling_params != TokenSampling() or foreign.ignored == [f"sampling_params.{name}"], (name, ours)


@session
async def test_sampling_params_of_generate_use_the_same_table(client):
    async def generate(**params):
        return await client.post("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 2, **params}})

    for name, (value, off) in REFUSED.items():
        reply = await generate(**{name: value})
        assert (reply.status, reply.error["param"]) == (400, f"sampling_params.{name}"), name
        reply = await generate(**off)
        assert reply.status == 200, (name, reply.content)
    for name, (value, ours, _) in HONOURED.items():
        most = None if ours == "max_tokens" else 2
        reply = await generate(**{"max_new_tokens": most, name: value, "ignore_eos": True})
        ignored = f"sampling_params.{name}" in reply.reply_headers.get("x-ignored-fields", "")
        if ours == "max_tokens":
            assert reply.json()["meta_info"]["completion_tokens"] == value
        elif reply.status != 200:
            assert reply.error["param"].startswith("sampling_params."), reply.content
        else:
            known = fields_of(SglangBody) | fields_of(TokenSampling)
            assert ignored or name in known or FIELDS[name].ours.partition(".")[0] in known, name


def test_routes_without_text_honour_what_they_can_and_name_the_rest():
    body, foreign = decode(b'{"messages":[],"enable_thinking":false}', CountBody, LimitsConfig())
    assert body.chat_template_kwargs == {"enable_thinking": False}
    assert decode(b'{"messages":[],"max_tokens":1,"temperature":1}', CountBody, LimitsConfig())[1] is None
    _, foreign = decode(b'{"input":"a","mirostat":2,"n_predict":3}', VectorsBody, LimitsConfig())
    assert foreign.ignored == ["mirostat", "n_predict"]
    with pytest.raises(ApiError, match=r"^lora_path: x is not supported; name the adapter as model"):
        decode(b'{"input":"a","lora_path":"x"}', VectorsBody, LimitsConfig())


def test_options_of_a_dialect_are_translated_by_the_same_function():
    fields = fields_of(ChatBody)
    options = {"num_predict": 5, "temperature": 0.5, "num_ctx": 4096, "odd": 1, "own": 2, "mirostat": 0}
    made = translated(options, fields, "options.", {"own"})
    assert made.settings == {"max_tokens": 5}
    assert made.ignored == ["options.odd"]
    assert made.renamed == {"max_tokens": "options.num_predict"}
    with pytest.raises(ApiError, match=r"^options\.mirostat: 1 is not supported; send temperature"):
        translated({"mirostat": 1}, fields, "options.")


@session
async def test_hosted_tools_are_named_and_a_call_of_them_is_refused(client):
    hosted = [{"type": "web_search_20250305", "name": "web_search"}]
    for path, kind in (("/v1/responses", "required"), ("/v1/messages", "any"), ("/v1/messages/count_tokens", "any")):
        body = BODIES[ROUTES[path.removesuffix("/count_tokens")]] | {"tools": hosted}
        for choice, status in (("auto", 200), (kind, 400)):
            said = choice if path == "/v1/responses" else {"type": choice}
            reply = await client.post(path, {**body, "tool_choice": said, "odd": 1})
            assert reply.status == status, reply.content
            assert reply.reply_headers["x-ignored-fields"] == "odd, tools.web_search_20250305"
            if status == 400:
                assert "web_search_20250305 runs at other servers only" in reply.error["message"]
    body = {"input": "hi", "tools": hosted, "tool_choice": {"type": "web_search_20250305"}}
    reply = await client.post("/v1/responses", body)
    assert (reply.status, reply.error["param"]) == (400, "tool_choice")
