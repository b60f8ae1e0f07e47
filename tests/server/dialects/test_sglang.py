"""SGLang's /generate and its other routes: texts, ids, lists, log-probabilities, streams, media, refusals."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
from itertools import pairwise

import orjson
import pytest

from tests.mm import made as media
from tests.server.conftest import until
from tests.server.live import picture, without_end

pytestmark = pytest.mark.asyncio(loop_scope="session")

SHORT = {"max_new_tokens": 6}


async def ours(client, **body):
    reply = await client.post("/v1/completions", {"prompt": "1 2 3", "max_tokens": 6, "return_token_ids": True, **body})
    assert reply.status == 200, reply.content
    return reply.json()


async def made(client, **body):
    reply = await client.post("/generate", {"text": "1 2 3", "sampling_params": SHORT, **body})
    assert reply.status == 200, reply.content
    return reply.json()


def events_of(reply):
    assert reply.content.endswith(b"data: [DONE]\n\n"), reply.content
    return reply.events()[:-1]


PARAMS = [
    ({}, {}),
    ({"temperature": 1.5, "sampling_seed": 5, "top_k": 40, "top_p": 0.9, "min_p": 0.01}, None),
    ({"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.5}, None),
    ({"stop": [","], "ignore_eos": True, "min_new_tokens": 2}, {"stop": [","], "ignore_eos": True, "min_tokens": 2}),
    ({"stop": "4", "no_stop_trim": True}, {"stop": "4", "include_stop_str_in_output": True}),
    ({"stop_token_ids": [300], "skip_special_tokens": False}, None),
    ({"logit_bias": {"300": 90}}, None),
    ({"regex": "yes|no"}, {"structured_outputs": {"regex": "yes|no"}}),
    ({"ebnf": 'root ::= "yes"'}, {"structured_outputs": {"grammar": 'root ::= "yes"'}}),
    ({"json_schema": '{"enum": [1, 2]}'}, {"structured_outputs": {"json": {"enum": [1, 2]}}}),
]


@pytest.mark.parametrize(("theirs", "fields"), PARAMS)
async def test_the_text_is_that_of_v1(client, theirs, fields):
    named = {"sampling_seed": "seed"}
    same = {named.get(name, name): value for name, value in theirs.items()} if fields is None else fields
    wanted = (await ours(client, **same))["choices"][0]
    params = SHORT | theirs
    whole = await made(client, sampling_params=params)
    assert (whole["text"], whole["output_ids"]) == (wanted["text"], wanted["token_ids"])
    reply = await client.post("/generate", {"text": "1 2 3", "sampling_params": params, "stream": True})
    events = events_of(reply)
    texts = [event["text"] for event in events]
    assert texts[-1] == wanted["text"]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert events[-1]["output_ids"] == wanted["token_ids"]
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]


async def test_an_answer_has_sglangs_facts(client):
    plain = await ours(client)
    answer = await made(client, rid="a1")
    about = answer["meta_info"]
    assert about["id"] == "a1"
    assert about["finish_reason"] == {"type": "length", "length": 6}
    assert (about["prompt_tokens"], about["completion_tokens"]) == (plain["usage"]["prompt_tokens"], 6)
    assert about["weight_version"] == "default"
    assert about["e2e_latency"] > 0
    long = "a text that is sent twice " * 9
    assert (await made(client, text=long))["meta_info"]["cached_tokens"] == 0
    assert (await made(client, text=long))["meta_info"]["cached_tokens"] > 0
    ended = await made(client, sampling_params={"stop": "4"})
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": "4"}
    eos = client.state.vocabulary.eos[0]
    ended = await made(client, sampling_params={"logit_bias": {str(eos): 100}})
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": eos}
    assert ended["output_ids"] == [eos]
    assert (ended["text"], ended["meta_info"]["completion_tokens"]) == ("", 1)


async def test_tokens_are_128_where_no_number_is_sent(client):
    without_end(client)
    assert (await made(client, sampling_params=None))["meta_info"]["completion_tokens"] == 128
    for stream in (False, True):
        reply = await client.post(
            "/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 0}, "stream": stream}
        )
        answer = events_of(reply)[-1] if stream else reply.json()
        assert (answer["text"], answer["output_ids"]) == ("", [])
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
        assert answer["meta_info"]["completion_tokens"] == 0


async def test_lists_of_prompts_have_their_own_options(client):
    ids = client.state.tokenizer.encode("1 2 3", True)
    params = [SHORT, {"max_new_tokens": 3, "stop": [","]}, {"max_new_tokens": 9, "regex": "yes|no"}]
    texts = ["1 2 3", "4 5", "6"]
    body = {"sampling_params": params, "rid": ["a", "b", "c"], "return_logprob": [True, False, True]}
    alone = [
        await made(client, text=text, sampling_params=each, return_logprob=flag)
        for text, each, flag in zip(texts, params, body["return_logprob"])
    ]
    together = await made(client, text=texts, **body)
    streamed = events_of(await client.post("/generate", {"text": texts, **body, "stream": True}))
    last = [next(event for event in reversed(streamed) if event["index"] == at) for at in range(3)]
    for found in (together, last):
        assert [one["text"] for one in found] == [one["text"] for one in alone]
        assert [one["output_ids"] for one in found] == [one["output_ids"] for one in alone]
        assert [one["meta_info"]["id"] for one in found] == ["a", "b", "c"]
        assert ["output_token_logprobs" in one["meta_info"] for one in found] == [True, False, True]
    assert [one["index"] for one in together] == [0, 1, 2]
    assert (await made(client, text=None, input_ids=ids))["text"] == alone[0]["text"]
    assert [one["text"] for one in await made(client, text=None, input_ids=[ids])] == [alone[0]["text"]]
    assert isinstance(await made(client, text=["1 2 3"]), list)


async def test_several_answers_to_one_prompt(client):
    params = {"n": 2, "temperature": 1.5, "sampling_seed": 3, **SHORT}
    answers = await made(client, sampling_params=params, rid="a")
    assert [one["meta_info"]["id"] for one in answers] == ["a-0", "a-1"]
    wanted = await ours(client, n=2, temperature=1.5, seed=3)
    assert [one["text"] for one in answers] == [choice["text"] for choice in wanted["choices"]]
    assert len(await made(client, text=["1", "2"], sampling_params=params)) == 4


async def test_log_probabilities_are_those_of_completions(client):
    wanted = await ours(client, logprobs=2, prompt_logprobs=2)
    choice = wanted["choices"][0]
    body = {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0, "return_text_in_logprobs": True}
    about = (await made(client, **body))["meta_info"]
    ids = client.state.tokenizer.encode("1 2 3", True)
    values = [value for value, _, _ in about["output_token_logprobs"]]
    assert values == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
    assert [token for _, token, _ in about["output_token_logprobs"]] == choice["token_ids"]
    assert [len(tops) for tops in about["output_top_logprobs"]] == [2] * 6
    assert about["output_top_logprobs"][0][0] == about["output_token_logprobs"][0]
    assert [token for _, token, _ in about["input_token_logprobs"]] == ids
    assert about["input_token_logprobs"][0][0] is None
    of_prompt = [entry[str(token)]["logprob"] for entry, token in zip(choice["prompt_logprobs"][1:], ids[1:])]
    assert [value for value, _, _ in about["input_token_logprobs"][1:]] == pytest.approx(of_prompt, abs=1e-4)
    assert about["input_top_logprobs"][0] is None
    assert all(len(tops) == 2 for tops in about["input_top_logprobs"][1:])
    assert about["input_token_logprobs"][0][2] == client.state.tokenizer.token_text(ids[0])
    later = (await made(client, **body | {"logprob_start_len": 2}))["meta_info"]
    assert later["input_token_logprobs"][0][:2] == [None, ids[2]]
    assert later["input_token_logprobs"][1:] == about["input_token_logprobs"][3:]
    answer = (await made(client, return_logprob=True))["meta_info"]
    assert answer["input_token_logprobs"] == []
    assert answer["output_token_logprobs"][0][2] is None
    body = {"text": "1 2 3", "sampling_params": SHORT, **body, "stream": True}
    events = events_of(await client.post("/generate", body))
    streamed = events[-1]["meta_info"]
    for name in ("output_token_logprobs", "output_top_logprobs", "input_token_logprobs", "input_top_logprobs"):
        assert streamed[name] == about[name], name


async def test_given_tokens_have_log_probabilities_at_each_place(client):
    tokens = [300, 301]
    body = {"return_logprob": True, "top_logprobs_num": 1, "token_ids_logprob": tokens}
    about = (await made(client, **body))["meta_info"]
    wanted = (await ours(client, logprobs=1, logprob_token_ids=tokens))["choices"][0]["logprobs"]["top_logprobs"]
    text = client.state.tokenizer.token_text
    for place, expected in zip(about["output_token_ids_logprobs"], wanted, strict=True):
        assert [token for _, token, _ in place] == tokens
        assert [value for value, _, _ in place] == pytest.approx([expected[text(token)] for token in tokens], abs=1e-4)
    body |= {"top_logprobs_num": 3, "logprob_start_len": 0}
    about = (await made(client, **body))["meta_info"]
    likely = [[token for _, token, _ in place] for place in about["input_top_logprobs"][1:]]
    named = sorted(
        {token for place in likely for token in place} | {token for _, token, _ in about["input_token_logprobs"]}
    )
    again = (await made(client, **body | {"token_ids_logprob": named}))["meta_info"]
    assert again["input_top_logprobs"] == about["input_top_logprobs"]
    places = again["input_token_ids_logprobs"]
    assert places[0] is None
    for place, tops, own in zip(
        places[1:], about["input_top_logprobs"][1:], about["input_token_logprobs"][1:], strict=True
    ):
        values = {token: value for value, token, _ in place}
        assert list(values) == named
        assert [values[token] for _, token, _ in (*tops, own)] == pytest.approx(
            [top[0] for top in (*tops, own)], abs=1e-4
        )
    lists = {"text": ["1 2 3", "4 5"], "token_ids_logprob": [[300], [301, 302]], "logprob_start_len": 1}
    found = [one["meta_info"]["input_token_ids_logprobs"] for one in await made(client, return_logprob=True, **lists)]
    assert [[token for _, token, _ in own[1]] for own in found] == lists["token_ids_logprob"]
    whole = await client.post("/v1/completions", {"prompt": "1 2 3", "max_tokens": 1, "prompt_logprobs": 1})
    more = await client.post(
        "/v1/completions", {"prompt": "1 2 3", "max_tokens": 1, "prompt_logprobs": 1, "logprob_token_ids": named}
    )
    assert whole.json()["choices"][0]["prompt_logprobs"] == more.json()["choices"][0]["prompt_logprobs"]
    both = await made(client, text=["1", "2"], return_logprob=True, token_ids_logprob=[[300], None])
    assert ["output_token_ids_logprobs" in one["meta_info"] for one in both] == [True, False]


async def test_a_picture_is_seen_where_its_placeholder_is(client):
    ask = [
        {"role": "user", "content": [image_part(colour), {"type": "text", "text": "colour?"}]} for colour in ("red",)
    ]
    chat = await client.post("/v1/chat/completions", {"messages": ask, "max_tokens": 6, "return_prompt_text": True})
    assert chat.status == 200, chat.content
    rendered = await client.post("/apply-template", {"messages": ask})
    text = rendered.json()["prompt"]
    wanted = chat.json()["choices"][0]["message"]["content"]
    for data in (picture("red"), [picture("red")], [{"url": f"data:image/png;base64,{picture('red')}"}]):
        assert (await made(client, text=text, image_data=data))["text"] == wanted
    both = await made(client, text=[text, "1 2 3"], image_data=[picture("red"), None])
    assert [one["text"] for one in both] == [wanted, (await made(client))["text"]]
    ids = client.state.tokenizer.encode(text, False)
    assert (await made(client, text=None, input_ids=ids, image_data=picture("red")))["text"] == wanted
    spelled = client.state.renderer.media.spelled["image"]
    for body, param in (
        ({"text": "no place", "image_data": picture()}, "image_data"),
        ({"text": text, "image_data": [picture(), picture()]}, "image_data"),
        ({"text": text + spelled, "image_data": picture()}, "image_data"),
        ({"text": text, "image_data": [{"format": "processor_output"}]}, "image_data[0]"),
        ({"text": text, "image_data": "!!!"}, "image_data[0]"),
        ({"text": [text], "image_data": picture()}, "image_data"),
        ({"text": text}, "text"),
    ):
        reply = await client.post("/generate", body)
        assert (reply.status, reply.error["param"]) == (400, param), reply.content


async def test_sounds_and_films_have_places_of_their_own(client):
    data = media.sound(media.tone(0.5)), media.film(media.ramp(8))
    sound, film = [base64.b64encode(each).decode() for each in data]
    parts = [
        {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{film}"}},
        image_part("red"),
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{sound}"}},
    ]
    ask = [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}]
    chat = await client.post("/v1/chat/completions", {"messages": ask, "max_tokens": 6})
    assert chat.status == 200, chat.content
    text = (await client.post("/apply-template", {"messages": ask})).json()["prompt"]
    answer = await made(client, text=text, audio_data=sound, video_data=[film], image_data=picture("red"))
    assert answer["text"] == chat.json()["choices"][0]["message"]["content"]
    assert answer["meta_info"]["prompt_tokens"] == chat.json()["usage"]["prompt_tokens"]
    for name in ("audio_data", "video_data"):
        reply = await client.post("/generate", {"text": "no place", name: sound})
        assert (reply.status, reply.error["param"]) == (400, name)


def image_part(colour):
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture(colour)}"}}


REFUSED = [
    ({}, 400, "text"),
    ({"text": "a", "input_ids": [5]}, 400, "text"),
    ({"text": []}, 400, "text"),
    ({"text": ["a"] * 9999}, 400, "text"),
    ({"input_ids": [[5], 6]}, 400, "input_ids[1]"),
    ({"input_ids": [[5], [99999]]}, 400, "input_ids[1][0]"),
    ({"text": "a", "sampling_params": {"temperature": 9}}, 400, "sampling_params.temperature"),
    ({"text": "a", "sampling_params": {"max_new_tokens": -5}}, 400, "sampling_params.max_new_tokens"),
    ({"text": "a", "sampling_params": {"stop_regex": "a"}}, 400, "sampling_params.stop_regex"),
    ({"text": "a", "sampling_params": {"top_k": "x"}}, 400, "sampling_params.top_k"),
    ({"text": "a", "sampling_params": {"min_new_tokens": "x"}}, 400, "sampling_params.min_new_tokens"),
    ({"text": ["a", "b"], "sampling_params": [{}, {"top_p": 7}]}, 400, "sampling_params[1].top_p"),
    ({"text": ["a", "b"], "sampling_params": [{}]}, 400, "sampling_params"),
    ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, 400, "sampling_params.n"),
    ({"text": "a", "sampling_params": {"json_schema": '{"type": "objct"}'}}, 400, "sampling_params.json_schema.type"),
    ({"text": "a", "return_logprob": True, "top_logprobs_num": 100}, 400, "top_logprobs_num"),
    ({"text": "a", "return_logprob": True, "logprob_start_len": 99}, 400, "logprob_start_len"),
    ({"text": "a", "return_logprob": True, "logprob_start_len": -2}, 400, "logprob_start_len"),
    ({"text": "a", "return_logprob": True, "token_ids_logprob": [99999]}, 400, "token_ids_logprob[0]"),
    ({"text": ["a", "b"], "token_ids_logprob": [[5], 6]}, 400, "token_ids_logprob"),
    ({"text": ["a", "b"], "return_logprob": [True]}, 400, "return_logprob"),
    ({"text": ["a", "b"], "rid": ["x"]}, 400, "rid"),
    ({"text": "a", "rid": "\n"}, 400, "rid"),
    ({"text": "a", "lora_path": "none"}, 404, "lora_path"),
    ({"text": ["a", "b"], "lora_path": ["x", None]}, 400, "lora_path"),
    ({"text": "a", "model": "other"}, 404, "model"),
    ({"text": "a", "session_params": {"id": "s"}}, 400, "session_params"),
    ({"text": "a", "custom_logit_processor": "x"}, 400, "custom_logit_processor"),
    ({"text": "a", "mirostat": 2}, 400, "mirostat"),
    ({"text": "a", "max_new_tokens": 5}, 400, "max_new_tokens"),
    ({"text": "a", "cache_salt": "a@b"}, 400, "cache_salt"),
    ({"text": "a", "priority": 3}, 400, "priority"),
    ({"text": "a", "return_routed_experts": True}, 400, "return_routed_experts"),
]


@pytest.mark.parametrize(("body", "status", "param"), REFUSED)
async def test_wrong_bodies_are_refused_by_the_clients_names(client, body, status, param):
    reply = await client.post("/generate", body)
    assert (reply.status, reply.error["param"]) == (status, param), reply.error
    assert reply.error["message"].startswith((param.partition("[")[0], "model other", "model none")), reply.error


async def test_prompts_and_answers_are_counted_together(serve):
    client = serve(limits={"max_choices": 4})
    body = {"text": ["a"] * 3, "sampling_params": {"n": 2, "max_new_tokens": 1}}
    reply = await client.post("/generate", body)
    assert (reply.status, reply.error["param"]) == (400, "sampling_params.n")
    assert (await client.post("/generate", body | {"text": ["a"] * 2})).status == 200


async def test_ignored_params_are_named(client):
    reply = await client.post("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 1, "odd": 1}, "even": 1})
    assert reply.status == 200, reply.content
    assert reply.reply_headers["x-ignored-fields"] == "even, sampling_params.odd"


async def test_bodies_without_a_json_type_are_taken_if_no_page_sends_them(client):
    body, kind = orjson.dumps({"text": "hi", "sampling_params": SHORT}), {"content-type": "text/plain"}
    assert (await client.post("/generate", body=body, headers=kind)).status == 200
    page = {**kind, "origin": "http://localhost:8000", "host": "localhost:8000"}
    assert (await client.post("/generate", body=body, headers=page)).status == 415


@pytest.mark.parametrize("body", [{"rid": "a1"}, {"abort_all": True}])
async def test_answers_are_ended_by_their_id(client, body):
    without_end(client)
    call = client.call(
        "POST", "/generate", {"text": "1", "rid": "a1", "stream": True, "sampling_params": {"max_new_tokens": 4000}}
    )
    call.start()
    await until(lambda: call.writes)
    assert (await client.post("/abort_request", {"rid": "other"})).status == 200
    assert (await client.post("/abort_request", body)).status == 200
    await call.finish()
    assert events_of(call)[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await client.post("/abort_request", {})).status == 400


# -- other routes


async def test_facts_of_the_model(client):
    found = (await client.get("/get_model_info")).json()
    assert found == (await client.get("/model_info")).json()
    assert (found["model_path"], found["tokenizer_path"], found["weight_version"]) == (
        "omniloop",
        "omniloop",
        "default",
    )
    assert found["is_generation"] is True


async def test_health_computes_a_token(client, submitted):
    first = await asyncio.gather(*(client.get("/health_generate") for _ in range(5)))
    assert [reply.status for reply in first] == [200] * 5
    assert len(submitted) == 1
    client.state.engine.pause()
    try:
        assert (await client.get("/health_generate")).status == 200
    finally:
        client.state.engine.resume()
    assert len(submitted) == 1


async def test_health_is_not_ready_while_the_server_starts_or_the_engine_stands_still(serve, monkeypatch):
    assert (await serve(phase="starting").get("/health_generate")).status == 503
    client = serve()
    engine = client.state.engine
    monkeypatch.setattr(engine, "config", dataclasses.replace(engine.config, step_timeout=0.05))
    monkeypatch.setattr(engine, "submit", lambda request: Silent())
    reply = await client.get("/health_generate")
    assert (reply.status, reply.error["reason"]) == (503, "stalled")


class Silent:
    """A stream without a token."""

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        pass

    def __aiter__(self):
        return self

    async def __anext__(self):
        await asyncio.get_running_loop().create_future()


async def test_flushing_forgets_prefixes_and_waits_for_requests(serve):
    client = serve(server={"enable_dev_endpoints": True, "admin_api_key": "boss"})
    key = {"x-api-key": "boss"}
    text = "a text whose beginning is found again " * 9
    for method in ("GET", "POST"):
        await made(client, text=text)
        assert (await made(client, text=text))["meta_info"]["cached_tokens"] > 0
        assert (await client.call(method, "/flush_cache", headers=key).finish()).status == 200
        assert (await made(client, text=text))["meta_info"]["cached_tokens"] == 0
    without_end(client)
    call = client.call("POST", "/generate", {"text": text, "stream": True, "sampling_params": {"max_new_tokens": 4000}})
    call.start()
    await until(lambda: call.writes)
    assert (await client.post("/flush_cache", headers=key)).status == 400
    call.leave()
    await call.finish()
    assert (await serve().post("/flush_cache")).status == 404
